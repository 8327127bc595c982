"""What must hold between settings, seen before anything starts: all problems at once, each with key, value and fix."""

from __future__ import annotations

import math

from trainer.config.names import closest
from trainer.config.schema import METHODS, Config, OptimizerConfig, ViewsConfig, flatten
from trainer.config.setting import all_settings, allowed_range

MOST_SIZES = 8  # of torch.compile: more shapes of one function it refuses
LEAST_SKIPPED_STEPS_FP16 = 16  # a scale of 2^16 halved so often is 1


def check(config: Config, *, method: bool = True) -> list[str]:
    """Return every problem that the config alone shows. method: whether its sizes must fit the method."""
    if config.method not in METHODS:
        near = closest(config.method, METHODS) or f": choose one of {', '.join(METHODS)}"
        return [f"method is {config.method!r}, which does not exist{near}"]
    return [
        *_ranges(config),
        *_views(config.views),
        *(config.method_settings.problems(config) if method else []),
        *_other_methods(config),
        *(_micro_batches(config) if method else []),
        *_early_sizes(config),
        *_precision(config),
        *_optimizer(config.optimizer),
    ]


def _ranges(config: Config) -> list[str]:
    problems = []
    for key, declared, value in all_settings(config):
        least, most = allowed_range(declared)
        numbers = [n for n in (value if isinstance(value, tuple) else (value,)) if isinstance(n, (int, float))]
        if not all(map(math.isfinite, numbers)):
            problems.append(f"{key} is {value}: give a finite number")
        if least is not None and any(n < least for n in numbers):
            problems.append(f"{key} is {value}: it must be at least {least:.12g}")
        if most is not None and any(n > most for n in numbers):
            problems.append(f"{key} is {value}: it must be at most {most:.12g}")
    return problems


def _other_methods(config: Config) -> list[str]:
    """Refuse settings of methods that are not used: they would have no effect."""
    default = flatten(Config())
    return [
        f"{key} is {value}, but method is {config.method}: remove it, or set method to {key.partition('.')[0]}"
        for key, value in flatten(config).items()
        if key.partition(".")[0] in METHODS and not key.startswith(f"{config.method}.") and value != default[key]
    ]


def _views(v: ViewsConfig) -> list[str]:
    problems = []
    for key in ("crop_area", "crop_ratio", "blur_sigma"):
        low, high = getattr(v, key)
        if not 0 < low <= high:
            problems.append(f"views.{key} is [{low:g}, {high:g}]: give two numbers above 0, the smaller first")
    if v.crop_area[1] > 1:
        problems.append(f"views.crop_area is {list(v.crop_area)}: a crop is at most 1, the whole image")
    if v.blur_window % 2 == 0:
        problems.append(f"views.blur_window is {v.blur_window}: the number of taps is odd, take {v.blur_window + 1}")
    if v.eval_resize < v.size:
        problems.append(f"views.eval_resize is {v.eval_resize}: set it to views.size ({v.size}) or more")
    if len(v.early_sizes) != len(v.early_size_epochs) or list(v.early_size_epochs) != sorted(set(v.early_size_epochs)):
        problems.append(
            f"views.early_sizes is {list(v.early_sizes)} with early_size_epochs {list(v.early_size_epochs)}: give as many "
            "epochs as sizes, rising"
        )
    if min(v.std) <= 0:
        problems.append(f"views.std is {list(v.std)}: every channel's must be above 0")
    return problems


def _micro_batches(config: Config) -> list[str]:
    """Check what does not depend on the number of ranks, which only the start knows."""
    count = config.optimizer.accumulation_steps
    images = config.data.images_per_step
    unit = config.method_settings.indivisible_images(config)
    problems = [
        f"{name} is true with compile false: set compile to auto or true, since it is an option of it"
        for name in ("cuda_graphs", "autotune")
        if getattr(config, name) and config.compile == "false"
    ]
    if count > 1 and config.optimizer.images_per_micro_batch:
        problems.append(
            f"optimizer.accumulation_steps is {count} and optimizer.images_per_micro_batch "
            f"{config.optimizer.images_per_micro_batch}: give one"
        )
    if count > 1 and images % (count * unit):
        problems.append(
            f"optimizer.accumulation_steps is {count}: data.images_per_step {images} can't be divided into that many "
            f"micro-batches of multiples of {unit} images, which {config.method} needs together; take "
            f"{divisors(images // unit)}"
        )
    return problems


def divisors(number: int) -> str:
    """In words; 1 for 0."""
    found = [n for n in range(1, number + 1) if number % n == 0]
    return ", ".join(map(str, found)) or "1"


def _early_sizes(config: Config) -> list[str]:
    sizes = config.views.early_sizes
    ends = config.views.early_size_epochs
    epochs = config.optimizer.epochs
    problems = []
    if ends and ends[-1] >= epochs:
        problems.append(f"views.early_size_epochs is {list(ends)}: the last must be below optimizer.epochs {epochs}")
    if any(size >= config.views.size for size in sizes):
        problems.append(f"views.early_sizes is {list(sizes)}: each must be below views.size {config.views.size}")
    if len(sizes) >= MOST_SIZES:
        problems.append(f"views.early_sizes has {len(sizes)} sizes: {MOST_SIZES - 1} at most (each is compiled anew)")
    return problems


def _precision(config: Config) -> list[str]:
    if config.precision == "fp16" and config.max_skipped_steps < LEAST_SKIPPED_STEPS_FP16:
        return [
            f"max_skipped_steps is {config.max_skipped_steps} with precision fp16, whose first steps overflow until "
            f"the loss scale fits: set it to {LEAST_SKIPPED_STEPS_FP16} or more"
        ]
    return []


def _optimizer(o: OptimizerConfig) -> list[str]:
    problems = []
    if o.warmup_epochs and o.warmup_steps:
        problems.append(
            f"optimizer.warmup_epochs is {o.warmup_epochs:g} and optimizer.warmup_steps {o.warmup_steps}: give one"
        )
    if o.warmup_epochs > o.epochs:
        problems.append(f"optimizer.warmup_epochs is {o.warmup_epochs:g}: longer than optimizer.epochs {o.epochs}")
    if o.backend == "triton" and o.name != "lars":
        problems.append(
            f"optimizer.backend is triton with optimizer.name {o.name}: its kernels are those of lars, take auto"
        )
    drops = list(o.drop_epochs_before_end)
    falling = drops == sorted(set(drops), reverse=True)
    if o.schedule == "drops" and not (falling and all(0 < epoch < o.epochs for epoch in drops)):
        problems.append(
            f"optimizer.drop_epochs_before_end is {drops}: give falling numbers below optimizer.epochs {o.epochs}"
        )
    return problems
