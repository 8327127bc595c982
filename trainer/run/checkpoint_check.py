"""Check whether the content of a checkpoint can be used; its digest only shows that it is what was saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import OptimizerConfig
from trainer.optimizer import build_optimizer


def first_difference(found: Any, wanted: Any, where: str) -> str | None:
    """Describe the first difference in structure between `found` and `wanted`; None if there is none.

    wanted: nested dicts of tensors, whose dtype and shape count, and of types, which the values must have. Keys of `found` that
    are not in `wanted` count as well."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return f"{where} is a {type(found).__name__}, not a dict"
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            if key not in found or key not in wanted:
                return f"{where} has no {key}" if key in wanted else f"{where} has {key!r}, which is unknown here"
            if difference := first_difference(found[key], wanted[key], f"{where}.{key}"):
                return difference
        return None
    kind = Tensor if isinstance(wanted, Tensor) else wanted
    if type(found) is not kind:
        return f"{where} is a {type(found).__name__}, not a {kind.__name__}"
    if isinstance(wanted, Tensor) and (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{where} is {_describe(found)}, not {_describe(wanted)}"
    return None


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def first_not_finite(value: Any, where: str) -> str | None:
    """Return the name of the first tensor in nested dicts and lists that holds NaN or infinity; None if all are finite."""
    if isinstance(value, Tensor):
        return None if bool(value.isfinite().all()) else where
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return next((name for key, item in items if (name := first_not_finite(item, f"{where}.{key}"))), None)


def wanted_moments(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> dict[int, dict[str, Any]]:
    """Return what the state of an optimizer of this config must hold after an update: tensors on the meta device, by
    parameter."""
    trial = nn.utils.skip_init(nn.Linear, 1, 1, bias=False)  # draws no random numbers
    example = build_optimizer(trial, replace(config, backend="auto"), torch.device("cpu"))
    trial.weight.grad = torch.zeros_like(trial.weight)
    example.step()
    parts = example.state[trial.weight]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        number: {name: part if part.dim() == 0 else torch.empty_like(p, device="meta") for name, part in parts.items()}
        for number, p in enumerate(parameters)
    }
