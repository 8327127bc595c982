"""What must hold between settings, seen before anything starts: all problems at once, each with key, value and fix."""

from __future__ import annotations

import math

from trainer.config.schema import Config, OptimizerConfig, ViewsConfig, flatten

MOST_SIDES = 8  # of torch.compile: more shapes of one function it refuses
LEAST_FAILED_STEPS_FP16 = 16  # a scale of 2^16 halved so often is 1

# key: (least, most), both allowed; None: no limit
_RANGES: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, 2**63 - 1),
    "max_steps": (0, None),
    "timeout_minutes": (0.01, None),
    "stop_timeout_seconds": (0.1, None),
    "max_idle_restarts": (1, None),
    "data.images_per_step": (1, None),
    "data.threads": (0, 1024),
    "data.expected_images": (0, None),
    "data.read_ahead_steps": (1, None),
    "data.prefetch_batches": (1, 16),
    "data.decode_cache_gib": (0, None),
    "data.hw_decoder_load": (0, 1),
    "data.decoder_hint": (0, None),
    "data.max_image_pixels": (1, 178_956_970),
    "data.max_classes": (1, 10_000_000),
    "data.max_bad_share": (0, 1),
    "views.num_views": (2, None),
    "views.side": (8, None),
    "views.early_sides": (8, None),
    "views.early_side_epochs": (1, None),
    "views.flip_probability": (0, 1),
    "views.color_probability": (0, 1),
    "views.brightness": (0, None),
    "views.contrast": (0, None),
    "views.saturation": (0, None),
    "views.hue": (0, 0.5),
    "views.gray_probability": (0, 1),
    "views.blur_probability": (0, 1),
    "views.blur_window": (1, None),
    "model.embedding_size": (1, None),
    "model.projector_hidden": (1, None),
    "model.activation_memory_budget": (0, 1),
    "loss.slice_size": (2, None),
    "loss.iterations": (1, None),
    "loss.permutation_block": (1, None),
    "loss.eps": (0, 0.99),
    "loss.max_failed_steps": (0, None),
    "optimizer.accumulation_steps": (1, None),
    "optimizer.images_per_micro_batch": (0, None),
    "optimizer.learning_rate": (0, None),
    "optimizer.weight_decay": (0, None),
    "optimizer.momentum": (0, 1),
    "optimizer.trust_coefficient": (0, None),
    "optimizer.epochs": (1, None),
    "optimizer.warmup_epochs": (0, None),
    "optimizer.warmup_steps": (0, None),
    "optimizer.drop_factor": (0, 1),
    "checkpoint.every_steps": (0, None),
    "checkpoint.every_minutes": (0, None),
    "checkpoint.keep_last": (1, None),
    "checkpoint.keep_every_steps": (0, None),
    "checkpoint.keep_every_epochs": (0, None),
    "checkpoint.keep_every_epochs_after_drop": (0, None),
    "log.every_steps": (1, None),
    "log.stall_seconds": (0.1, None),
    "evaluate.images_per_batch": (1, None),
    "evaluate.probe_epochs": (1, None),
    "evaluate.probe_batch_size": (1, None),
    "evaluate.probe_rate_start": (1e-12, None),
    "evaluate.probe_rate_end": (1e-12, None),
    "evaluate.probe_weight_decay": (0, None),
    "evaluate.knn_k": (1, None),
}


def check(config: Config) -> list[str]:
    """Every problem that the config alone shows; an empty list where there is none."""
    return [
        *_ranges(config),
        *_views(config.views),
        *_slices(config),
        *_accumulation(config),
        *_early_sides(config),
        *_precision(config),
        *_optimizer(config.optimizer),
    ]


def _ranges(config: Config) -> list[str]:
    problems = []
    for key, value in flatten(config).items():
        least, most = _RANGES.get(key, (None, None))
        numbers = [n for n in (value if isinstance(value, tuple) else (value,)) if isinstance(n, (int, float))]
        if not all(map(math.isfinite, numbers)):
            problems.append(f"{key} is {value}: give a finite number")
        if least is not None and any(n < least for n in numbers):
            problems.append(f"{key} is {value}: it must be at least {least:.12g}")
        if most is not None and any(n > most for n in numbers):
            problems.append(f"{key} is {value}: it must be at most {most:.12g}")
    return problems


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
    if v.test_resize < v.side:
        problems.append(f"views.test_resize is {v.test_resize}: set it to views.side ({v.side}) or more")
    if len(v.early_sides) != len(v.early_side_epochs) or list(v.early_side_epochs) != sorted(set(v.early_side_epochs)):
        problems.append(
            f"views.early_sides is {list(v.early_sides)} with early_side_epochs {list(v.early_side_epochs)}: give as many "
            "epochs as sides, rising"
        )
    if min(v.std) <= 0:
        problems.append(f"views.std is {list(v.std)}: every channel's must be above 0")
    return problems


def _slices(config: Config) -> list[str]:
    """What whitening needs: slices taller than the embedding is wide, and images that divide into slices."""
    images, size, k = config.data.images_per_step, config.loss.slice_size, config.model.embedding_size
    block = config.loss.permutation_block
    problems = []
    if size <= k:
        problems.append(
            f"loss.slice_size is {size} with model.embedding_size {k}: a slice needs more rows than columns, else its "
            f"covariance is singular; the paper takes {2 * k}"
        )
    if images % size:
        fits = {max(images // size, 1) * size, -(-images // size) * size}
        problems.append(
            f"data.images_per_step is {images}, not a multiple of loss.slice_size {size}: "
            f"take {' or '.join(map(str, sorted(fits)))}"
        )
    if config.loss.iterations > 1 and (block % size or images % block):
        problems.append(
            f"loss.permutation_block is {block}: with loss.iterations {config.loss.iterations} it must be a multiple "
            f"of loss.slice_size {size} and divide data.images_per_step {images}; take {images}"
        )
    return problems


def _accumulation(config: Config) -> list[str]:
    """Parts hold whole slices of the images of one rank; how many ranks there are only the start knows."""
    parts, images = config.optimizer.accumulation_steps, config.data.images_per_step
    problems = []
    problems += [
        f"{name} is true with compile false: set compile to auto or true, since it is an option of it"
        for name in ("cuda_graphs", "autotune")
        if getattr(config, name) and config.compile == "false"
    ]
    if parts > 1 and config.optimizer.images_per_micro_batch:
        problems.append(
            f"optimizer.accumulation_steps is {parts} and optimizer.images_per_micro_batch "
            f"{config.optimizer.images_per_micro_batch}: give one"
        )
    if parts > 1 and images % (parts * config.loss.slice_size):
        problems.append(
            f"optimizer.accumulation_steps is {parts}: data.images_per_step {images} does not divide into so many parts of "
            f"whole slices of {config.loss.slice_size}; take {divisors(images // config.loss.slice_size)}"
        )
    return problems


def divisors(number: int) -> str:
    """In words; 1 for 0."""
    found = [n for n in range(1, number + 1) if number % n == 0]
    return ", ".join(map(str, found)) or "1"


def _early_sides(config: Config) -> list[str]:
    sides, ends, epochs = config.views.early_sides, config.views.early_side_epochs, config.optimizer.epochs
    problems = []
    if ends and ends[-1] >= epochs:
        problems.append(f"views.early_side_epochs is {list(ends)}: the last must be below optimizer.epochs {epochs}")
    if any(side >= config.views.side for side in sides):
        problems.append(f"views.early_sides is {list(sides)}: each must be below views.side {config.views.side}")
    if len(sides) >= MOST_SIDES:
        problems.append(f"views.early_sides has {len(sides)} sides: {MOST_SIDES - 1} at most (each is compiled anew)")
    return problems


def _precision(config: Config) -> list[str]:
    if config.precision == "fp16" and config.loss.max_failed_steps < LEAST_FAILED_STEPS_FP16:
        return [
            f"loss.max_failed_steps is {config.loss.max_failed_steps} with precision fp16, whose first steps overflow until "
            f"the loss scale fits: set it to {LEAST_FAILED_STEPS_FP16} or more"
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
