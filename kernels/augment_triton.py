"""Colour, blur, solarisation and normalisation of all views of a batch by Triton kernels, on NVIDIA GPUs or interpreted.

    uint8 views after the resize --view_means--> mean pixel of each view
                                 --sharp, blurred--> normalised views in bf16, fp16 or float32, channels_last

`augment_reference` is the definition. The kernels read DALI's outputs where they lie and write each view once. `sharp` writes
the views without blur, and `blurred` the others, so that no program waits for the work of another kind of view. Everything that
differs between views is in one table, which is copied to the device without waiting for it. There are no atomic sums, so the
same input gives the same bits.

Shapes: R views, S the size of a view in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels.augment_reference import CHOICES, TAPS

MOST_TAPS = 25  # of a blur; a tile of HEIGHT pixels then still writes 8 rows
# Pixels that a program of `blurred` reads. With 64 x 64 a thread would need so many registers that one program fills a
# multiprocessor.
HEIGHT = 32
WIDTH = 64
BLOCK = 1024  # pixels that a program of the other kernels holds at a time
# A row of the table has 14 int64: address of the view's pixels, number of the view, and its choices as float32.
ROW = 14
_FLOATS: tl.constexpr = tl.constexpr(2 * ROW)
_FIRST: tl.constexpr = tl.constexpr(4)  # of the choices, in float32
_SIGMA: tl.constexpr = tl.constexpr(4 + 18)
_TAPS: tl.constexpr = tl.constexpr(4 + 19)
_LEVEL: tl.constexpr = tl.constexpr(4 + 20)


@triton.jit
def _pixels(table, row):
    """Return a pointer to the pixels (S, S, 3) of the view in this row of the table."""
    return tl.load(table + row * (_FLOATS // 2)).to(tl.pointer_type(tl.uint8))


@triton.jit
def _number(table, row):
    """Return the number of the view in this row of the table, int64: offsets of a large batch do not fit into int32."""
    return tl.load(table + row * (_FLOATS // 2) + 1)


@triton.jit
def _rounded(x):
    """Round to the levels 0..255."""
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), 0.0), 255.0)


@triton.jit
def _colored(pixels, at, inside, choices, mean, channel, COLOR: tl.constexpr):
    """Return a channel of A x + C m in levels 0..255, for the pixels x that begin at the bytes `at`.

    choices: pointer to A and C; mean: pointer to m. Without COLOR return the channel of x, and read neither.
    """
    if COLOR:
        # Other channels are read again from the cache, which takes fewer registers than keeping them.
        red = tl.load(pixels + at, mask=inside, other=0).to(tl.float32)
        green = tl.load(pixels + at + 1, mask=inside, other=0).to(tl.float32)
        blue = tl.load(pixels + at + 2, mask=inside, other=0).to(tl.float32)
        a = choices + 3 * channel
        c = choices + 9 + 3 * channel
        shift = tl.load(c) * tl.load(mean) + tl.load(c + 1) * tl.load(mean + 1) + tl.load(c + 2) * tl.load(mean + 2)
        value = tl.load(a) * red + tl.load(a + 1) * green + tl.load(a + 2) * blue
        value = _rounded(value + shift)
    else:
        value = tl.load(pixels + at + channel, mask=inside, other=0).to(tl.float32)
    return value


@triton.jit
def _normalised(value, level, normalisation, channel):
    """Invert the values from `level` on, then scale and shift them."""
    value = tl.where(value >= level, 255.0 - value, value)
    return value * tl.load(normalisation + channel) + tl.load(normalisation + 3 + channel)


@triton.jit
def view_means(
    table,  # (R, ROW) int64
    means,  # (R, 3) float32, written in the order of the views
    area,  # pixels of a view
    BLOCK: tl.constexpr,
):
    """Compute the mean pixel of each view. Grid: (R,)."""
    row = tl.program_id(0)
    pixels = _pixels(table, row)
    # Sums of whole numbers are exact in any order: at most 255 area / BLOCK in each element, and 255 area in all.
    red = tl.zeros((BLOCK,), tl.int32)
    green = tl.zeros((BLOCK,), tl.int32)
    blue = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, area, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < area
        red += tl.load(pixels + 3 * at, mask=inside, other=0).to(tl.int32)
        green += tl.load(pixels + 3 * at + 1, mask=inside, other=0).to(tl.int32)
        blue += tl.load(pixels + 3 * at + 2, mask=inside, other=0).to(tl.int32)
    mean = means + 3 * _number(table, row)
    tl.store(mean, tl.sum(red, axis=0).to(tl.float32) / area)
    tl.store(mean + 1, tl.sum(green, axis=0).to(tl.float32) / area)
    tl.store(mean + 2, tl.sum(blue, axis=0).to(tl.float32) / area)


@triton.jit
def sharp(
    table,  # (rows, ROW) int64, views without blur
    choices,  # the same memory as float32
    means,  # (R, 3) float32; read only if COLOR
    normalisation,  # (2, 3) float32, factor and shift of each channel
    out,  # (R, S, S, 3), written
    area,  # pixels of a view
    blocks,  # number of blocks of a view
    COLOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Augment the views without blur. Grid: (rows * blocks,)."""
    program = tl.program_id(0)
    row = program // blocks
    at = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < area
    pixels = _pixels(table, row)
    number = _number(table, row)
    choice = choices + row * _FLOATS
    level = tl.load(choice + _LEVEL)
    view = out + number * area * 3
    for channel in range(3):
        value = _colored(pixels, 3 * at, inside, choice + _FIRST, means + 3 * number, channel, COLOR)
        value = _normalised(value, level, normalisation, channel)
        tl.store(view + 3 * at + channel, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mirrored(position, size):
    """Return the position inside of 0..size - 1 that a position outside shows, mirrored at the outermost pixel."""
    period = 2 * size - 2
    position = tl.abs(position) % period
    return tl.minimum(position, period - position)


@triton.jit
def _weights(distance, sigma, radius):
    """Return the weights of a Gaussian, not normalised, for distances in pixels; 0 beyond the radius."""
    distance = distance.to(tl.float32)
    weight = tl.exp(distance * distance * (-0.5 / (sigma * sigma)))
    return tl.where(tl.abs(distance) <= radius, weight, 0.0)


# These numbers change from batch to batch, which must not compile the kernel again.
@triton.jit(do_not_specialize=["margin", "tiles_y", "tiles_x"])
def blurred(
    table,  # as in `sharp`, views with blur
    choices,
    means,
    normalisation,
    out,
    size,  # S
    margin,  # pixels that a tile reads beyond each side of what it writes; no view has a larger radius
    tiles_y,  # number of tiles of a view along each side
    tiles_x,
    COLOR: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Augment the views with blur. Grid: (rows * tiles_y * tiles_x,).

    A program reads HEIGHT x WIDTH pixels and writes those that are at least `margin` away from the border of this tile. The
    blur is a product with a band of weights from each side, V X H, for tensor cores: factors in fp16, sums in float32. Levels
    are exact in fp16. The rounding of the weights and of V X may move a result to the next level.
    """
    program = tl.program_id(0)
    row = program // (tiles_y * tiles_x)
    tile = program % (tiles_y * tiles_x)
    first_y = (tile // tiles_x) * (HEIGHT - 2 * margin)
    first_x = (tile % tiles_x) * (WIDTH - 2 * margin)
    end_y = tl.minimum(first_y + HEIGHT - 2 * margin, size)
    end_x = tl.minimum(first_x + WIDTH - 2 * margin, size)
    pixels = _pixels(table, row)
    number = _number(table, row)
    choice = choices + row * _FLOATS
    sigma = tl.load(choice + _SIGMA)
    radius = (tl.load(choice + _TAPS) - 1.0) * 0.5
    level = tl.load(choice + _LEVEL)

    # The pixels of the tile. What lies further out than the radius has the weight 0 and is not read.
    i = tl.arange(0, HEIGHT)
    j = tl.arange(0, WIDTH)
    y = first_y + i - margin
    x = first_x + j - margin
    needs_y = (y >= first_y - radius) & (y < end_y + radius)
    needs_x = (x >= first_x - radius) & (x < end_x + radius)
    needed = needs_y[:, None] & needs_x[None, :]
    source = 3 * (_mirrored(y, size)[:, None] * size + _mirrored(x, size)[None, :])
    y += margin
    x += margin
    written = (y < end_y)[:, None] & (x < end_x)[None, :]
    target = 3 * (y[:, None] * size + x[None, :])

    # Row i of V and column i of H have the weights of what is written at i, which was read at i + margin.
    down = _weights(i[None, :] - i[:, None] - margin, sigma, radius).to(tl.float16)
    across = _weights(j[:, None] - j[None, :] - margin, sigma, radius).to(tl.float16)
    # Dividing by the sum of the rounded weights keeps areas of one colour exactly.
    total = tl.sum(_weights(j - WIDTH // 2, sigma, radius).to(tl.float16).to(tl.float32), axis=0)

    view = out + number * size * size * 3
    for channel in range(3):
        value = _colored(pixels, source, needed, choice + _FIRST, means + 3 * number, channel, COLOR)
        value = tl.dot(down, value.to(tl.float16)) / total
        value = tl.dot(value.to(tl.float16), across) / total
        value = _normalised(_rounded(value), level, normalisation, channel)
        tl.store(view + target + channel, value.to(out.dtype.element_ty), mask=written)


def augment(
    views: Sequence[Tensor],
    choices: NDArray[np.float32],
    normalisation: Tensor,
    out: Tensor,
    *,
    color: bool,
    means: Tensor | None = None,
) -> None:
    """Write the augmented and normalised views to `out`. The host does not wait for the device.

    views: d tensors (N, S, S, 3) uint8, contiguous, on the device of `out`, views after the resize.
    choices: (R, CHOICES) of `augment_reference`, R = d*N, view-major.
    normalisation: (2, 3) float32, factor and shift of each channel. out: (R, S, S, 3), contiguous; bf16, fp16 or float32.
    color: whether the choices A and C apply. means: (R, 3) float32, m of each view; None: the mean pixel of the view itself.

    The kernels run on the current stream, and the views must keep their content until they have ended.
    """
    num_rows, size = out.shape[:2]
    if not all(view.is_contiguous() for view in views) or not out.is_contiguous():
        raise ValueError(
            "the kernels of the augmentation need views and result contiguous, (N, S, S, 3) and (R, S, S, 3)"
        )
    # The views without blur come first in the table, so that each kernel has consecutive rows.
    order = np.argsort(choices[:, TAPS] > 1, kind="stable")
    num_sharp = int((choices[:, TAPS] <= 1).sum())
    table = _on_device(_table(views, choices, order), out.device)
    as_floats = table.view(torch.float32)
    if color and means is None:
        means = torch.empty(num_rows, 3, device=out.device)
        view_means[(num_rows,)](table, means, size * size, BLOCK=BLOCK)
    if means is None:
        means = normalisation  # a pointer that no kernel reads
    area = size * size
    if num_sharp:
        blocks = triton.cdiv(area, BLOCK)
        sharp[(num_sharp * blocks,)](
            table, as_floats, means, normalisation, out, area, blocks, COLOR=color, BLOCK=BLOCK
        )
    if num_sharp < num_rows:
        margin = int(choices[:, TAPS].max()) // 2
        if margin > MOST_TAPS // 2:
            raise ValueError(f"a view is blurred with {2 * margin + 1} taps: the kernels take at most {MOST_TAPS}")
        tiles_y = triton.cdiv(size, HEIGHT - 2 * margin)
        tiles_x = triton.cdiv(size, WIDTH - 2 * margin)
        blurred[((num_rows - num_sharp) * tiles_y * tiles_x,)](
            table[num_sharp:],
            as_floats[num_sharp:],
            means,
            normalisation,
            out,
            size,
            margin,
            tiles_y,
            tiles_x,
            COLOR=color,
            HEIGHT=HEIGHT,
            WIDTH=WIDTH,
            num_warps=8,
        )


def _table(views: Sequence[Tensor], choices: NDArray[np.float32], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the table of all views, (R, ROW), with its rows in this order."""
    count, size = views[0].shape[:2]
    bytes_of_view = 3 * size * size
    firsts = np.array([view.data_ptr() for view in views], np.int64)
    addresses = firsts[:, None] + bytes_of_view * np.arange(count)
    table = np.zeros((len(choices), ROW), np.int64)
    table[:, 0] = addresses.ravel()[order]
    table[:, 1] = order
    table.view(np.float32)[:, 4 : 4 + CHOICES] = choices[order]
    return table


def _on_device(table: NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy the table to the device without waiting, from a new pinned block: the device may still read the one before."""
    on_host = torch.from_numpy(table)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)
