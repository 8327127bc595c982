"""Checks of the content of a checkpoint. The digest only shows that the content is what was saved, not that it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import OptimizerConfig
from trainer.optimizer import build_optimizer


def first_difference(found: Any, wanted: Any, where: str) -> str | None:
    """Describe the first difference in structure between `found` and `wanted`; None if they are alike.

    wanted: nested dicts. A tensor in them requires a tensor of its shape and dtype, a type requires a value of that
    type. A key of `found` that `wanted` lacks is a difference as well. where: name of `found` in the description."""
    if isinstance(wanted, dict):
        return _first_difference_of_dicts(found, wanted, where)
    kind = Tensor if isinstance(wanted, Tensor) else wanted
    # Compare types exactly: in Python, True is also an int.
    if type(found) is not kind:
        return f"{where} is a {type(found).__name__}, not a {kind.__name__}"
    if not isinstance(wanted, Tensor):
        return None
    is_alike = found.shape == wanted.shape and found.dtype == wanted.dtype
    return None if is_alike else f"{where} is {_describe(found)}, not {_describe(wanted)}"


def _first_difference_of_dicts(found: Any, wanted: dict[Any, Any], where: str) -> str | None:
    if not isinstance(found, dict):
        return f"{where} is a {type(found).__name__}, not a dict"
    for key, item in wanted.items():
        if key not in found:
            return f"{where} has no {key}"
        # The first difference says enough: others often follow from it.
        difference = first_difference(found[key], item, f"{where}.{key}")
        if difference:
            return difference
    for key in found:
        if key not in wanted:
            return f"{where} has the unknown key {key!r}"
    return None


def _describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} of {dtype}"


def first_not_finite(value: Any, where: str) -> str | None:
    """Return the name of the first tensor in nested dicts and lists that holds NaN or infinity; None if all are finite."""
    if isinstance(value, Tensor):
        return None if bool(value.isfinite().all()) else where
    # Plain values have no items, so they count as finite.
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        name = first_not_finite(item, f"{where}.{key}")
        if name:
            return name
    return None


def wanted_moments(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> dict[int, dict[str, Any]]:
    """Return the state that this optimizer must have after an update, as meta tensors: parameter number -> name -> tensor."""
    # One update of a tiny model shows which tensors this kind of optimizer keeps. skip_init draws no random numbers.
    tiny = nn.utils.skip_init(nn.Linear, 1, 1, bias=False)
    example = build_optimizer(tiny, replace(config, backend="auto"), torch.device("cpu"))
    tiny.weight.grad = torch.zeros_like(tiny.weight)
    example.step()
    example_state = example.state[tiny.weight]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    # A moment has the shape of its parameter. Scalars, such as AdamW's step count, have the same shape for all parameters.
    moments: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        like_parameter = torch.empty_like(parameter, device="meta")
        moments[number] = {}
        for name, example_moment in example_state.items():
            moments[number][name] = example_moment if example_moment.dim() == 0 else like_parameter
    return moments
