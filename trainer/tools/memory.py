"""Estimate the memory of a rank before a run starts, by tracing the networks without computing anything."""

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
_GPUS = {"40 GB": 39.0, "80 GB": 79.0}  # GiB that such a GPU reports
_TEMPORARY_SHARE = 0.1  # assumption: gradients of activations that exist at one time, as a share of what is kept
_OTHER_GIB = 4.0  # assumption: CUDA, DALI, workspaces of cuDNN


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of one rank."""

    state: int
    """Weights, gradients and moments."""
    kept: int
    """Activations that a forward pass keeps for backward, and weights in autocast's type."""
    views: int
    """Number of views that go through the networks at once."""

    @property
    def total(self) -> int:
        """Sum of both, without temporaries and the overhead of allocators."""
        return self.state + self.kept

    def fits(self, gpu_gib: float) -> bool:
        """Return whether the run is estimated to fit a GPU of `gpu_gib` GiB."""
        needed = self.total + _TEMPORARY_SHARE * self.kept
        return needed / _GIB + _OTHER_GIB <= gpu_gib


def memory_lines(config: Config, world_size: int) -> list[str]:
    """Describe the memory of a rank and, for a GPU, whether it fits common sizes and which setting makes it fit."""
    per_rank = config.data.images_per_step // world_size
    images = per_rank // micro_batches(config, per_rank)
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    memory = estimate_memory(config, images * config.views.num_views, device)
    # A compiled model keeps less for backward than an eager one.
    mode = "compiled" if compiles(config, device) else "eager"
    kept_mib = memory.kept / memory.views / 2**20
    lines = [
        f"memory of a rank: about {memory.total / _GIB:.1f} GiB = {memory.state / _GIB:.2f} GiB of weights, gradients and "
        f"moments + {memory.views} views x {kept_mib:.1f} MiB kept for backward ({mode})"
    ]
    if device.type == "cuda":
        # For each size of GPU say whether it suffices, or what makes it suffice.
        answers = []
        for name, gib in _GPUS.items():
            answer = "yes" if memory.fits(gib) else "no" + _settings_that_fit(config, images, memory, gib)
            answers.append(f"{name}: {answer}")
        lines.append(
            f"fits a GPU of {'; '.join(answers)} (assuming {_TEMPORARY_SHARE:.0%} more for temporaries, and {_OTHER_GIB:g} GiB "
            "for CUDA and DALI)"
        )
    return lines


def _settings_that_fit(config: Config, images: int, memory: Memory, gpu_gib: float) -> str:
    """Name the settings that make a run fit a GPU, if a rank needs `memory` for `images` at a time."""
    found = []
    # A lower memory budget costs less speed than smaller micro-batches, so it is tried first.
    if compiles(config, torch.device("cuda")) and config.model.activation_memory_budget == 1:
        config = replace(config, model=replace(config.model, activation_memory_budget=0.9))
        memory = estimate_memory(config, memory.views, torch.device("cuda"))
        found = ["model.activation_memory_budget 0.9"]
    if not memory.fits(gpu_gib):
        fitting = []
        unit = indivisible_images(config)
        sizes = range(unit, images, unit)
        for size in sizes:
            smaller = replace(memory, kept=memory.kept * size // images)
            if images % size == 0 and smaller.fits(gpu_gib):
                fitting.append(size)
        # CUDA graphs exclude micro-batches.
        if config.cuda_graphs or not fitting:
            return "; use more ranks"
        found.append(f"optimizer.images_per_micro_batch {fitting[-1]}")
    return f", but with {' and '.join(found)}"


@functools.cache
def estimate_memory(config: Config, views: int, device: torch.device) -> Memory:
    """Estimate the memory of a rank that puts `views` through the networks at once, eager or compiled as on `device`."""
    over_ranks = config.model.batch_norm_ranks not in ("local", 1)
    compiled = compiles(config, device)
    # With local statistics the compiler keeps as much, and traces in half the time.
    over_ranks = over_ranks and not compiled
    model = replace(config.model, batch_norm_ranks="all" if over_ranks else "local")
    config = replace(config, model=model)
    # No collective runs while the networks are traced, so any name of a group will do.
    group = "traced only" if over_ranks else None
    cpu = torch.device("cpu")
    networks = config.method_settings.build(config, Ranks(0, 2), cpu, batch_norm_group=group).networks

    # Bytes of weights, gradients and moments, in float32.
    weights = sum(p.numel() for p in networks.parameters())
    trained = sum(p.numel() for p in networks.parameters() if p.requires_grad)
    # Adam and AdamW have two moments, the others a momentum buffer.
    moments = 2 if config.optimizer.name in ("adam", "adamw") else 1
    num_floats = weights + trained * (1 + moments)
    state = 4 * num_floats

    # Bytes kept for backward, in the precision of a GPU.
    size = config.views.size
    pixels = torch.empty(views, 3, size, size, dtype=torch.uint8, memory_format=torch.channels_last)
    precision = "bf16" if config.precision == "auto" else config.precision
    dtype = autocast_dtype(replace(config, precision=precision), cpu)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        if compiled:
            kept = _kept_by_compiler(networks, pixels, config.model.activation_memory_budget)
        else:
            kept = _kept_by_autograd(networks, pixels)
    return Memory(state, kept, views)


def saved_storages(forward: Callable[[], Any]) -> dict[int, torch.UntypedStorage]:
    """Return the storages that autograd saves for the backward of `forward`, by address, each once."""
    saved = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Keep the storage alive, so that no later storage gets the same address.
        saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        forward()
    return saved


def _kept_by_autograd(networks: nn.Module, pixels: Tensor) -> int:
    """Count the bytes that an eager forward keeps for backward. Fake tensors compute nothing."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        # Parameters, buffers and pixels are not activations, whether they are saved as real or as fake tensors.
        others = []
        for tensor in (*networks.parameters(), *networks.buffers(), pixels):
            others.append(tensor.untyped_storage())
            others.append(mode.from_tensor(tensor).untyped_storage())
        saved = saved_storages(lambda: networks(mode.from_tensor(pixels)))
    addresses = {storage._cdata for storage in others}
    return sum(storage.nbytes() for address, storage in saved.items() if address not in addresses)


class _CountedError(Exception):
    """Ends a compilation after its graphs are counted."""


def _kept_by_compiler(networks: nn.Module, pixels: Tensor, budget: float) -> int:
    """Count the bytes that a compiled forward keeps for backward, without computing anything.

    Uses the partitioner and the decompositions of Inductor, which decide what is kept."""
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
        # What forward returns after its outputs is kept for backward. Placeholders are weights and pixels.
        kept = [node for node in output.args[0][num_fwd_outputs:] if node.op != "placeholder"]
        values = [node.meta["val"] for node in kept if isinstance(node.meta.get("val"), Tensor)]
        num_bytes = [value.untyped_storage().nbytes() for value in values]
        found.append(sum(num_bytes))
        raise _CountedError

    def stop(*_: Any) -> Callable[..., Any]:
        raise _CountedError

    backend = aot_autograd(fw_compiler=stop, partition_fn=partition, decompositions=select_decomp_table())
    torch._dynamo.reset()
    try:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            compiled = torch.compile(
                networks,
                fullgraph=True,
                dynamic=False,
                backend=backend,
            )
            compiled(pixels)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _CountedError):
            raise
    return found[0]
