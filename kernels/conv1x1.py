"""1x1 convolution between two BatchNorms as torch operations: four custom operators, which Triton kernels compute.

They are registered like those of `kernels.batch_norm`, between which they stand. Shapes: x (P*N, I, H, W) with P parts of
separate statistics, weight (O, I), coefficients (P, 5, channels). `kernels.conv1x1_triton` describes the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.batch_norm import channels_last, register


def _kernels() -> Any:
    from kernels import conv1x1_triton  # loads triton, which machines without a GPU may lack

    return conv1x1_triton


def _coefficients(
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Tensor | None,
    samples: int,
    eps: float,
) -> Tensor:
    return _kernels().norm_coefficients(mean, var, weight, bias, sums, samples, eps)


def _fake_coefficients(mean: Tensor, *_: Any) -> Tensor:
    return mean.new_empty(mean.shape[0], 5, mean.shape[1])


def _forward(
    x: Tensor,
    weight: Tensor,
    before: Tensor | None,
    parts: int,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor]:
    y = _empty_output(x, weight, stride)
    mean, var = _kernels().convolve(channels_last(x), weight.contiguous(), before, y, parts, stride)
    return y, mean, var


def _fake_forward(x: Tensor, weight: Tensor, _: Any, parts: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(parts, len(weight), dtype=torch.promote_types(x.dtype, torch.float32))
    return _empty_output(x, weight, stride), mean, torch.empty_like(mean)


def _empty_output(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return an uninitialised y, channels_last."""
    height, width = ((size - 1) // stride + 1 for size in x.shape[2:])
    shape = (len(x), len(weight), height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _weight_gradient(
    g: Tensor,
    y: Tensor,
    after: Tensor,
    x: Tensor,
    before: Tensor | None,
    relu: bool,
    stride: int,
) -> Tensor:
    g = channels_last(g)
    y = channels_last(y)
    x = channels_last(x)
    return _kernels().gradient_of_weight(g, y, after, x, before, relu, stride)


def _fake_weight_gradient(g: Tensor, y: Tensor, after: Tensor, x: Tensor, *_: Any) -> Tensor:
    return after.new_empty(y.shape[1], x.shape[1])


def _input_gradient(
    g: Tensor,
    y: Tensor,
    after: Tensor,
    weight: Tensor,
    x: Tensor,
    before: Tensor | None,
    relu: bool,
    stride: int,
) -> tuple[Tensor, Tensor]:
    g = channels_last(g)
    y = channels_last(y)
    x = channels_last(x)
    return _kernels().gradient_of_input(g, y, after, weight.contiguous(), x, before, relu, stride)


def _fake_input_gradient(
    g: Tensor,
    y: Tensor,
    after: Tensor,
    weight: Tensor,
    x: Tensor,
    before: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    channels = 0 if before is None else x.shape[1]
    return torch.empty_like(channels_last(x)), after.new_empty(2, after.shape[0], channels)


coefficients = register(
    "conv1x1_coefficients",
    "(Tensor mean, Tensor var, Tensor? weight, Tensor? bias, Tensor? sums, int samples, float eps) -> Tensor",
    _coefficients,
    _fake_coefficients,
)
forward = register(
    "conv1x1_forward",
    "(Tensor x, Tensor weight, Tensor? before, int parts, int stride) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
weight_gradient = register(
    "conv1x1_weight_gradient",
    "(Tensor g, Tensor y, Tensor after, Tensor x, Tensor? before, bool relu, int stride) -> Tensor",
    _weight_gradient,
    _fake_weight_gradient,
)
input_gradient = register(
    "conv1x1_input_gradient",
    "(Tensor g, Tensor y, Tensor after, Tensor weight, Tensor x, Tensor? before, bool relu, int stride) -> (Tensor, Tensor)",
    _input_gradient,
    _fake_input_gradient,
)
