"""What a step of the loss costs at best on this machine: its arithmetic and its traffic against measured ceilings."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.precision import full_float32
from trainer.bench.shapes import LossShape
from trainer.bench.timing import take_turns, timed

FLOAT = 4  # bytes of a float32
PRODUCT_SHAPES = ((8, 128, 64), (64, 128, 64), (64, 256, 128), (16, 512, 512), (1, 2048, 2048))  # batch, rows, size
COPY_BYTES = tuple(2**power for power in (18, 20, 22, 24, 26, 28))  # from one that fits a core's cache to one in memory


class Ceilings(NamedTuple):
    """gflops: best float32 bmm, 1e9 operations a second; copy_gb_per_s: bytes of a tensor -> 1e9 bytes read and written
    a second when it is copied."""

    gflops: float
    copy_gb_per_s: dict[int, float]

    def as_json(self) -> dict[str, Any]:
        """With the copies' sizes in words."""
        copies = {f"{num_bytes / 2**20:g} MiB": rate for num_bytes, rate in self.copy_gb_per_s.items()}
        return {"gflops": self.gflops, "copy_gb_per_s": copies}

    def copy_of_at_least(self, num_bytes: int) -> float:
        """Best rate among copies of tensors as large or larger: small ones stay in caches, and are faster on a CPU."""
        larger = [rate for size, rate in self.copy_gb_per_s.items() if size >= num_bytes]
        return max(larger, default=self.copy_gb_per_s[max(self.copy_gb_per_s)])


def measure_ceilings(device: torch.device, seconds: float) -> Ceilings:
    """The best window of each product and each copy, in about `seconds`."""
    products = {shape: timed(_product(*shape, device), device) for shape in PRODUCT_SHAPES}
    copies = {num_bytes: timed(_copy(num_bytes, device), device) for num_bytes in COPY_BYTES}
    with full_float32(device):
        product_us = take_turns(products, seconds / 2)
        copy_us = take_turns(copies, seconds / 2)
    return Ceilings(
        gflops=max(2 * batch * rows * size**2 / min(us) / 1e3 for (batch, rows, size), us in product_us.items()),
        copy_gb_per_s={num_bytes: 2 * num_bytes / min(us) / 1e3 for num_bytes, us in copy_us.items()},
    )


def _product(batch: int, rows: int, size: int, device: torch.device) -> Any:
    left, right = torch.randn(batch, rows, size, device=device), torch.randn(batch, size, size, device=device)
    out = torch.empty_like(left)
    return lambda: torch.bmm(left, right, out=out)


def _copy(num_bytes: int, device: torch.device) -> Any:
    source = torch.ones(num_bytes // FLOAT, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def floor(shape: LossShape, ceilings: Ceilings) -> dict[str, Any]:
    """-> flops, bytes, floor_us = the longer of flops / best bmm and bytes / best copy, bound ("arithmetic" or "memory").

    Flops of one slice of M rows and size k, a multiplication and an addition counted as two:
        5 products of M k^2 multiplications: covariance, z, G^T Z, Z H and the last one by W (kernels/README.md)  10 M k^2
        Cholesky factor k^3 / 3 and inverse of a triangle k^3 / 3                                               2/3 k^3
    Means, norms and distances are O(M k) and left out. That a covariance is symmetric and W a triangle could save up to
    half of four products, which batched products do not do: it is not taken off.

    Bytes, for a form that never stores z: a forward reads v, since a slice and its covariance fit a core's memory, and
    the loss is one number; the backward reads v again, since nothing stays on the chip between the two, and makes z from
    it. Each iteration cuts other slices, so it reads both anew. The gradient is summed where it lies and written once.
        (2 iterations + 1) d N k floats
    W (k / M of v, could be stored or made again), permutations and the sums across iterations are left out: the least that
    any implementation with separate forward and backward moves. The rate is that of a copy of v's size or larger.

    Time to launch operators is not in it: small shapes stay far above their floor where launching costs more.
    """
    rows, size = shape.slice_size, shape.embedding_size
    flops = shape.num_slices * (10 * rows * size**2 + 2 / 3 * size**3)
    v_bytes = shape.num_views * shape.num_images * size * FLOAT
    num_bytes = (2 * shape.iterations + 1) * v_bytes
    arithmetic_us = flops / ceilings.gflops / 1e3
    memory_us = num_bytes / ceilings.copy_of_at_least(v_bytes) / 1e3
    return {
        "flops": flops,
        "bytes": num_bytes,
        "floor_us": max(arithmetic_us, memory_us),
        "bound": "arithmetic" if arithmetic_us >= memory_us else "memory",
    }
