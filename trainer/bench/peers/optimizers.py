"""Compare our LARS with timm's and with torch's SGD: one update of the experiment's model each, alternating."""

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

RATE = 1e-3  # with gradients of 1e-3 weights stay about what they are, however many updates a window makes
Step = Callable[[], Any]


def compare_optimizers(config: Config, seconds: float, device: torch.device) -> dict[str, Any]:
    """Measure the microseconds of an update, and how many times as fast as each peer ours is.

    Every update gets the same random gradients, copied outside the clock, since some optimizers change them."""
    made = optimizers(config, device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = [p.shape for p in made["ours"][0].parameters()]
    gradients = [1e-3 * torch.randn(shape, device=device, generator=generator) for shape in shapes]
    windows = {name: _window(step, model, gradients, device) for name, (model, step) in made.items()}
    figures = {name: spread(samples, 1e6) for name, samples in interleave(windows, seconds).items()}
    return {
        "unit": "microseconds an update",
        "figures": figures,
        "times": {name: f["median"] / figures["ours"]["median"] for name, f in figures.items() if name != "ours"},
        "parameters": sum(shape.numel() for shape in shapes),
        "tensors": len(shapes),
    }


def optimizers(config: Config, device: torch.device) -> dict[str, tuple[nn.Module, Step]]:
    """Return a model of its own and its update for each optimizer."""
    settings = replace(config.optimizer, name="lars")
    common: dict[str, Any] = {"lr": RATE, "momentum": settings.momentum, "weight_decay": settings.weight_decay}
    lars = partial(timm.optim.Lars, trust_coeff=settings.trust_coefficient, **common)
    sgd = partial(torch.optim.SGD, **common)
    peers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "timm_lars_foreach": partial(lars, foreach=True),
        "timm_lars": partial(lars, foreach=False),
        "sgd_foreach": partial(sgd, foreach=True),
    }
    if device.type == "cuda":
        peers["sgd_fused"] = partial(sgd, fused=True)
    model = _model(config, device)
    ours = build_optimizer(model, settings, device)
    failed = torch.zeros((), dtype=torch.bool, device=device)
    made: dict[str, tuple[nn.Module, Step]] = {"ours": (model, lambda: update(ours, RATE, failed))}
    for name, build in peers.items():
        model = _model(config, device)
        made[name] = (model, build(model.parameters()).step)
    return made


def _model(config: Config, device: torch.device) -> nn.Module:
    return config.method_settings.build(config, Ranks(), device).networks


def _window(step: Step, model: nn.Module, gradients: list[Tensor], device: torch.device) -> Window:
    own = [torch.empty_like(gradient) for gradient in gradients]
    for weight, gradient in zip(model.parameters(), own, strict=True):
        weight.grad = gradient
    return timed_after(lambda: torch._foreach_copy_(own, gradients), lambda _: step(), device)
