"""What a view costs at least: the model's arithmetic and memory traffic, against the best rates of this machine."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from trainer.bench.floor import measure_ceilings
from trainer.bench.timing import Window, take_turns, timed
from trainer.bench.traffic import Traffic
from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks
from trainer.models.networks import build_encoder_projector

MATMUL_SIZES = {"cpu": (256, 1024, 2048), "cuda": (2048, 4096, 8192)}  # square; the best of them is the ceiling
SLOW_PRODUCT = 20  # a larger product takes up to 64 times as long as the one before
COPY_BYTES = 2**26  # a copy of tensors this large or larger: the activations of a step do not fit a cache either

MEANING = {
    "flop_per_view": "forward and backward of encoder and projector, a multiplication and an addition counted as two; "
    "convolutions and products only; the loss is left out",
    "bytes_per_view": "what the operators of an eager forward and backward read and write for one more view, from shapes: an "
    "operator reads each argument once and writes each result once, but BatchNorm reads its input twice (statistics, then "
    "values; backward: input and gradient twice), and a convolution's two gradients both read the gradient of its result; "
    "nothing is fused and no cache is assumed",
    "bytes_per_step": "the same for what does not grow with the views: weights, their casts and gradients",
    "matmul_tflops": "best square product of this machine in the model's precision, 1e12 operations a second",
    "copy_gb_per_s": "best copy of 64 MiB or more, bytes read and written",
    "roofline_views_per_s": "a rank: the smaller of matmul_tflops over flop_per_view and copy_gb_per_s over the bytes",
    "flop_utilisation": "measured views a second of a rank times flop_per_view, over matmul_tflops",
    "traffic_utilisation": "measured views a second of a rank times its bytes, over copy_gb_per_s; above 1 where caches and "
    "fused kernels save traffic",
}


BATCH_NORM_FORWARD = {
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
    "aten::cudnn_batch_norm",
}
BATCH_NORM_BACKWARD = {  # their two large arguments come first
    "aten::native_batch_norm_backward",
    "aten::batch_norm_backward",
    "aten::cudnn_batch_norm_backward",
}


class KernelTraffic(Traffic):
    """`Traffic`, and what the kernels of a BatchNorm and of a convolution's gradients read a second time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in BATCH_NORM_FORWARD:
            self.bytes += args[0].nbytes
        elif name in BATCH_NORM_BACKWARD:
            self.bytes += args[0].nbytes + args[1].nbytes
        elif name == "aten::convolution_backward" and all(args[-1][:2]):  # output_mask: of the input and of the weights
            self.bytes += args[0].nbytes
        return super().__torch_dispatch__(func, types, args, kwargs)


class ModelCost(NamedTuple):
    """Of forward and backward: what one more view costs, and what a step costs without any."""

    flop_per_view: float
    bytes_per_view: float
    bytes_per_step: float


def count_model_cost(config: Config, device: torch.device, dtype: torch.dtype | None) -> ModelCost:
    """Counted on batches of few views, eager, on `device`. dtype: of autocast; None: float32.

    Two batches tell apart what grows with the views from what does not.
    """
    local = replace(config.model, batch_norm_ranks="local", activation_checkpointing=False)
    model = build_encoder_projector(replace(config, model=local), Ranks()).to(device)
    per_view = "per_view" in (config.model.encoder_batch_norm, config.model.projector_batch_norm)
    unit = config.views.num_views if per_view else 1
    few, more = 2 * unit, 3 * unit  # two rows are the least that BatchNorm takes
    flop_few, bytes_few = _count(model, few, config.views.size, device, dtype)
    flop_more, bytes_more = _count(model, more, config.views.size, device, dtype)
    per_view_bytes = (bytes_more - bytes_few) / unit
    return ModelCost((flop_more - flop_few) / unit, per_view_bytes, bytes_few - few * per_view_bytes)


def _count(model: nn.Module, rows: int, side: int, device: torch.device, dtype: torch.dtype | None) -> tuple[int, int]:
    """-> operations, bytes of one forward and backward of `rows` views."""
    pixels = torch.zeros(rows, 3, side, side, dtype=torch.uint8, device=device).to(memory_format=torch.channels_last)
    cast = torch.autocast(device.type, dtype) if dtype is not None else contextlib.nullcontext()
    with FlopCounterMode(display=False) as flops, KernelTraffic() as traffic:
        with cast:
            embeddings = model(pixels)
        # backward() would copy each gradient while it is watched, which it does not do otherwise
        torch.autograd.grad(embeddings, list(model.parameters()), torch.ones_like(embeddings))
    return flops.get_total_flops(), traffic.bytes


def measure_machine(device: torch.device, dtype: torch.dtype | None, seconds: float) -> dict[str, float]:
    """-> matmul_tflops in this precision, copy_gb_per_s: the best windows of about `seconds`."""
    products: dict[int, Window] = {}
    for size in MATMUL_SIZES[device.type]:
        products[size] = window = timed(_product(size, device, dtype or torch.float32), device)
        window(1)
        if window(1) > seconds / SLOW_PRODUCT:  # emulated on this machine: a larger one would take minutes
            break
    times = take_turns(products, seconds / 2)
    copies = measure_ceilings(device, seconds / 2)
    return {
        "matmul_tflops": max(2 * size**3 / min(us) / 1e6 for size, us in times.items()),
        "copy_gb_per_s": copies.copy_of_at_least(COPY_BYTES),
    }


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Any:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def roofline(cost: ModelCost, machine: dict[str, float], views_per_step: int, views_per_s: float) -> dict[str, Any]:
    """What MEANING says, of one rank: views_per_step views a step, made at views_per_s."""
    bytes_per_view = cost.bytes_per_view + cost.bytes_per_step / views_per_step
    by_flop = machine["matmul_tflops"] * 1e12 / cost.flop_per_view
    by_traffic = machine["copy_gb_per_s"] * 1e9 / bytes_per_view
    return {
        **cost._asdict(),
        **machine,
        "roofline_views_per_s": min(by_flop, by_traffic),
        "roofline_bound": "arithmetic" if by_flop <= by_traffic else "memory",
        "flop_utilisation": views_per_s / by_flop,
        "traffic_utilisation": views_per_s / by_traffic,
        "meaning": MEANING,
    }
