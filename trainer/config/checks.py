"""Check the settings before a run starts. All problems are reported together, each with key, value and fix."""

from __future__ import annotations

import math

from trainer.config.evaluation import PROTOCOLS
from trainer.config.names import closest
from trainer.config.schema import METHODS, Config, OptimizerConfig, ViewsConfig
from trainer.config.setting import all_settings, allowed_range

MOST_SIZES = 8  # torch.compile refuses more shapes of one function
MOST_TAPS_TRITON = 25  # the largest blur of kernels/augment_triton.py
LEAST_SKIPPED_STEPS_FP16 = 16  # halvings that reduce the initial loss scale of 2^16 to 1


def check(config: Config, *, method: bool = True) -> list[str]:
    """Return all problems that the config alone shows. method: whether to check the sizes that the method needs."""
    # The checks after this one read the section of the method, so the method must exist.
    if config.method not in METHODS:
        hint = closest(config.method, METHODS) or f": choose one of {', '.join(METHODS)}"
        return [f"method is {config.method!r}, which does not exist{hint}"]
    # A command that computes no loss accepts sizes that the method would refuse.
    of_method: list[str] = []
    if method:
        of_method = [*config.method_settings.problems(config), *_compile_options(config), *_micro_batches(config)]
    return [
        *_ranges(config),
        *_views(config.views),
        *_augment_backend(config),
        *of_method,
        *_early_sizes(config),
        *_precision(config),
        *_optimizer(config.optimizer),
        *_evaluation(config),
    ]


def _ranges(config: Config) -> list[str]:
    """Check each number, and each number of a list, against the range of its setting."""
    problems = []
    for key, declared, value in all_settings(config):
        least, most = allowed_range(declared)
        values = value if isinstance(value, tuple) else (value,)
        numbers = [n for n in values if isinstance(n, (int, float))]
        shown = list(value) if isinstance(value, tuple) else value  # as the user writes it
        # NaN passes both comparisons below, so it needs its check.
        if not all(map(math.isfinite, numbers)):
            problems.append(f"{key} is {shown}: give a finite number")
        if least is not None and any(n < least for n in numbers):
            problems.append(f"{key} is {shown}: it must be at least {least:.12g}")
        if most is not None and any(n > most for n in numbers):
            problems.append(f"{key} is {shown}: it must be at most {most:.12g}")
    return problems


def _views(v: ViewsConfig) -> list[str]:
    problems = []
    # Each of these is a range from a smaller to a larger number.
    for key in ("crop_area", "crop_ratio", "blur_sigma"):
        low, high = getattr(v, key)
        if not 0 < low <= high:
            problems.append(f"views.{key} is [{low:g}, {high:g}]: give two numbers above 0, the smaller one first")
    if v.crop_area[1] > 1:
        problems.append(f"views.crop_area is {list(v.crop_area)}: give at most 1, the whole image")
    if v.blur_window % 2 == 0:
        problems.append(
            f"views.blur_window is {v.blur_window}: give an odd number of taps, such as {v.blur_window + 1}"
        )
    for key in ("blur_probability", "solarize_probability"):
        value = getattr(v, key)
        if isinstance(value, tuple) and len(value) != v.num_views:
            problems.append(
                f"views.{key} is {list(value)} with views.num_views {v.num_views}: give one number, or one for each view"
            )
    if v.eval_resize < v.size:
        problems.append(f"views.eval_resize is {v.eval_resize}: set it to views.size ({v.size}) or more")
    # Equal or falling epochs would leave a size without a single step.
    sizes = list(v.early_sizes)
    epochs = list(v.early_size_epochs)
    is_increasing = epochs == sorted(set(epochs))
    if len(sizes) != len(epochs) or not is_increasing:
        problems.append(
            f"views.early_sizes is {sizes} with early_size_epochs {epochs}: give one epoch for each size, in increasing order"
        )
    if min(v.std) <= 0:
        problems.append(f"views.std is {list(v.std)}: give a number above 0 for each channel")
    return problems


def _augment_backend(config: Config) -> list[str]:
    v = config.views
    # The graph cuts a blur at 3 sigma.
    taps = min(v.blur_window, 2 * math.ceil(3 * v.blur_sigma[1]) + 1)
    if config.data.augment_backend == "dali" or taps <= MOST_TAPS_TRITON:
        return []
    return [
        f"data.augment_backend is triton with a blur of {taps} taps (views.blur_window {v.blur_window}, views.blur_sigma "
        f"{list(v.blur_sigma)}): its kernels take at most {MOST_TAPS_TRITON}, set the backend to dali"
    ]


def _evaluation(config: Config) -> list[str]:
    problems = []
    for name in config.evaluate.protocols:
        if name not in (*PROTOCOLS, "all"):
            hint = closest(name, PROTOCOLS) or f": choose from {', '.join(PROTOCOLS)}, or all"
            problems.append(f"evaluate.protocols names {name!r}, which does not exist{hint}")
    for section in ("linear_sgd", "finetune"):
        low, high = getattr(config, section).crop_area
        if not 0 < low <= high <= 1:
            problems.append(
                f"{section}.crop_area is [{low:g}, {high:g}]: give two shares above 0 and at most 1, the smaller one first"
            )
    lists = {
        "evaluate.protocols": config.evaluate.protocols,
        "linear_sgd.learning_rates": config.linear_sgd.learning_rates,
        "linear_sgd.weight_decays": config.linear_sgd.weight_decays,
        "knn_cosine.k": config.knn_cosine.k,
        "few_labels.shares": config.few_labels.shares,
        "finetune.shares": config.finetune.shares,
    }
    for key, values in lists.items():
        # Each value names a figure, so none may occur twice.
        if not values or len(set(values)) < len(values):
            problems.append(f"{key} is {list(values)}: give at least one value, and each only once")
    f = config.finetune
    if len(f.shares) != len(f.epochs):
        problems.append(
            f"finetune.epochs is {list(f.epochs)}: give one number for each of finetune.shares {list(f.shares)}"
        )
    return problems


def _micro_batches(config: Config) -> list[str]:
    """Check the micro-batches as far as they do not depend on the number of ranks, which is only known at the start."""
    count = config.optimizer.accumulation_steps
    images = config.data.images_per_step
    unit = config.method_settings.indivisible_images(config)
    problems = []
    if count > 1 and config.optimizer.images_per_micro_batch:
        problems.append(
            f"optimizer.accumulation_steps is {count} and optimizer.images_per_micro_batch "
            f"{config.optimizer.images_per_micro_batch}: set only one of them"
        )
    # Micro-batches are equally large, and images that the loss needs together stay in one of them.
    if count > 1 and images % (count * unit):
        problems.append(
            f"optimizer.accumulation_steps is {count}: data.images_per_step {images} cannot be divided into that many "
            f"micro-batches of multiples of {unit} images, which {config.method} needs together; possible values: "
            f"{divisors(images // unit)}"
        )
    return problems


def _compile_options(config: Config) -> list[str]:
    if config.deterministic and config.autotune:
        return [
            "autotune is true with deterministic true, but it chooses kernels by their time: set one of them to false"
        ]
    if config.compile != "false":
        return []
    return [
        f"{name} is true with compile false: set compile to auto or true, or remove {name}"
        for name in ("cuda_graphs", "autotune")
        if getattr(config, name)
    ]


def divisors(number: int) -> str:
    """List the divisors of a number as text; 1 for 0."""
    found = [n for n in range(1, number + 1) if number % n == 0]
    return ", ".join(map(str, found)) or "1"


def _early_sizes(config: Config) -> list[str]:
    sizes = config.views.early_sizes
    ends = config.views.early_size_epochs
    epochs = config.optimizer.epochs
    problems = []
    # The run must have epochs left for views.size, the size that is evaluated.
    if ends and ends[-1] >= epochs:
        problems.append(f"views.early_size_epochs is {list(ends)}: set the last one below optimizer.epochs {epochs}")
    if any(size >= config.views.size for size in sizes):
        problems.append(f"views.early_sizes is {list(sizes)}: set each one below views.size {config.views.size}")
    if len(sizes) >= MOST_SIZES:
        problems.append(
            f"views.early_sizes has {len(sizes)} sizes: give at most {MOST_SIZES - 1}, since each is compiled"
        )
    return problems


def _precision(config: Config) -> list[str]:
    if config.precision == "fp16" and config.max_skipped_steps < LEAST_SKIPPED_STEPS_FP16:
        return [
            f"max_skipped_steps is {config.max_skipped_steps} with precision fp16, in which the first steps may overflow until "
            f"the loss scale fits: set it to {LEAST_SKIPPED_STEPS_FP16} or more"
        ]
    return []


def _optimizer(o: OptimizerConfig) -> list[str]:
    problems = []
    if o.warmup_epochs and o.warmup_steps:
        problems.append(
            f"optimizer.warmup_epochs is {o.warmup_epochs:g} and optimizer.warmup_steps {o.warmup_steps}: set only one of them"
        )
    if o.warmup_epochs > o.epochs:
        problems.append(
            f"optimizer.warmup_epochs is {o.warmup_epochs:g}: set it to at most optimizer.epochs {o.epochs}"
        )
    if o.name != "lars" and not o.rate_in_momentum:
        problems.append(
            f"optimizer.rate_in_momentum is false with optimizer.name {o.name}: only lars reads it, remove it"
        )
    if o.backend == "triton" and o.name in ("adam", "adamw"):
        problems.append(
            f"optimizer.backend is triton with optimizer.name {o.name}: its kernels compute lars, larc and sgd, set the "
            "backend to auto"
        )
    if o.start_learning_rate and not (o.warmup_epochs or o.warmup_steps):
        problems.append(
            f"optimizer.start_learning_rate is {o.start_learning_rate:g} without a warm-up, which alone reads it: set "
            "optimizer.warmup_epochs or optimizer.warmup_steps, or remove it"
        )
    if o.final_learning_rate and o.schedule != "cosine":
        problems.append(
            f"optimizer.final_learning_rate is {o.final_learning_rate:g} with optimizer.schedule {o.schedule}: only the "
            "cosine reads it, remove it"
        )
    # Drops are counted back from the end, so their numbers decrease in the order of time.
    drops = list(o.drop_epochs_before_end)
    is_decreasing = drops == sorted(set(drops), reverse=True)
    is_in_run = all(0 < epoch < o.epochs for epoch in drops)
    if o.schedule == "drops" and not (is_decreasing and is_in_run):
        problems.append(
            f"optimizer.drop_epochs_before_end is {drops}: give decreasing numbers between 0 and optimizer.epochs {o.epochs}"
        )
    return problems
