"""BatchNorm with a residual and ReLU as torch operations: four custom operators, which Triton kernels compute.

torch.compile treats each operator as a unit, so a compiled graph runs the same kernels. They are registered through the
dispatcher's low-level interface for the reason that `kernels.torch_ops` gives. The all-reduce over ranks takes place between
them, so `trainer.models.fused_batch_norm` has the autograd function that joins them.

Shapes: x (P*N, C, ...) with P parts of separate statistics (P, C), weight and bias (C,) or None. `kernels.batch_norm_triton`
describes the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("wmse", "FRAGMENT")
_STATISTICS = "Tensor mean, Tensor var, Tensor? weight, Tensor? bias"


def channels_last(x: Tensor) -> Tensor:
    """Return x (R, C, ...) with its channels next to each other in memory; a copy only if they are not."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _kernels() -> Any:
    from kernels import batch_norm_triton  # loads triton, which machines without a GPU may lack

    return batch_norm_triton


def _moments(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    return _kernels().moments(channels_last(x), parts)


def _fake_moments(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    mean = x.new_empty(parts, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    return mean, torch.empty_like(mean)


def _normalise(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    relu: bool,
) -> Tensor:
    residual = None if residual is None else channels_last(residual)
    return _kernels().normalise(channels_last(x), mean, var, weight, bias, residual, eps, relu)


def _fake_normalise(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(channels_last(x))


def _sums(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    y = None if y is None else channels_last(y)
    return _kernels().backward_sums(channels_last(dy), channels_last(x), y, mean, var, weight, bias, eps, relu)


def _fake_sums(dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    g = dy.new_empty(0) if y is None else torch.empty_like(channels_last(dy))
    return mean.new_empty(2, *mean.shape), g


def _gradient(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Tensor | None,
    samples: int,
    eps: float,
    relu: bool,
) -> Tensor:
    dy, x = channels_last(dy), channels_last(x)
    return _kernels().backward_gradient(dy, x, mean, var, weight, bias, sums, samples, eps, relu)


def _fake_gradient(dy: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(channels_last(x))


def register(name: str, schema: str, implementation: Any, fake: Any) -> Any:
    """Declare the operator wmse::NAME, its implementation, and the shapes of its results for torch.compile; return it."""
    _library.define(name + schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"wmse::{name}", fake)
    return getattr(torch.ops.wmse, name)


moments = register("batch_norm_moments", "(Tensor x, int parts) -> (Tensor, Tensor)", _moments, _fake_moments)
normalise = register(
    "batch_norm_normalise",
    f"(Tensor x, {_STATISTICS}, Tensor? residual, float eps, bool relu) -> Tensor",
    _normalise,
    _fake_normalise,
)
sums = register(
    "batch_norm_sums",
    f"(Tensor dy, Tensor x, Tensor? y, {_STATISTICS}, float eps, bool relu) -> (Tensor, Tensor)",
    _sums,
    _fake_sums,
)
gradient = register(
    "batch_norm_gradient",
    f"(Tensor dy, Tensor x, {_STATISTICS}, Tensor? sums, int samples, float eps, bool relu) -> Tensor",
    _gradient,
    _fake_gradient,
)
