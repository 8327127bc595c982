"""Estimate the memory of a rank before a run starts, by tracing the model without computing anything."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.config.schema import Config
from trainer.distributed.device import autocast_dtype, compiles
from trainer.distributed.geometry import indivisible_images, micro_batches
from trainer.distributed.ranks import Ranks

_GIB = 2**30
_CARDS = {"40 GB": 39.0, "80 GB": 79.0}  # GiB that such a card shows
_TEMPORARY_SHARE = 0.1  # assumption: gradients of activations, while backward holds them
_OTHER_GIB = 4.0  # assumption: CUDA, DALI, cuDNN's workspaces


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of one rank."""

    state: int
    """Weights, gradients and moments."""
    kept: int
    """What a forward pass keeps for backward: activations, and weights in autocast's type."""
    views: int
    """Views that go through the model at once."""

    @property
    def total(self) -> int:
        """Bytes without temporaries and the overhead of allocators."""
        return self.state + self.kept

    def fits(self, card_gib: float) -> bool:
        """Return whether a run is estimated to fit a card of `card_gib` GiB."""
        return self.total / _GIB + _TEMPORARY_SHARE * self.kept / _GIB + _OTHER_GIB <= card_gib


def memory_lines(config: Config, world_size: int) -> list[str]:
    """Describe the memory of a rank and, for a GPU, whether it fits common cards and which setting makes it fit."""
    per_rank = config.data.images_per_step // world_size
    images = per_rank // micro_batches(config, per_rank)
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    memory = estimate_memory(config, images * config.views.num_views, device)
    lines = [
        f"memory a rank: about {memory.total / _GIB:.1f} GiB = {memory.state / _GIB:.2f} for weights, gradients and moments + "
        f"{memory.views} views x {memory.kept / memory.views / 2**20:.1f} MiB kept for backward "
        f"({'compiled' if compiles(config, device) else 'eager'})"
    ]
    if device.type == "cuda":
        fits = [
            f"{name}: {'yes' if memory.fits(gib) else 'no' + _way_out(config, images, memory, gib)}"
            for name, gib in _CARDS.items()
        ]
        lines.append(
            f"fits a GPU of {'; '.join(fits)} (with {_TEMPORARY_SHARE:.0%} for temporaries and {_OTHER_GIB:g} GiB for CUDA and "
            "DALI, an assumption)"
        )
    return lines


def _way_out(config: Config, images: int, memory: Memory, card_gib: float) -> str:
    """Name the settings that make a run fit a card whose rank now takes `memory` for `images` at a time."""
    found = []
    if compiles(config, torch.device("cuda")) and config.model.activation_memory_budget == 1:
        config = replace(config, model=replace(config.model, activation_memory_budget=0.9))
        memory = estimate_memory(config, memory.views, torch.device("cuda"))
        found = ["model.activation_memory_budget 0.9"]
    if not memory.fits(card_gib):
        unit = indivisible_images(config)
        sizes = [] if config.cuda_graphs else [n for n in range(unit, images, unit) if images % n == 0]
        fitting = [n for n in sizes if replace(memory, kept=memory.kept * n // images).fits(card_gib)]
        if not fitting:
            return ", take more ranks"
        found.append(f"optimizer.images_per_micro_batch {fitting[-1]}")
    return f", but with {' and '.join(found)}"


@functools.cache
def estimate_memory(config: Config, views: int, device: torch.device) -> Memory:
    """Estimate the memory of a rank that puts `views` through the model at once, eager or compiled as on `device`."""
    all_ranks = config.model.batch_norm_ranks == "all"
    compiled = compiles(config, device)
    # the compiler keeps as much as for a rank's own statistics, and traces those in half the time
    if compiled and all_ranks:
        config, all_ranks = replace(config, model=replace(config.model, batch_norm_ranks="local")), False
    group = "traced only" if all_ranks else None
    model = config.method_settings.build(config, Ranks(0, 2), torch.device("cpu"), batch_norm_group=group).networks
    weights = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = 1 if config.optimizer.name == "lars" else 2
    size = config.views.size
    pixels = torch.empty(views, 3, size, size, dtype=torch.uint8, memory_format=torch.channels_last)
    precision = "bf16" if config.precision == "auto" else config.precision
    dtype = autocast_dtype(replace(config, precision=precision), torch.device("cpu"))
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        if compiled:
            kept = _kept_by_compiler(model, pixels, config.model.activation_memory_budget)
        else:
            kept = _kept_by_autograd(model, pixels)
    return Memory(4 * (weights + trained * (1 + moments)), kept, views)


def saved_storages(forward: Callable[[], Any]) -> dict[int, torch.UntypedStorage]:
    """Return the storages that autograd saves for the backward of `forward`, each once."""
    saved = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # kept alive, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        forward()
    return saved


def _kept_by_autograd(model: nn.Module, pixels: Tensor) -> int:
    """Count the bytes that an eager forward keeps for backward. Fake tensors compute nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        held = [*model.parameters(), *model.buffers(), pixels]
        own = [same.untyped_storage() for tensor in held for same in (tensor, mode.from_tensor(tensor))]
        kept = saved_storages(lambda: model(mode.from_tensor(pixels)))
    own_addresses = {storage._cdata for storage in own}
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own_addresses)


class _CountedError(Exception):
    """Ends a compilation whose graphs have been counted."""


def _kept_by_compiler(model: nn.Module, pixels: Tensor, budget: float) -> int:
    """Count the bytes that the compiled forward hands to the compiled backward; nothing is computed.

    Uses the partitioner and the decompositions of Inductor, which decide it."""
    import torch._functorch.config
    import torch._inductor.lowering  # the decompositions need it
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: list[int] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, _ = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        # the rest are weights and pixels
        made = [node for node in output.args[0][num_fwd_outputs:] if node.op != "placeholder"]
        values = [node.meta["val"] for node in made if isinstance(node.meta.get("val"), Tensor)]
        found.append(sum(value.untyped_storage().nbytes() for value in values))
        raise _CountedError

    def stop(*_: Any) -> Callable[..., Any]:
        raise _CountedError

    backend = aot_autograd(fw_compiler=stop, partition_fn=partition, decompositions=select_decomp_table())
    torch._dynamo.reset()
    try:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            torch.compile(model, fullgraph=True, dynamic=False, backend=backend)(pixels)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _CountedError):
            raise
    return found[0]
