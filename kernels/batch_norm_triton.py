"""BatchNorm, the addition of a residual and ReLU by five Triton kernels, on NVIDIA GPUs or, in tests, interpreted.

    x --partial_moments--> of each chunk --join_moments--> mean, var              x, mean, var, residual --apply--> y
    dy, x --partial_sums--> of each chunk --torch's sum--> sums                   dy, x, sums --gradient--> dx

Shapes: x, y, dy, dx and residual are rows of C channels, contiguous in memory: channels_last or (R, C). Consecutive rows form P
parts of equal size with separate statistics. A chunk is a range of rows of one part; each program processes one chunk of up to
128 channels. There are no atomic sums, so the same input gives the same bits. Values are computed in float32, or float64 if x
is. The host never waits for the device. kernels/README.md has the formulas and the traffic of each pass.

ROWS, COLUMNS: rows and channels of the tile that a program holds at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements that a program holds at a time: 16 in each of 128 threads
PROGRAMS = 1024  # of a launch, at most about as many as an H100 runs at once


@triton.jit
def _chunk(rows, chunk_rows, channels, COLUMNS: tl.constexpr):
    """Return the offset of the first row, the number of rows, and the channels of a program. Grid: (columns, chunks, parts).

    Programs of neighbouring numbers, which run at the same time, so read the same rows."""
    first = tl.program_id(1) * chunk_rows
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = (tl.program_id(2).to(tl.int64) * rows + first) * channels
    return start, tl.minimum(rows - first, chunk_rows), columns


@triton.jit
def _tile(first, count, columns, channels, ROWS: tl.constexpr):
    """Return offsets and mask of rows first, first + 1, ... of a chunk of `count` rows."""
    row = first + tl.arange(0, ROWS)
    at = row[:, None] * channels + columns[None, :]
    inside = (row[:, None] < count) & (columns[None, :] < channels)
    return at, inside


@triton.jit
def _store_partial(results, values, columns, channels):
    """Store the sums of a program in (chunks, parts, C)."""
    line = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
    tl.store(results + line * channels + columns, values, mask=columns < channels)


@triton.jit
def _of_channels(values, columns, channels, compute):
    """Load a value of each channel for this program's part, as (1, COLUMNS)."""
    return tl.load(values + columns, mask=columns < channels, other=0.0).to(compute)[None, :]


@triton.jit
def _scaling(mean, var, weight, bias, eps, columns, channels):
    """Return mean, 1 / standard deviation, and the scale and shift that follow the subtraction of the mean."""
    compute = mean.dtype.element_ty
    offset = tl.program_id(2) * channels
    centre = _of_channels(mean + offset, columns, channels, compute)
    inverse = 1.0 / tl.sqrt(_of_channels(var + offset, columns, channels, compute) + eps)
    scale = inverse
    if weight is not None:
        scale = inverse * _of_channels(weight, columns, channels, compute)
    shift = tl.zeros_like(scale)
    if bias is not None:
        shift = _of_channels(bias, columns, channels, compute)
    return centre, inverse, scale, shift


@triton.jit
def _normalised(x, centre, scale, shift):
    """Return (x - centre) scale + shift, rounded in the same way by the forward and the backward."""
    # Subtract the mean first: x scale + (shift - centre scale) would cancel digits if the mean is large.
    deviation = x - centre
    return tl.fma(deviation, tl.broadcast_to(scale, deviation.shape), tl.broadcast_to(shift, deviation.shape))


@triton.jit
def _line(sums, products, inverse, scale, samples, columns, channels):
    """Return slope and constant of dx = scale g + slope (x - mean) + constant."""
    part = tl.program_id(2) * channels
    constant = -scale * _of_channels(sums + part, columns, channels, scale.dtype) / samples
    slope = -scale * inverse * inverse * _of_channels(products + part, columns, channels, scale.dtype) / samples
    return slope, constant


@triton.jit
def partial_moments(
    x,  # (P * rows, C)
    means,  # (chunks, P, C), written: mean of each chunk
    squares,  # (chunks, P, C), written: sum of the squared deviations from it
    rows,  # of a part
    chunk_rows,  # of a chunk; the last one of a part may be smaller
    channels,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the moments of each chunk."""
    start, count, columns = _chunk(rows, chunk_rows, channels, COLUMNS)
    compute = means.dtype.element_ty
    # Each element of the tile follows its own rows by Welford's method. Subtract the first row before, so that a mean far from
    # zero costs no digits.
    origin = _of_channels(x + start, columns, channels, compute)
    mean = tl.zeros((ROWS, COLUMNS), compute)
    square = tl.zeros((ROWS, COLUMNS), compute)
    seen = tl.zeros((1, 1), compute)
    for first in range(0, count, ROWS):
        at, inside = _tile(first, count, columns, channels, ROWS)
        values = tl.load(x + start + at, mask=inside, other=0.0).to(compute) - origin
        deviation = tl.where(inside, values - mean, 0.0)
        seen += 1.0
        mean += deviation * (1.0 / seen)
        square += deviation * (values - mean)
    # Join the elements of each channel, weighted with the number of their rows.
    row = tl.arange(0, ROWS)
    weight = tl.maximum((count - row + ROWS - 1) // ROWS, 0).to(compute)[:, None]
    joint = tl.sum(weight * mean, axis=0) / count
    deviation = mean - joint[None, :]
    _store_partial(means, joint + tl.sum(origin, axis=0), columns, channels)
    _store_partial(squares, tl.sum(square + weight * deviation * deviation, axis=0), columns, channels)


@triton.jit
def join_moments(
    means,  # (chunks, P, C), of `partial_moments`
    squares,  # (chunks, P, C)
    mean,  # (P, C), written
    var,  # (P, C), written: biased
    rows,
    chunk_rows,
    chunks,
    channels,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Join the moments of all chunks of each part. Grid: (columns, P). A row of a tile is a chunk."""
    parts = tl.num_programs(1)
    compute = mean.dtype.element_ty
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1) * channels
    # Sum deviations from the first chunk's mean, because a sum of large means would lose digits.
    origin = tl.load(means + part + columns, mask=columns < channels, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), compute)
    for first in range(0, chunks, ROWS):
        at, inside = _tile(first, chunks, columns, parts * channels, ROWS)
        inside = inside & (columns[None, :] < channels)
        number = first + tl.arange(0, ROWS)
        weight = tl.minimum(rows - number * chunk_rows, chunk_rows).to(compute)[:, None]
        deviation = tl.load(means + part + at, mask=inside, other=0.0) - origin[None, :]
        total += tl.where(inside, weight * deviation, 0.0)
    joint = origin + tl.sum(total, axis=0) / rows
    square = tl.zeros((ROWS, COLUMNS), compute)
    for first in range(0, chunks, ROWS):
        at, inside = _tile(first, chunks, columns, parts * channels, ROWS)
        inside = inside & (columns[None, :] < channels)
        number = first + tl.arange(0, ROWS)
        weight = tl.minimum(rows - number * chunk_rows, chunk_rows).to(compute)[:, None]
        deviation = tl.load(means + part + at, mask=inside, other=0.0) - joint[None, :]
        own = tl.load(squares + part + at, mask=inside, other=0.0)
        square += tl.where(inside, own + weight * deviation * deviation, 0.0)
    tl.store(mean + part + columns, joint, mask=columns < channels)
    tl.store(var + part + columns, tl.sum(square, axis=0) / rows, mask=columns < channels)


@triton.jit
def apply(
    x,  # (P * rows, C)
    mean,  # (P, C)
    var,  # (P, C)
    weight,  # (C,) or None
    bias,  # (C,) or None
    residual,  # (P * rows, C) or None
    y,  # (P * rows, C), written
    eps,
    rows,
    chunk_rows,
    channels,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute y = relu(weight (x - mean) / sqrt(var + eps) + bias + residual), without relu unless RELU."""
    start, count, columns = _chunk(rows, chunk_rows, channels, COLUMNS)
    centre, _, scale, shift = _scaling(mean, var, weight, bias, eps, columns, channels)
    for first in range(0, count, ROWS):
        at, inside = _tile(first, count, columns, channels, ROWS)
        values = tl.load(x + start + at, mask=inside, other=0.0).to(centre.dtype)
        result = _normalised(values, centre, scale, shift)
        if residual is not None:
            result += tl.load(residual + start + at, mask=inside, other=0.0).to(centre.dtype)
        if RELU:
            result = tl.where(result <= 0.0, 0.0, result)  # unlike a maximum, this keeps NaN
        tl.store(y + start + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def partial_sums(
    dy,  # (P * rows, C)
    x,  # (P * rows, C)
    y,  # (P * rows, C), or None: without a residual, the sign of y is computed from x
    mean,  # (P, C)
    var,  # (P, C)
    weight,  # (C,) or None
    bias,  # (C,) or None
    g,  # (P * rows, C), written if y is given
    sums,  # (chunks, P, C), written
    products,  # (chunks, P, C), written
    eps,
    rows,
    chunk_rows,
    channels,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the sums of g and of g (x - mean) in each chunk. g is dy, and 0 where RELU cut y off."""
    start, count, columns = _chunk(rows, chunk_rows, channels, COLUMNS)
    centre, _, scale, shift = _scaling(mean, var, weight, bias, eps, columns, channels)
    # Accumulate elementwise, and add up across the threads only once.
    total = tl.zeros((ROWS, COLUMNS), centre.dtype)
    product = tl.zeros((ROWS, COLUMNS), centre.dtype)
    for first in range(0, count, ROWS):
        at, inside = _tile(first, count, columns, channels, ROWS)
        slope = tl.load(dy + start + at, mask=inside, other=0.0).to(centre.dtype)
        values = tl.load(x + start + at, mask=inside, other=0.0).to(centre.dtype)
        if RELU:
            if y is not None:
                slope = tl.where(tl.load(y + start + at, mask=inside, other=0.0) <= 0.0, 0.0, slope)
                tl.store(g + start + at, slope.to(g.dtype.element_ty), mask=inside)
            else:
                result = _normalised(values, centre, scale, shift).to(x.dtype.element_ty)
                slope = tl.where(result <= 0.0, 0.0, slope)
        total += slope
        product += slope * (values - centre)
    _store_partial(sums, tl.sum(total, axis=0), columns, channels)
    _store_partial(products, tl.sum(product, axis=0), columns, channels)


@triton.jit
def gradient(
    dy,  # (P * rows, C)
    x,  # (P * rows, C)
    mean,  # (P, C)
    var,  # (P, C)
    weight,  # (C,) or None
    bias,  # (C,) or None
    sums,  # (P, C), over all rows whose statistics are mean and var; None: these do not depend on x
    products,  # (P, C) or None
    dx,  # (P * rows, C), written
    eps,
    samples,  # number of those rows
    rows,
    chunk_rows,
    channels,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute dx from dy. RELU: cut dy off where y is 0; without it, dy is g already."""
    start, count, columns = _chunk(rows, chunk_rows, channels, COLUMNS)
    centre, inverse, scale, shift = _scaling(mean, var, weight, bias, eps, columns, channels)
    if sums is not None:
        slope, constant = _line(sums, products, inverse, scale, samples, columns, channels)
    for first in range(0, count, ROWS):
        at, inside = _tile(first, count, columns, channels, ROWS)
        g = tl.load(dy + start + at, mask=inside, other=0.0).to(centre.dtype)
        values = tl.load(x + start + at, mask=inside, other=0.0).to(centre.dtype)
        if RELU:
            result = _normalised(values, centre, scale, shift).to(x.dtype.element_ty)
            g = tl.where(result <= 0.0, 0.0, g)
        result = scale * g
        if sums is not None:
            result += slope * (values - centre) + constant
        tl.store(dx + start + at, result.to(dx.dtype.element_ty), mask=inside)


def moments(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance (P, C) of the rows of each part."""
    grid, sizes, constants = _launch(x, parts)
    channels = x.shape[1]
    means, squares = torch.empty(2, grid[1], parts, channels, dtype=compute_dtype(x), device=x.device)
    partial_moments[grid](x, means, squares, *sizes, **constants)
    return joint_moments(means, squares, sizes)


def joint_moments(means: Tensor, squares: Tensor, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance (P, C) from the moments (chunks, P, C) of all chunks. sizes: of `division`."""
    chunks, parts, channels = means.shape
    rows, chunk_rows, _ = sizes
    # Two results of an operator must not share memory.
    mean, var = (means.new_empty(parts, channels) for _ in range(2))
    # Few programs have work, so each one reads many chunks of few channels at a time.
    columns = 16
    join_moments[triton.cdiv(channels, columns), parts](
        means, squares, mean, var, rows, chunk_rows, chunks, channels, ROWS=TILE // columns, COLUMNS=columns
    )
    return mean, var


def normalise(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    relu: bool,
) -> Tensor:
    """Return y in the type and layout of x."""
    grid, sizes, constants = _launch(x, len(mean))
    y = torch.empty_like(x)
    apply[grid](x, mean, var, weight, bias, residual, y, eps, *sizes, RELU=relu, **constants)
    return y


def backward_sums(
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
    """Return the sums of g and of g (x - mean), (2, P, C), and g if y is given (otherwise an empty tensor)."""
    grid, sizes, constants = _launch(x, len(mean))
    partial = torch.empty(2, grid[1], *mean.shape, dtype=mean.dtype, device=x.device)
    g = dy.new_empty(0) if y is None else torch.empty_like(dy)
    partial_sums[grid](dy, x, y, mean, var, weight, bias, g, *partial, eps, *sizes, RELU=relu, **constants)
    return partial.sum(1), g


def backward_gradient(
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
    """Return dx. sums: of `backward_sums` over all `samples` rows of a part, or None if mean and var do not depend on x."""
    grid, sizes, constants = _launch(x, len(mean))
    dx = torch.empty_like(x)
    both = (None, None) if sums is None else sums.contiguous()
    gradient[grid](dy, x, mean, var, weight, bias, *both, dx, eps, samples, *sizes, RELU=relu, **constants)
    return dx


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type of the statistics of x: float32, or float64 if x is."""
    return torch.promote_types(x.dtype, torch.float32)


def _launch(x: Tensor, parts: int) -> tuple[tuple[int, int, int], tuple[int, int, int], dict[str, Any]]:
    """Return grid, (rows, chunk_rows, channels) and the sizes of a tile for the rows of x."""
    channels = x.shape[1]
    columns = min(triton.next_power_of_2(channels), 128)
    tile_rows = TILE // columns
    grid, sizes = division(x.numel() // (channels * parts), channels, parts, tile_rows, columns)
    return grid, sizes, {"ROWS": tile_rows, "COLUMNS": columns}


def division(
    rows: int,
    channels: int,
    parts: int,
    tile_rows: int,
    columns: int,
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return a grid that cuts each part of `rows` rows into equal chunks of whole tiles, and (rows, chunk_rows, channels)."""
    column_blocks = triton.cdiv(channels, columns)
    tiles = triton.cdiv(rows, tile_rows)
    chunks = min(max(PROGRAMS // (column_blocks * parts), 1), tiles)
    chunk_rows = triton.cdiv(tiles, chunks) * tile_rows
    return (column_blocks, triton.cdiv(rows, chunk_rows), parts), (rows, chunk_rows, channels)
