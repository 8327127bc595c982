"""Our LARS against timm's and against torch's SGD, one update of the experiment's model each, in windows that take turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import timm.optim
import torch
from torch import Tensor, nn

from trainer.bench.timing import Window, spread, take_turns, timed_after
from trainer.config.schema import Config, OptimizerConfig
from trainer.distributed.ranks import Ranks
from trainer.models.networks import build_encoder_projector
from trainer.optimizer import build_optimizer, update

RATE = 1e-3  # with gradients of 1e-3 weights stay about what they are, however many updates a window makes
Step = Callable[[], Any]


def compare_optimizers(config: Config, seconds: float, device: torch.device) -> dict[str, Any]:
    """Microseconds of an update, and how many times as fast as each peer ours is. Every update gets the same random
    gradients, put into place outside the clock, for some optimizers change them."""
    shapes = [p.shape for p in build_encoder_projector(config, Ranks()).parameters()]
    generator = torch.Generator(device).manual_seed(0)
    gradients = [1e-3 * torch.randn(shape, device=device, generator=generator) for shape in shapes]
    windows = {
        name: _window(step, model, gradients, device) for name, (model, step) in optimizers(config, device).items()
    }
    figures = {name: spread(samples) for name, samples in take_turns(windows, seconds).items()}
    return {
        "unit": "microseconds an update",
        "figures": figures,
        "times": {name: f["median"] / figures["ours"]["median"] for name, f in figures.items() if name != "ours"},
        "parameters": sum(shape.numel() for shape in shapes),
        "tensors": len(shapes),
    }


def optimizers(config: Config, device: torch.device) -> dict[str, tuple[nn.Module, Step]]:
    """name -> a model of its own and its update."""
    settings = replace(config.optimizer, name="lars")
    fused = [("sgd_fused", True)] if device.type == "cuda" else []
    made = {"ours": _ours(config, settings, device)}
    for name, foreach in (("timm_lars_foreach", True), ("timm_lars", False)):
        made[name] = _peer(config, device, lambda p, foreach=foreach: _timm(p, settings, foreach))
    for name, is_fused in (("sgd_foreach", False), *fused):
        made[name] = _peer(config, device, lambda p, is_fused=is_fused: _sgd(p, settings, is_fused))
    return made


def _ours(config: Config, settings: OptimizerConfig, device: torch.device) -> tuple[nn.Module, Step]:
    model = build_encoder_projector(config, Ranks()).to(device)
    optimizer = build_optimizer(model, settings, device)
    failed = torch.zeros((), dtype=torch.bool, device=device)
    return model, lambda: update(optimizer, RATE, failed)


def _peer(config: Config, device: torch.device, make: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, Step]:
    model = build_encoder_projector(config, Ranks()).to(device)
    return model, make(model.parameters()).step


def _timm(parameters: Any, settings: OptimizerConfig, foreach: bool) -> torch.optim.Optimizer:
    return timm.optim.Lars(
        parameters,
        lr=RATE,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        trust_coeff=settings.trust_coefficient,
        foreach=foreach,
    )


def _sgd(parameters: Any, settings: OptimizerConfig, fused: bool) -> torch.optim.Optimizer:
    way: dict[str, bool] = {"fused": True} if fused else {"foreach": True}
    return torch.optim.SGD(parameters, lr=RATE, momentum=settings.momentum, weight_decay=settings.weight_decay, **way)


def _window(step: Step, model: nn.Module, gradients: list[Tensor], device: torch.device) -> Window:
    own = [torch.empty_like(gradient) for gradient in gradients]
    for weight, gradient in zip(model.parameters(), own, strict=True):
        weight.grad = gradient

    def refresh() -> None:
        torch._foreach_copy_(own, gradients)

    return timed_after(refresh, lambda _: step(), device)
