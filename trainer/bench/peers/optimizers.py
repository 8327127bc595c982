"""Compare our LARS with timm's LARS and torch's SGD, by updates of the experiment's model in alternating windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import timm.optim
import torch
from torch import Tensor, nn

from trainer.bench.timing import Window, interleave, spread, timed_after
from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks
from trainer.optimizer import build_optimizer, update

RATE = 1e-3  # with gradients of 1e-3 the weights hardly change, whatever the number of updates
Step = Callable[[], Any]


def compare_optimizers(config: Config, seconds: float, device: torch.device) -> dict[str, Any]:
    """Measure the microseconds of an update, and our speed as a multiple of each peer's.

    Every update gets the same random gradients. They are copied before each update, outside the measured time, because some
    optimizers change them."""
    # All optimizers get copies of the same gradients.
    made = optimizers(config, device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [p.shape for p in made["ours"][0].parameters()]
    gradients = [1e-3 * torch.randn(shape, device=device, generator=generator) for shape in shapes]
    windows = {name: _window(step, model, gradients, device) for name, (model, step) in made.items()}
    samples = interleave(windows, seconds)
    figures = {name: spread(values, 1e6) for name, values in samples.items()}
    ours = figures["ours"]["median"]
    return {
        "unit": "microseconds an update",
        "figures": figures,
        "times": {name: figure["median"] / ours for name, figure in figures.items() if name != "ours"},
        "parameters": sum(shape.numel() for shape in shapes),
        "tensors": len(shapes),
    }


def optimizers(config: Config, device: torch.device) -> dict[str, tuple[nn.Module, Step]]:
    """Build a separate model for each optimizer. Returns {name: (model, update)}."""
    settings = replace(config.optimizer, name="lars")
    common: dict[str, Any] = {
        "lr": RATE,
        "momentum": settings.momentum,
        "weight_decay": settings.weight_decay,
    }
    # SGD has no layer-wise rates, so its time shows what they cost.
    lars = partial(timm.optim.Lars, trust_coeff=settings.trust_coefficient, **common)
    sgd = partial(torch.optim.SGD, **common)
    peers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "timm_lars_foreach": partial(lars, foreach=True),
        "timm_lars": partial(lars, foreach=False),
        "sgd_foreach": partial(sgd, foreach=True),
    }
    if device.type == "cuda":
        peers["sgd_fused"] = partial(sgd, fused=True)
    # Ours is measured through `update`, as a step calls it.
    model = _model(config, device)
    ours = build_optimizer(model, settings, device)
    failed = torch.zeros((), dtype=torch.bool, device=device)
    made: dict[str, tuple[nn.Module, Step]] = {"ours": (model, lambda: update(ours, RATE, failed))}
    for name, build in peers.items():
        model = _model(config, device)
        optimizer = build(model.parameters())
        made[name] = (model, optimizer.step)
    return made


def _model(config: Config, device: torch.device) -> nn.Module:
    method = config.method_settings.build(config, Ranks(), device)
    return method.networks


def _window(step: Step, model: nn.Module, gradients: list[Tensor], device: torch.device) -> Window:
    """Return a timer of updates that restores the gradients before each."""
    own = [torch.empty_like(gradient) for gradient in gradients]
    for weight, gradient in zip(model.parameters(), own, strict=True):
        weight.grad = gradient

    def restore_gradients() -> None:
        torch._foreach_copy_(own, gradients)

    return timed_after(restore_gradients, lambda _: step(), device)
