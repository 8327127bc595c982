"""LARS on all tensors of a group by two Triton kernels. NVIDIA GPUs; the interpreter in tests.

    (w, g) --squares--> sums of w^2 and (g + wd w)^2 of each chunk --update--> v, w

They pass over the group's memory seven times, where torch's operations, tensor by tensor, pass over it 19 times. A chunk is
CHUNK consecutive elements of one tensor; each program takes one. The kernels find the tensors through a table of addresses,
which goes to the device only where it has changed. Nothing waits for the device, and there are no atomic sums: the same
gradients give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# the recipe's largest weight, the projector's 2048 x 2048, has 512 of them; each of its programs adds up their sums
CHUNK = 8192
BLOCK = 2048  # elements that a program holds at a time: 16 a thread


@triton.jit
def _tensor(places, number, ALIGNED: tl.constexpr):
    """Pointer to tensor `number` of the table; ALIGNED: to a multiple of 16 bytes, so that 4 elements load at once."""
    pointer = tl.load(places + number).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _size(sizes, number, ALIGNED: tl.constexpr):
    size = tl.load(sizes + number)
    if ALIGNED:
        size = tl.multiple_of(size, 4)  # else the mask at the end of a tensor would split the loads
    return size


@triton.jit
def squares(
    places, sizes, first, owner, sums, weight_decay, num_tensors, num_chunks,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums (2, num_chunks): of w^2 and of (g + weight_decay w)^2 in each chunk. Grid: (num_chunks,).

    places: addresses of num_tensors weights, then of as many gradients and buffers. sizes: elements of each tensor.
    first: number of each tensor's first chunk; one entry more, the number of chunks, ends the list. owner: tensor of each
    chunk.
    """
    chunk = tl.program_id(0)
    t = tl.load(owner + chunk)
    w = _tensor(places, t, ALIGNED)
    g = _tensor(places, num_tensors + t, ALIGNED)
    size = _size(sizes, t, ALIGNED)
    start = (chunk - tl.load(first + t)) * CHUNK
    square_w = tl.zeros((BLOCK,), tl.float32)
    square_g = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < size
        w_at = tl.load(w + at, mask=inside, other=0.0)
        g_at = tl.load(g + at, mask=inside, other=0.0) + weight_decay * w_at
        square_w += w_at * w_at
        square_g += g_at * g_at
    tl.store(sums + chunk, tl.sum(square_w, axis=0))
    tl.store(sums + num_chunks + chunk, tl.sum(square_g, axis=0))


@triton.jit
def update(
    places, sizes, first, owner, sums, failed, rate, momentum, weight_decay, trust_coefficient, num_tensors, num_chunks,
    ADAPT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """v = momentum v + rate trust (g + weight_decay w); w -= v; neither is touched where failed (float32, 0-d) is not 0.

    ADAPT: trust = trust_coefficient |w| / |g + weight_decay w|, 1 where either is 0; else 1, and nothing reads `sums`.
    Grid and tables as those of `squares`.
    """
    chunk = tl.program_id(0)
    t = tl.load(owner + chunk)
    begin = tl.load(first + t)
    if ADAPT:
        end = tl.load(first + t + 1)
        square_w = 0.0
        square_g = 0.0
        for number in range(begin, end, 256):
            at = number + tl.arange(0, 256)
            square_w += tl.sum(tl.load(sums + at, mask=at < end, other=0.0), axis=0)
            square_g += tl.sum(tl.load(sums + num_chunks + at, mask=at < end, other=0.0), axis=0)
        trust = trust_coefficient * tl.sqrt(square_w) / tl.sqrt(square_g)
        rate *= tl.where((square_w > 0.0) & (square_g > 0.0), trust, 1.0)
    w = _tensor(places, t, ALIGNED)
    g = _tensor(places, num_tensors + t, ALIGNED)
    v = _tensor(places, 2 * num_tensors + t, ALIGNED)
    # a failed step reads and writes nothing: NaN times 0 would be NaN
    size = tl.where(tl.load(failed) == 0.0, _size(sizes, t, ALIGNED), 0)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    for offset in range(0, CHUNK, BLOCK):
        at = (chunk - begin) * CHUNK + offset + tl.arange(0, BLOCK)
        inside = at < size
        w_at = tl.load(w + at, mask=inside, other=0.0)
        g_at = tl.load(g + at, mask=inside, other=0.0) + weight_decay * w_at
        v_at = momentum * tl.load(v + at, mask=inside, other=0.0) + rate * g_at
        tl.store(v + at, v_at, mask=inside)
        tl.store(w + at, w_at - v_at, mask=inside)


class GroupUpdate:
    """The update of one group of parameters: call it once a step. Keeps the tables that the kernels go by."""

    def __init__(self) -> None:
        self._numels: list[int] = []
        self._addresses: list[int] = []

    def __call__(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        buffers: Sequence[Tensor],
        failed: Tensor,
        *,
        rate: float,
        momentum: float,
        weight_decay: float,
        trust_coefficient: float | None,
    ) -> None:
        """Weights and buffers in place, gradients stay as they are; dense float32 of any order of strides.

        failed: float32, 0-d, on the device: not 0 where all is to stay as it is. trust_coefficient: None for no adaptation.
        """
        gradients = [
            g if same_layout(g, w) else torch.empty_like(w).copy_(g) for g, w in zip(gradients, weights, strict=True)
        ]
        self._find(weights, gradients, buffers)
        tables = (self._places, self._sizes, self._first, self._owner, self._sums)
        counts = (len(weights), len(self._owner))
        constants = {"ALIGNED": self._aligned, "CHUNK": CHUNK, "BLOCK": BLOCK}
        grid = (len(self._owner),)
        if trust_coefficient is not None:
            squares[grid](*tables, weight_decay, *counts, **constants)
        update[grid](
            *tables, failed, rate, momentum, weight_decay, trust_coefficient or 0.0, *counts,
            ADAPT=trust_coefficient is not None, **constants,
        )  # fmt: skip

    def _find(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Bring the tables up to date; costs a comparison where nothing has moved."""
        addresses = [tensor.data_ptr() for tensors in (weights, gradients, buffers) for tensor in tensors]
        if addresses == self._addresses:
            return
        device, numels = weights[0].device, [w.numel() for w in weights]
        if numels != self._numels:
            counts = [triton.cdiv(numel, CHUNK) for numel in numels]
            owner = [number for number, count in enumerate(counts) for _ in range(count)]
            self._numels, self._sizes = numels, _on_device(numels, torch.int32, device)
            self._first = _on_device([0, *itertools.accumulate(counts)], torch.int32, device)
            self._owner = _on_device(owner, torch.int32, device)
            self._sums = torch.empty(2, len(owner), device=device)
        for w, g, v in zip(weights, gradients, buffers, strict=True):
            if not same_layout(v, w) or {w.dtype, g.dtype, v.dtype} != {torch.float32}:
                raise ValueError(
                    "the kernels of lars need float32, and momentum in the layout of its weight: use optimizer.backend torch"
                )
        self._addresses, self._places = addresses, _on_device(addresses, torch.int64, device)
        self._aligned = all(a % 16 == 0 for a in addresses) and all(n % 4 == 0 for n in numels)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one shape have their elements in one order; strides of dimensions of size 1 say nothing."""
    if a.stride() == b.stride():
        return True
    return all(i == j for i, j, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)


def _on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy that the host does not wait for: a new pinned block each time, since the last one may not be read yet."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
