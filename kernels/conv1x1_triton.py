"""1x1 convolution with the BatchNorm before it in its prologue and that after it in its epilogue, by four Triton kernels.

    before: mean, var, weight, bias --coefficients--> c           after: these and sums of the backward --coefficients--> c'
    x, c, w --forward--> y, moments of each chunk                   y = a w^T,  a = relu(scale (x - mean) + shift)  or  a = x
    g, y, c', x, c --weight_gradient--> of each chunk --torch's sum--> dw = dy^T a
    g, y, c', w, x, c --input_gradient--> da = dy w cut off where a = 0, and sums of each chunk

dy = scale g + slope (y - mean) + constant is the gradient through the BatchNorm after the convolution. Neither a nor dy is
stored. Shapes: x, a, da are rows of I channels, y, g, dy of O channels, w is (O, I). Rows, parts and chunks are those of
`kernels.batch_norm_triton`, whose functions these kernels share. A row of y is a pixel; with a STRIDE, x has others between.
Products have factors of x's type and float32 sums, or float64 if x is. There are no atomic sums.

ROWS, COLUMNS: rows and channels of the tile that a program computes. DEPTH: length of the inner dimension that it reads at a
time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch_norm_triton import (
    _chunk,
    _line,
    _normalised,
    _of_channels,
    _scaling,
    _store_partial,
    _tile,
    compute_dtype,
    division,
    joint_moments,
)

WEIGHT_PROGRAMS = 256  # of the weight's gradient: more would have more partial sums to store


@triton.jit
def coefficients(
    mean,  # (P, C)
    var,  # (P, C)
    weight,  # (C,) or None
    bias,  # (C,) or None
    sums,  # (P, C), of the backward, or None: slope and constant are then 0
    products,  # (P, C) or None
    out,  # (P, 5, C), written
    eps,
    samples,
    channels,
    COLUMNS: tl.constexpr,
):
    """Compute the coefficients of a BatchNorm: mean, scale, shift, slope and constant. Grid: (columns, 1, P)."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    centre, inverse, scale, shift = _scaling(mean, var, weight, bias, eps, columns, channels)
    slope = tl.zeros_like(scale)
    constant = tl.zeros_like(scale)
    if sums is not None:
        slope, constant = _line(sums, products, inverse, scale, samples, columns, channels)
    at = out + tl.program_id(2) * 5 * channels + columns[None, :]
    inside = columns[None, :] < channels
    tl.store(at, centre, mask=inside)
    tl.store(at + channels, scale, mask=inside)
    tl.store(at + 2 * channels, shift, mask=inside)
    tl.store(at + 3 * channels, slope, mask=inside)
    tl.store(at + 4 * channels, constant, mask=inside)


@triton.jit
def _forward_line(norm, columns, channels):
    """Load mean, scale and shift of a BatchNorm for this program's part, each (1, COLUMNS)."""
    norm += tl.program_id(2) * 5 * channels
    compute = norm.dtype.element_ty
    centre = _of_channels(norm, columns, channels, compute)
    scale = _of_channels(norm + channels, columns, channels, compute)
    shift = _of_channels(norm + 2 * channels, columns, channels, compute)
    return centre, scale, shift


@triton.jit
def _pixels(first, rows, chunk_rows, height, width, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return where rows first, first + 1, ... of this program's chunk lie in x: a base row and the distances from it."""
    row = first + tl.arange(0, ROWS)
    base = tl.program_id(2).to(tl.int64) * rows + tl.program_id(1) * chunk_rows
    if STRIDE > 1:
        # Count from the image in which the chunk begins, so that the distances fit into 32 bits.
        used_width = (width - 1) // STRIDE + 1
        used = ((height - 1) // STRIDE + 1) * used_width
        image = base // used
        row += (base - image * used).to(tl.int32)
        base = image * height * width
        pixel = row % used
        row = row // used * height * width + (pixel // used_width * width + pixel % used_width) * STRIDE
    return base, row


@triton.jit
def _activation(x, at, inside, before, columns, channels):
    """Load a tile of x and return a."""
    values = tl.load(x + at, mask=inside, other=0.0)
    if before is not None:
        centre, scale, shift = _forward_line(before, columns, channels)
        result = _normalised(values.to(centre.dtype), centre, scale, shift)
        values = tl.where(result <= 0.0, 0.0, result).to(x.dtype.element_ty)  # unlike a maximum, this keeps NaN
    return values


@triton.jit
def _output_gradient(g, y, at, inside, after, columns, channels, RELU: tl.constexpr):
    """Load a tile of g and y and return dy, which is 0 for channels outside, but not for rows outside."""
    centre, scale, shift = _forward_line(after, columns, channels)
    after += tl.program_id(2) * 5 * channels
    slope = _of_channels(after + 3 * channels, columns, channels, centre.dtype)
    constant = _of_channels(after + 4 * channels, columns, channels, centre.dtype)
    values = tl.load(y + at, mask=inside, other=0.0).to(centre.dtype)
    gradient = tl.load(g + at, mask=inside, other=0.0).to(centre.dtype)
    if RELU:
        result = _normalised(values, centre, scale, shift).to(y.dtype.element_ty)
        gradient = tl.where(result <= 0.0, 0.0, gradient)
    result = scale * gradient + slope * (values - centre) + constant
    return result.to(g.dtype.element_ty)


@triton.jit
def forward(
    x,  # (pixels, I)
    weight,  # (O, I)
    before,  # (P, 5, I), coefficients of the BatchNorm before, or None
    y,  # (P * rows, O), written
    means,  # (chunks, P, O), written: mean of each chunk
    squares,  # (chunks, P, O), written: sum of the squared deviations from it
    rows,
    chunk_rows,
    channels,
    depth,
    height,  # of an image of x
    width,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute y and the moments of its chunks. Grid: (columns, chunks, parts)."""
    start, count, columns = _chunk(rows, chunk_rows, channels, COLUMNS)
    compute = means.dtype.element_ty
    mean = tl.zeros((COLUMNS,), compute)
    square = tl.zeros((COLUMNS,), compute)
    for first in range(0, count, ROWS):
        at, inside = _tile(first, count, columns, channels, ROWS)
        present = (first + tl.arange(0, ROWS) < count)[:, None]
        base, row = _pixels(first, rows, chunk_rows, height, width, STRIDE, ROWS)
        total = tl.zeros((ROWS, COLUMNS), compute)
        for begin in range(0, depth, DEPTH):
            inner = begin + tl.arange(0, DEPTH)
            from_x = row[:, None] * depth + inner[None, :]
            a = _activation(x + base * depth, from_x, present & (inner[None, :] < depth), before, inner, depth)
            from_w = columns[None, :] * depth + inner[:, None]
            w = tl.load(weight + from_w, mask=(columns[None, :] < channels) & (inner[:, None] < depth), other=0.0)
            total = tl.dot(a, w, total, input_precision="ieee", out_dtype=compute)
        result = total.to(y.dtype.element_ty)
        tl.store(y + start + at, result, mask=inside)
        # The statistics are those of the values as stored. The first mean is rounded, so the deviations from it are corrected.
        size = tl.minimum(count - first, ROWS).to(compute)
        values = tl.where(present, result.to(compute), 0.0)
        rough = tl.sum(values, axis=0) / size
        deviation = tl.where(present, values - rough[None, :], 0.0)
        rest = tl.sum(deviation, axis=0) / size
        own_square = tl.sum(deviation * deviation, axis=0) - size * rest * rest
        # Join the tile with the tiles before it.
        step = (rough - mean) + rest
        share = size / (first + size)
        mean += step * share
        square += own_square + step * step * (first * share)
    _store_partial(means, mean, columns, channels)
    _store_partial(squares, square, columns, channels)


@triton.jit
def weight_gradient(
    g,  # (P * rows, O)
    y,  # (P * rows, O)
    after,  # (P, 5, O), coefficients of the BatchNorm after
    x,  # (pixels, I)
    before,  # (P, 5, I) or None
    dw,  # (chunks, P, O, I), written
    rows,
    chunk_rows,
    channels,  # O
    depth,  # I
    height,
    width,
    RELU: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute dy^T a of each chunk. Grid: (tiles of the weight, chunks, parts). RELU: see `input_gradient`."""
    blocks = tl.cdiv(depth, DEPTH)
    columns = tl.program_id(0) // blocks * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.program_id(0) % blocks * DEPTH + tl.arange(0, DEPTH)
    # The division into chunks is that of other programs, whose first number means columns.
    start, count, _ = _chunk(rows, chunk_rows, channels, COLUMNS)
    total = tl.zeros((COLUMNS, DEPTH), dw.dtype.element_ty)
    for first in range(0, count, ROWS):
        at, inside = _tile(first, count, columns, channels, ROWS)
        present = (first + tl.arange(0, ROWS) < count)[:, None]
        slope = _output_gradient(g + start, y + start, at, inside, after, columns, channels, RELU)
        slope = tl.where(present, slope, 0.0)
        base, row = _pixels(first, rows, chunk_rows, height, width, STRIDE, ROWS)
        from_x = row[:, None] * depth + inner[None, :]
        a = _activation(x + base * depth, from_x, present & (inner[None, :] < depth), before, inner, depth)
        total = tl.dot(tl.trans(slope), a, total, input_precision="ieee", out_dtype=total.dtype)
    line = (tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)
    to = columns[:, None] * depth + inner[None, :]
    inside = (columns[:, None] < channels) & (inner[None, :] < depth)
    tl.store(dw + line * channels * depth + to, total, mask=inside)


@triton.jit
def input_gradient(
    g,  # (P * rows, O)
    y,  # (P * rows, O)
    after,  # (P, 5, O), coefficients of the BatchNorm after
    weight,  # (O, I)
    x,  # (pixels, I)
    before,  # (P, 5, I) or None
    da,  # (pixels, I), written
    sums,  # (chunks, P, I), written if `before` is given
    products,  # (chunks, P, I)
    rows,
    chunk_rows,
    channels,  # I
    depth,  # O
    height,
    width,
    RELU: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute da, cut off where a is 0, and the sums of it and of it times (x - mean). Grid: (columns, chunks, parts).

    RELU: cut g off where the BatchNorm after the convolution and its ReLU give 0."""
    _, count, columns = _chunk(rows, chunk_rows, channels, COLUMNS)
    start = (tl.program_id(2).to(tl.int64) * rows + tl.program_id(1) * chunk_rows) * depth
    compute = after.dtype.element_ty
    sum_g = tl.zeros((COLUMNS,), compute)
    product = tl.zeros((COLUMNS,), compute)
    for first in range(0, count, ROWS):
        total = tl.zeros((ROWS, COLUMNS), compute)
        for begin in range(0, depth, DEPTH):
            inner = begin + tl.arange(0, DEPTH)
            at, inside = _tile(first, count, inner, depth, ROWS)
            slope = _output_gradient(g + start, y + start, at, inside, after, inner, depth, RELU)
            from_w = inner[:, None] * channels + columns[None, :]
            w = tl.load(weight + from_w, mask=(inner[:, None] < depth) & (columns[None, :] < channels), other=0.0)
            total = tl.dot(slope, w, total, input_precision="ieee", out_dtype=compute)
        base, row = _pixels(first, rows, chunk_rows, height, width, STRIDE, ROWS)
        at = row[:, None] * channels + columns[None, :]
        present = (first + tl.arange(0, ROWS) < count)[:, None]
        inside = present & (columns[None, :] < channels)
        result = total.to(da.dtype.element_ty)
        if before is not None:
            centre, scale, shift = _forward_line(before, columns, channels)
            values = tl.load(x + base * channels + at, mask=inside, other=0.0).to(compute)
            a = _normalised(values, centre, scale, shift).to(x.dtype.element_ty)
            result = tl.where((a <= 0.0) | (present == 0), 0.0, result)
            sum_g += tl.sum(result.to(compute), axis=0)
            product += tl.sum(result.to(compute) * (values - centre), axis=0)
        tl.store(da + base * channels + at, result, mask=inside)
    if before is not None:
        _store_partial(sums, sum_g, columns, channels)
        _store_partial(products, product, columns, channels)


def norm_coefficients(
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Tensor | None,
    samples: int,
    eps: float,
) -> Tensor:
    """Return the coefficients (P, 5, C) of a BatchNorm. sums (2, P, C) over `samples` rows, or None: only those of forward."""
    parts, channels = mean.shape
    out = mean.new_empty(parts, 5, channels)
    both = (None, None) if sums is None else sums.contiguous()
    columns = 128
    grid = (triton.cdiv(channels, columns), 1, parts)
    coefficients[grid](mean, var, weight, bias, *both, out, eps, samples, channels, COLUMNS=columns)
    return out


def convolve(
    x: Tensor,
    weight: Tensor,
    before: Tensor | None,
    y: Tensor,
    parts: int,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """Write y (N, O, h, w), for x (N, I, H, W) and weight (O, I). Return mean and biased variance (P, O) of its parts."""
    rows = y.numel() // (y.shape[1] * parts)
    tile = _tile_sizes(x, y.shape[1], x.shape[1], 128)
    grid, sizes = division(rows, y.shape[1], parts, tile["ROWS"], tile["COLUMNS"])
    means, squares = torch.empty(2, grid[1], parts, y.shape[1], dtype=compute_dtype(x), device=x.device)
    forward[grid](x, weight, before, y, means, squares, *sizes, *x.shape[1:], STRIDE=stride, **tile)
    return joint_moments(means, squares, sizes)


def gradient_of_weight(
    g: Tensor,
    y: Tensor,
    after: Tensor,
    x: Tensor,
    before: Tensor | None,
    relu: bool,
    stride: int,
) -> Tensor:
    """Return dw (O, I) in the type of the coefficients."""
    parts, _, channels = after.shape
    depth = x.shape[1]
    rows = y.numel() // (channels * parts)
    tile = _weight_tile(x, channels, depth)
    tiles = triton.cdiv(channels, tile["COLUMNS"]) * triton.cdiv(depth, tile["DEPTH"])
    # Cut the rows so that all programs together are about WEIGHT_PROGRAMS.
    row_tiles = triton.cdiv(rows, tile["ROWS"])
    chunks = min(max(WEIGHT_PROGRAMS // (tiles * parts), 1), row_tiles)
    chunk_rows = triton.cdiv(row_tiles, chunks) * tile["ROWS"]
    grid = (tiles, triton.cdiv(rows, chunk_rows), parts)
    dw = after.new_empty(grid[1], parts, channels, depth)
    weight_gradient[grid](
        g, y, after, x, before, dw, rows, chunk_rows, channels, *x.shape[1:], RELU=relu, STRIDE=stride, **tile
    )
    return dw.sum((0, 1))


def gradient_of_input(
    g: Tensor,
    y: Tensor,
    after: Tensor,
    weight: Tensor,
    x: Tensor,
    before: Tensor | None,
    relu: bool,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """Return da and, if `before` is given, the sums (2, P, I) of da and of da (x - mean); otherwise an empty tensor."""
    parts, _, depth = after.shape
    channels = x.shape[1]
    rows = y.numel() // (depth * parts)
    # The BatchNorm before takes registers, too: with 128 columns they would not suffice.
    tile = _tile_sizes(x, channels, depth, 128 if before is None else 64)
    grid, sizes = division(rows, channels, parts, tile["ROWS"], tile["COLUMNS"])
    # A stride leaves pixels out, which get no gradient.
    da = torch.empty_like(x) if stride == 1 else torch.zeros_like(x)
    partial = after.new_empty(2, grid[1], parts, 0 if before is None else channels)
    input_gradient[grid](
        g, y, after, weight, x, before, da, *partial, *sizes, depth, *x.shape[2:], RELU=relu, STRIDE=stride, **tile
    )
    return da, partial.sum(1)


def _tile_sizes(x: Tensor, channels: int, depth: int, columns: int) -> dict[str, Any]:
    """Return the sizes of a tile of at most `columns` of the `channels`, and of the inner dimension."""
    if x.element_size() > 2:
        # No tensor core takes float32 as it is, so the threads hold the factors, too.
        sizes = {"ROWS": 32, "COLUMNS": _power(channels, 64), "DEPTH": _power(depth, 16)}
        return {**sizes, "num_warps": 8, "num_stages": 2}
    return {"ROWS": 128, "COLUMNS": _power(channels, columns), "DEPTH": _power(depth, 32), "num_warps": 8}


def _weight_tile(x: Tensor, channels: int, depth: int) -> dict[str, Any]:
    """Return the sizes of a tile of the weight, and the rows that a program reads at a time."""
    if x.element_size() > 2:
        return {"ROWS": 16, "COLUMNS": _power(channels, 64), "DEPTH": _power(depth, 64), "num_warps": 4}
    return {"ROWS": 32, "COLUMNS": _power(channels, 128), "DEPTH": _power(depth, 128), "num_warps": 8}


def _power(size: int, largest: int) -> int:
    """Return the power of 2 from 16, the least of a product's sides, to `largest` that covers `size`."""
    return min(max(triton.next_power_of_2(size), 16), largest)
