"""LARS, LARC and SGD on all tensors of a parameter group by two Triton kernels, on NVIDIA GPUs or, in tests, interpreted.

    (w, g) --squares--> sums of w^2 and (g + wd w)^2 of each chunk --update--> v, w

The sums also tell whether all gradients are finite. Between the two kernels the ranks agree on it, and `update` changes nothing
if the step has failed. Both divide the gradients by the loss scale of fp16. The kernels so pass over the group's memory seven
times; torch's operations pass over it 19 times for LARS, once more for the check of the gradients, and twice more for fp16.

A chunk is CHUNK consecutive elements of one tensor; each program processes one chunk. The kernels find the tensors through a
table of addresses, which is copied to the device only when it has changed. The host never waits for the device, and there are
no atomic sums, so the same gradients give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Each program of `update` adds up the sums of all chunks of its tensor. The recipe's largest weight, 2048 x 2048 in the
# projector, has 512 chunks.
CHUNK = 8192
BLOCK = 2048  # elements that a program holds at a time: 16 in each thread


@triton.jit
def _tensor(places, number, ALIGNED: tl.constexpr):
    """Return a pointer to tensor `number` of the table.

    ALIGNED: tell the compiler that it is a multiple of 16 bytes, so that it loads 4 elements at once.
    """
    pointer = tl.load(places + number).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _size(sizes, number, ALIGNED: tl.constexpr):
    """Return the number of elements of tensor `number`; ALIGNED: it is a multiple of 4."""
    size = tl.load(sizes + number)
    if ALIGNED:
        size = tl.multiple_of(size, 4)  # otherwise the mask at the end of a tensor would split the loads
    return size


@triton.jit
def squares(
    places,  # (3 * num_tensors,), addresses of the weights, then of their gradients, then of their momentum buffers
    sizes,  # (num_tensors,), number of elements of each tensor
    first,  # (num_tensors + 1,), number of each tensor's first chunk, and num_chunks
    owner,  # (num_chunks,), number of the tensor of each chunk
    sums,  # (2, num_chunks), written
    scale,  # float32, 0-d: the gradients are multiplied by it
    weight_decay,
    num_tensors,
    num_chunks,
    ADAPT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the sums of w^2 and of (g / scale + weight_decay w)^2 in each chunk. Grid: (num_chunks,).

    Without ADAPT, compute the sum of (g / scale)^2 only.
    """
    chunk = tl.program_id(0)
    t = tl.load(owner + chunk)
    w = _tensor(places, t, ALIGNED)
    g = _tensor(places, num_tensors + t, ALIGNED)
    size = _size(sizes, t, ALIGNED)
    unscale = 1.0 / tl.load(scale)
    start = (chunk - tl.load(first + t)) * CHUNK
    # Accumulate elementwise, and add up across the threads only once.
    square_w = tl.zeros((BLOCK,), tl.float32)
    square_g = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < size
        g_at = tl.load(g + at, mask=inside, other=0.0) * unscale
        if ADAPT:
            w_at = tl.load(w + at, mask=inside, other=0.0)
            square_w += w_at * w_at
            g_at += weight_decay * w_at
        square_g += g_at * g_at
    if ADAPT:
        tl.store(sums + chunk, tl.sum(square_w, axis=0))
    tl.store(sums + num_chunks + chunk, tl.sum(square_g, axis=0))


@triton.jit
def update(
    places,  # the tables, as in `squares`
    sizes,
    first,
    owner,
    sums,  # (2, num_chunks); read only if ADAPT
    scale,  # float32, 0-d, as in `squares`
    failed,  # float32, 0-d
    rate_inside,  # of the gradient in the momentum buffer
    rate_outside,  # of the buffer in the weight
    momentum,
    weight_decay,
    trust_coefficient,
    num_tensors,
    num_chunks,
    ADAPT: tl.constexpr,
    LARC: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set v = momentum v + rate_inside trust (g / scale + weight_decay w), then w = w - rate_outside v.

    Grid and tables as in `squares`. ADAPT: trust = trust_coefficient |w| / |g + weight_decay w|, or 1 if either norm is 0.
    LARC: its denominator is |g| + weight_decay |w| + 1e-8, and there is no decay if either norm is 0. Without ADAPT, trust is
    1, and `sums` is not read. If `failed` (float32, 0-d) is not 0, v and w are not touched.
    """
    chunk = tl.program_id(0)
    t = tl.load(owner + chunk)
    begin = tl.load(first + t)
    # Add up the sums of all chunks of this tensor.
    if ADAPT:
        end = tl.load(first + t + 1)
        square_w = 0.0
        square_g = 0.0
        for number in range(begin, end, 256):
            at = number + tl.arange(0, 256)
            squares_w = tl.load(sums + at, mask=at < end, other=0.0)
            squares_g = tl.load(sums + num_chunks + at, mask=at < end, other=0.0)
            square_w += tl.sum(squares_w, axis=0)
            square_g += tl.sum(squares_g, axis=0)
        adapted = (square_w > 0.0) & (square_g > 0.0)
        denominator = tl.sqrt(square_g)
        if LARC:
            denominator += weight_decay * tl.sqrt(square_w) + 1e-8
            weight_decay = tl.where(adapted, weight_decay, 0.0)
        # A division by a norm of 0 gives no valid ratio; `where` replaces it by 1.
        rate_inside *= tl.where(adapted, trust_coefficient * tl.sqrt(square_w) / denominator, 1.0)
    unscale = 1.0 / tl.load(scale)
    w = _tensor(places, t, ALIGNED)
    g = _tensor(places, num_tensors + t, ALIGNED)
    v = _tensor(places, 2 * num_tensors + t, ALIGNED)
    # After a failed step, treat the tensor as empty, so that nothing is read or written. (NaN times 0 would be NaN.)
    size = tl.where(tl.load(failed) == 0.0, _size(sizes, t, ALIGNED), 0)
    if ALIGNED:
        size = tl.multiple_of(size, 4)
    for offset in range(0, CHUNK, BLOCK):
        at = (chunk - begin) * CHUNK + offset + tl.arange(0, BLOCK)
        inside = at < size
        w_at = tl.load(w + at, mask=inside, other=0.0)
        g_at = tl.load(g + at, mask=inside, other=0.0) * unscale + weight_decay * w_at
        v_at = momentum * tl.load(v + at, mask=inside, other=0.0) + rate_inside * g_at
        tl.store(v + at, v_at, mask=inside)
        tl.store(w + at, w_at - rate_outside * v_at, mask=inside)


class Rule(NamedTuple):
    """The options of an update, as `trainer.optimizer.Lars` has them."""

    momentum: float
    weight_decay: float
    trust_coefficient: float | None  # None: no adaptation of the learning rate
    larc: bool = False


class GroupUpdate:
    """The update of one parameter group: `measure`, then `update`, once in each step. It keeps the kernels' tables."""

    def __init__(self) -> None:
        # Number of elements of each weight, and address of each tensor, for which the tables were built.
        self._numels: list[int] = []
        self._addresses: list[int] = []

    def measure(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        buffers: Sequence[Tensor],
        scale: Tensor,
        rule: Rule,
    ) -> Tensor:
        """Compute the norms that `update` needs. Return a number (0-d) that is finite only if all gradients are.

        All tensors are dense float32, with strides in any order. scale: loss scale by which the gradients are divided, float32,
        0-d, on the device. Raises ValueError if a tensor is not float32, or if a buffer does not have the layout of its weight.
        """
        # The kernels need gradients in the memory layout of their weights; copy the others, and keep the copies for `update`.
        pairs = zip(gradients, weights, strict=True)
        self._gradients = [g if same_layout(g, w) else torch.empty_like(w).copy_(g) for g, w in pairs]
        self._update_tables(weights, self._gradients, buffers)
        decay = 0.0 if rule.larc else rule.weight_decay
        squares[self._grid](
            *self._tables, scale, decay, *self._counts, ADAPT=rule.trust_coefficient is not None, **self._constants
        )
        return self._sums[1].sum()

    def update(self, scale: Tensor, failed: Tensor, rate_inside: float, rate_outside: float, rule: Rule) -> None:
        """Update the weights and momentum buffers of `measure` in place; the gradients do not change.

        failed: float32, 0-d, on the device; if it is not 0, nothing is updated.
        """
        trust = rule.trust_coefficient
        update[self._grid](
            *self._tables,
            scale,
            failed,
            rate_inside,
            rate_outside,
            rule.momentum,
            rule.weight_decay,
            trust or 0.0,
            *self._counts,
            ADAPT=trust is not None,
            LARC=rule.larc,
            **self._constants,
        )

    @property
    def _tables(self) -> tuple[Tensor, ...]:
        return self._places, self._sizes, self._first, self._owner, self._sums

    @property
    def _counts(self) -> tuple[int, int]:
        return len(self._numels), len(self._owner)

    @property
    def _grid(self) -> tuple[int]:
        return (len(self._owner),)

    @property
    def _constants(self) -> dict[str, int]:
        return {"ALIGNED": self._aligned, "CHUNK": CHUNK, "BLOCK": BLOCK}

    def _update_tables(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Update the tables. If no tensor has moved since the last call, this only compares addresses."""
        addresses = [tensor.data_ptr() for tensors in (weights, gradients, buffers) for tensor in tensors]
        if addresses == self._addresses:
            return
        device = weights[0].device
        numels = [w.numel() for w in weights]
        # Addresses change whenever gradients are allocated anew; sizes hardly ever change.
        if numels != self._numels:
            self._build_chunks(numels, device)
        for w, g, v in zip(weights, gradients, buffers, strict=True):
            if not same_layout(v, w) or {w.dtype, g.dtype, v.dtype} != {torch.float32}:
                raise ValueError(
                    "the kernels of the optimizer need float32, and momentum in the memory layout of its weight: use "
                    "optimizer.backend torch"
                )
        self._addresses = addresses
        self._places = _on_device(addresses, torch.int64, device)
        # 16 bytes are 4 elements: then all loads can be that wide.
        aligned_addresses = all(address % 16 == 0 for address in addresses)
        self._aligned = aligned_addresses and all(numel % 4 == 0 for numel in numels)

    def _build_chunks(self, numels: list[int], device: torch.device) -> None:
        """Cut the tensors into chunks and build the tables that depend only on their sizes."""
        counts = [triton.cdiv(numel, CHUNK) for numel in numels]
        # Chunks are numbered across all tensors; `owner` maps a chunk to its tensor, `first` the other way.
        owner = [number for number, count in enumerate(counts) for _ in range(count)]
        first = [0, *itertools.accumulate(counts)]
        self._numels = numels
        self._sizes = _on_device(numels, torch.int32, device)
        self._first = _on_device(first, torch.int32, device)
        self._owner = _on_device(owner, torch.int32, device)
        self._sums = torch.empty(2, len(owner), device=device)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same shape store their elements in the same order."""
    if a.stride() == b.stride():
        return True
    # The stride of a dimension of size 1 has no effect.
    dimensions = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(stride_a == stride_b for stride_a, stride_b, size in dimensions if size > 1)


def _on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values to the device without waiting.

    Each copy starts from a new pinned block, because the device may not have read the previous one yet.
    """
    values_on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return values_on_host.to(device, non_blocking=True)
