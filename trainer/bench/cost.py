"""What one forward and backward costs beside time: operators or kernels, bytes moved, memory at the peak and in between."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trainer.bench.timing import synchronize
from trainer.bench.traffic import Traffic

Forward = Callable[[], Tensor]  # -> loss, a scalar that depends on v

MEANING = {
    "operators": "operators that torch hands to the device's code in forward and backward, views and bare allocations "
    "left out; a custom operator counts as what runs inside it, or as one where Triton kernels do its work",
    "bytes": "what those operators read and write, from the shapes of their arguments and results, without any cache; a "
    "custom operator of Triton kernels reads its arguments and writes its results once each, which is less than its kernels do",
    "launches": "CUDA only: kernels, copies and fills that the profiler saw on the device in forward and backward, Triton's "
    "included",
    "peak_bytes": "highest memory above what was held before, in forward and backward together: torch's allocator, without "
    "what LAPACK, cuBLAS or cuSOLVER keep for themselves",
    "saved_bytes": "storages that autograd holds from forward to backward, each once, v among them where it is saved; what "
    "a function hangs on its context past save_for_backward is not seen",
}


def measure_cost(forward: Forward, v: Tensor) -> dict[str, int]:
    """-> operators, bytes, peak_bytes, saved_bytes, and on CUDA launches; MEANING says what each counts.

    v: leaf that requires a gradient. Call `forward` once before: a first call compiles, and fills caches that stay.
    """

    def step() -> None:
        torch.autograd.grad(forward(), v)

    with Traffic() as traffic:
        step()
    cost = {"operators": traffic.operators, "bytes": traffic.bytes}
    if v.is_cuda:
        cost["launches"] = _cuda_launches(step)
    cost["peak_bytes"] = peak_bytes(step, v.device)
    cost["saved_bytes"] = saved_bytes(forward)
    return cost


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Bytes of the storages that autograd saves for the backward of `forward`, each counted once."""
    storages: dict[int, torch.UntypedStorage] = {}  # kept, so that none is freed and its address given to another

    def keep(tensor: Tensor) -> None:  # saves nothing: the graph is thrown away without a backward
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda nothing: nothing):
        forward()
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """Highest sum of the allocations made and not yet freed during `step`, in bytes."""
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    held = peak = 0
    for event in sorted(profile_events(step, memory=True, cuda=False), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _cuda_launches(step: Callable[[], Any]) -> int:
    def waited() -> None:
        step()
        torch.cuda.synchronize()

    events = profile_events(waited, memory=False, cuda=True)
    launches = sum(event.device_type() == DeviceType.CUDA and not event.is_user_annotation() for event in events)
    if launches == 0:
        raise RuntimeError("torch's profiler saw no kernel on the GPU: another profiler may hold its counters")
    return launches


def profiled_activities(*, cuda: bool) -> list[ProfilerActivity]:
    """What torch's profiler is to watch."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports on stderr that a machine without a GPU has none
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]


def profile_events(step: Callable[[], Any], *, memory: bool, cuda: bool) -> list[Any]:
    """What torch's profiler sees of `step`, as its raw events."""
    with profile(activities=profiled_activities(cuda=cuda), profile_memory=memory) as profiler:
        step()
    return profiler.profiler.kineto_results.events()
