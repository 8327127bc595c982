"""Check a choice against its reference, then time it against the best settings so far, in alternating windows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.bench.compute import FixedSteps, fixed_steps, synthetic_views
from trainer.bench.timing import MIN_CALLS, Window, interleave, spread, timed
from trainer.config.schema import Config, OptimizerConfig
from trainer.distributed.ranks import Ranks
from trainer.losses.wmse import draw_permutations, wmse_loss
from trainer.optimizer import build_optimizer, gradient_norms, update
from trainer.setup import build_step
from trainer.tune.loader import loader_values, loader_window

FASTER = 1.02  # smallest ratio of the medians; the quartiles must not overlap either
CHECK_SIZE = 64  # px of the views in the check of a step, whose result hardly depends on their size
LOADER_WINDOWS = 5
# Largest relative error of any tensor: this, and four times the error of the settings that the choice is compared with.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Part:
    """One thing to check and to time for a config on a device."""

    values: Callable[[Config, torch.device], list[Tensor]]
    """Return the tensors that a choice must not change, on the CPU."""
    window: Callable[[Config, torch.device], Window]
    """Return the timer."""
    levels: bool = False
    """The values are pixels, which may be one level apart."""


@dataclass(frozen=True)
class Outcome:
    """The result of checking and timing a choice."""

    milliseconds: dict[str, float]
    """Medians of "before" and "after"; empty if it was not timed."""
    ratio: float
    """before / after; NaN if it was not timed."""
    taken: bool
    why: str
    """Why it is not taken, or how far the results were apart."""


def exact(config: Config) -> Config:
    """Return the reference of a config: float32, without compilation, and by torch's operations."""
    return replace(
        config,
        precision="fp32",
        compile="false",
        cuda_graphs=False,
        autotune=False,
        model=replace(config.model, batch_norm_backend="torch", activation_memory_budget=1.0),
        optimizer=replace(config.optimizer, backend="torch"),
        wmse=replace(config.wmse, backend="torch"),
        data=replace(config.data, augment_backend="dali", decoder="dali"),
    )


def compare(part_name: str, best: Config, choice: Config, device: torch.device, seconds: float) -> Outcome:
    """Check the choice, and time it against `best` for about `seconds`."""
    part = PARTS[part_name]
    # Free what the choice before has left.
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # Nothing is timed before its result is known to be right.
    reference = part.values(exact(best), device)
    error, problem = _check(part, reference, part.values(best, device), part.values(choice, device))
    if problem:
        return Outcome({}, float("nan"), False, f"refused: {problem}")
    try:
        before = part.window(best, device)
        before(1)
    except torch.OutOfMemoryError:
        part.window(choice, device)(1)
        return Outcome({}, float("nan"), True, "the settings so far run out of memory")
    windows = {"before": before, "after": part.window(choice, device)}
    windows["after"](1)  # compile and allocate
    # A window of a loader starts it anew, which is not timed, so there are few windows.
    times = interleave(
        windows, seconds, min_calls=MIN_CALLS[device.type], num_windows=LOADER_WINDOWS if part.levels else 0
    )
    spreads = {name: spread(samples, 1e3) for name, samples in times.items()}
    # A choice has to be faster by more than the noise.
    medians = {name: figure["median"] for name, figure in spreads.items()}
    ratio = medians["before"] / medians["after"]
    apart = spreads["after"]["quartile_3"] < spreads["before"]["quartile_1"]
    if ratio >= FASTER and apart:
        return Outcome(medians, ratio, True, error)
    return Outcome(medians, ratio, False, "not faster" if ratio < FASTER else "not faster than the noise")


def _check(part: Part, reference: list[Tensor], before: list[Tensor], after: list[Tensor]) -> tuple[str, str]:
    """Return the largest error in words, and why the choice is refused; empty: it is not."""
    if part.levels:
        levels = max(float((a - b).abs().max()) for a, b in zip(after, reference, strict=True))
        return f"{levels:.0f} level(s) apart", f"its pixels are {levels:.0f} levels apart" if levels > 1 else ""
    # A gradient that is 0 up to rounding, as that of a bias before BatchNorm, has no relative error.
    norms = [float(wanted.norm()) for wanted in reference]
    smallest = 1e-3 * max(norms)
    worst = 0.0
    for norm, wanted, one, other in zip(norms, reference, before, after, strict=True):
        own, found = (float((values - wanted).norm()) / max(norm, smallest) for values in (one, other))
        # This also refuses NaN.
        if not found <= TOLERANCE + 4 * own:
            return "", f"a result is {found:.2g} away from float32, those of the settings so far {own:.2g}"
        worst = max(worst, found)
    return f"within {worst:.1g} of float32", ""


# --- the loss alone ---


def _loss(config: Config, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return the function that computes loss and gradient for the images of a step."""
    images = config.data.images_per_step
    views = config.views.num_views
    wmse = config.wmse
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(views * images, config.model.embedding_size, generator=generator)
    v = v.to(device).requires_grad_()
    permutations = draw_permutations(wmse.iterations, images, torch.device("cpu"), generator).to(device)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        loss = wmse_loss(
            v,
            num_views=views,
            slice_size=wmse.slice_size,
            iterations=wmse.iterations,
            permutations=permutations,
            normalize=wmse.normalize,
            eps=wmse.eps,
            backend=wmse.backend,
            cholesky_float64=wmse.cholesky_float64,
        )
        return loss, torch.autograd.grad(loss, v)[0]

    return loss_and_gradient


def _loss_values(config: Config, device: torch.device) -> list[Tensor]:
    return [value.detach().cpu() for value in _loss(config, device)()]


def _loss_window(config: Config, device: torch.device) -> Window:
    return timed(_loss(config, device), device)


# --- the update alone ---


class _Updates:
    """Updates of the config's networks with fixed gradients."""

    def __init__(self, config: Config, device: torch.device) -> None:
        networks = config.method_settings.build(config, Ranks(), device).networks
        self.weights = [p for p in networks.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(networks, config.optimizer, device)
        self._sound = torch.zeros((), dtype=torch.bool, device=device)
        generator = torch.Generator().manual_seed(0)
        self._gradients = []
        for p in self.weights:
            gradient = 1e-3 * torch.randn(p.shape, generator=generator)
            self._gradients.append(torch.empty_like(p).copy_(gradient))

    def __call__(self, rate: float = 0.0) -> None:
        for p, gradient in zip(self.weights, self._gradients, strict=True):
            p.grad = gradient
        gradient_norms(self.optimizer, self._gradients)
        update(self.optimizer, rate, self._sound)


def _update_values(config: Config, device: torch.device) -> list[Tensor]:
    updates = _Updates(config, device)
    before = [p.detach().clone() for p in updates.weights]
    updates(1.0)
    return [(p.detach() - old).cpu() for p, old in zip(updates.weights, before, strict=True)]


def _update_window(config: Config, device: torch.device) -> Window:
    return timed(_Updates(config, device), device)


# --- a whole step ---


def _step_values(config: Config, device: torch.device) -> list[Tensor]:
    """Return loss and gradients of a step on small views; with SGD at a rate of 1 the change of a weight is its gradient."""
    small = min(config.views.size, CHECK_SIZE)
    plain = OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.0)
    config = replace(config, views=replace(config.views, size=small), optimizer=plain)
    step = build_step(config, Ranks(), device)
    weights = [p for p in step.method.networks.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in weights]
    result = step(synthetic_views(config, config.data.images_per_step, device), 0, 1.0)
    if result.skipped:
        raise ValueError("the step is skipped")
    changes = [(old - p.detach()).cpu() for p, old in zip(weights, before, strict=True)]
    return [result.loss.cpu().view(1), *changes]


def _step_window(config: Config, device: torch.device) -> Window:
    steps: FixedSteps = fixed_steps(config, Ranks(), device)
    steps.warm_up()
    return steps.window()


PARTS: dict[str, Part] = {
    "loss": Part(_loss_values, _loss_window),
    "optimizer": Part(_update_values, _update_window),
    "step": Part(_step_values, _step_window),
    "loader": Part(loader_values, loader_window, levels=True),
}
