"""Measure the best rates of this machine, and compute lower bounds for the loss and the training step from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kernels.precision import full_float32
from trainer.bench.shapes import LossShape
from trainer.bench.timing import Window, interleave, timed
from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks
from trainer.tools.memory import estimate_memory

FLOAT_BYTES = 4
LOSS_PRODUCTS = ((8, 128, 64), (64, 128, 64), (64, 256, 128), (16, 512, 512), (1, 2048, 2048))  # batch, rows, size
MODEL_PRODUCTS = {
    "cpu": ((1, 256, 256), (1, 1024, 1024), (1, 2048, 2048)),
    "cuda": ((1, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192)),
}
COPY_BYTES = tuple(2**power for power in (18, 20, 22, 24, 26, 28))  # from a core's cache to memory
LARGE_COPY = 2**26  # does not fit a cache, like the activations of a step
SLOW_PRODUCT = 20  # stop at a product that takes more than 1/20 of the time: the next takes up to 64 times as long

MEANING = {
    "flop_per_view": "forward and backward of the networks, a multiplication and an addition counted as two; convolutions and "
    "products only, without the loss",
    "bytes_per_view": "lower bound: what forward keeps for backward (trainer/tools/memory.py), written once and read once",
    "matmul_tflops": "best product of this machine in the model's precision, 1e12 operations a second",
    "copy_gb_per_s": "best copy of 64 MiB or more, 1e9 bytes read and written a second",
    "roofline_views_per_s": "for a rank: the smaller of matmul_tflops over flop_per_view and copy_gb_per_s over bytes_per_view",
    "flop_utilisation": "measured views a second of a rank times flop_per_view, over matmul_tflops",
    "traffic_utilisation": "measured views a second of a rank times bytes_per_view, over copy_gb_per_s",
}


class Ceilings(NamedTuple):
    """Best rates of a machine."""

    gflops: float
    """1e9 operations a second of the best product."""
    copy_gb_per_s: dict[int, float]
    """Bytes of a copied tensor -> 1e9 bytes read and written a second."""

    def as_json(self) -> dict[str, Any]:
        """Return the rates with the sizes of the copies as text."""
        copies = {f"{num_bytes / 2**20:g} MiB": rate for num_bytes, rate in self.copy_gb_per_s.items()}
        return {"gflops": self.gflops, "copy_gb_per_s": copies}

    def copy_of_at_least(self, num_bytes: int) -> float:
        """Return the best rate of copies of at least this size, because smaller copies may stay in a cache."""
        larger = [rate for size, rate in self.copy_gb_per_s.items() if size >= num_bytes]
        return max(larger, default=self.copy_gb_per_s[max(self.copy_gb_per_s)])


def measure_ceilings(
    device: torch.device,
    seconds: float,
    shapes: Sequence[tuple[int, int, int]] = LOSS_PRODUCTS,
    dtype: torch.dtype = torch.float32,
) -> Ceilings:
    """Measure the best window of each product and each copy in about `seconds`."""
    with full_float32(device):
        products: dict[tuple[int, int, int], Window] = {}
        for shape in shapes:
            products[shape] = window = timed(_product(*shape, device, dtype), device)
            window(1)
            # In an emulated precision a larger product would take minutes.
            if window(1) > seconds / SLOW_PRODUCT:
                break
        copies = {num_bytes: timed(_copy(num_bytes, device), device) for num_bytes in COPY_BYTES}
        product_seconds = interleave(products, seconds / 2)
        copy_seconds = interleave(copies, seconds / 2)
    # A multiplication and an addition count as two operations; a copy reads and writes each byte.
    gflops = []
    for (batch, rows, size), times in product_seconds.items():
        operations = 2 * batch * rows * size**2
        gflops.append(operations / min(times) / 1e9)
    copy_gb_per_s = {num_bytes: 2 * num_bytes / min(times) / 1e9 for num_bytes, times in copy_seconds.items()}
    return Ceilings(max(gflops), copy_gb_per_s)


def _product(batch: int, rows: int, size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    left = torch.randn(batch, rows, size, device=device).to(dtype)
    right = torch.randn(batch, size, size, device=device).to(dtype)
    out = torch.empty_like(left)
    return lambda: torch.bmm(left, right, out=out)


def _copy(num_bytes: int, device: torch.device) -> Callable[[], Any]:
    source = torch.ones(num_bytes // FLOAT_BYTES, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def loss_floor(shape: LossShape, ceilings: Ceilings) -> dict[str, Any]:
    """Return a lower bound of the time of the loss, forward and backward.

    Returns flops, bytes, floor_us (the longer time of the two at the best rates) and bound ("arithmetic" or "memory").

    Flops of a slice of M rows and size k: five products (covariance, z, G^T Z, Z H and the one by W, kernels/README.md) of
    2 M k^2 each, and factor and inverse of a triangle, 2/3 k^3. Means, norms and distances are O(M k) and are neglected.

    Bytes: every iteration reads v in forward and again in backward, since z is never stored, and the gradient is written once:
    (2 iterations + 1) d N k floats. The time to launch operators is not included.
    """
    rows, size = shape.slice_size, shape.embedding_size
    flops_per_slice = 10 * rows * size**2 + 2 / 3 * size**3
    flops = shape.num_slices * flops_per_slice
    v_bytes = shape.num_views * shape.num_images * size * FLOAT_BYTES
    num_bytes = (2 * shape.iterations + 1) * v_bytes
    arithmetic_us = flops / ceilings.gflops / 1e3
    memory_us = num_bytes / ceilings.copy_of_at_least(v_bytes) / 1e3
    return {
        "flops": flops,
        "bytes": num_bytes,
        "floor_us": max(arithmetic_us, memory_us),
        "bound": "arithmetic" if arithmetic_us >= memory_us else "memory",
    }


def measure_roofline(
    config: Config, device: torch.device, dtype: torch.dtype | None, *, views: int, views_per_s: float, seconds: float
) -> dict[str, Any]:
    """Return the figures that MEANING explains.

    views: views that a rank puts through the model at once. views_per_s: measured speed of that rank. dtype: of autocast; None:
    float32.
    """
    ceilings = measure_ceilings(device, seconds, MODEL_PRODUCTS[device.type], dtype or torch.float32)
    copy_gb_per_s = ceilings.copy_of_at_least(LARGE_COPY)
    flop_per_view = count_flop_per_view(config, device, dtype)
    kept_bytes = estimate_memory(config, views, device).kept
    bytes_per_view = 2 * kept_bytes / views
    # Views per second at each of the two best rates; the slower one limits the step.
    by_flop = ceilings.gflops * 1e9 / flop_per_view
    by_traffic = copy_gb_per_s * 1e9 / bytes_per_view
    return {
        "flop_per_view": flop_per_view,
        "bytes_per_view": bytes_per_view,
        "matmul_tflops": ceilings.gflops / 1e3,
        "copy_gb_per_s": copy_gb_per_s,
        "roofline_views_per_s": min(by_flop, by_traffic),
        "roofline_bound": "arithmetic" if by_flop <= by_traffic else "memory",
        "flop_utilisation": views_per_s / by_flop,
        "traffic_utilisation": views_per_s / by_traffic,
        "meaning": MEANING,
    }


def sum_of_outputs(outputs: Any) -> Tensor:
    """Return a scalar whose backward passes through all networks of a method."""
    # A method with several networks returns several tensors, some without a gradient.
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    return torch.stack([tensor.sum() for tensor in tensors if tensor.requires_grad]).sum()


def count_flop_per_view(config: Config, device: torch.device, dtype: torch.dtype | None) -> float:
    """Count the floating-point operations of an eager forward and backward of a few views, per view."""
    # Collectives and recomputed blocks are not part of the model's arithmetic.
    model = replace(config.model, batch_norm_ranks="local", activation_checkpointing=False)
    method = config.method_settings.build(replace(config, model=model), Ranks(), device)
    networks = method.networks
    # A method that groups the rows of BatchNorm needs whole groups.
    settings = config.method_settings
    images = settings.indivisible_images(config) if settings.rows_of_statistics() else 2
    views = images * config.views.num_views
    size = config.views.size
    pixels = torch.zeros(views, 3, size, size, dtype=torch.uint8, device=device)
    pixels = pixels.to(memory_format=torch.channels_last)
    with FlopCounterMode(display=False) as counter:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            outputs = networks(pixels)
        sum_of_outputs(outputs).backward()
    return counter.get_total_flops() / views
