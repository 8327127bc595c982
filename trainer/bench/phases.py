"""Find where the time of a step goes, from the ranges that `TrainStep` names, as torch's profiler sees them.

On a CPU a range lasts as long as its work. On a GPU the host only launches: there a kernel belongs to the range in which it was
launched, by whichever thread.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trainer.bench.timing import synchronize

PHASES = ("forward", "loss", "backward", "agree", "update")  # the names of the step's ranges
DEVICE_PARTS = (*PHASES, "outside", "all_reduce", "augmentation")  # of the device's busy time
# CUDA's own functions; torch's operators have numbers of their own, which may be equal
LAUNCH = re.compile("cu(da)?[A-Z]")
NS_PER_MS = 1e6

Spans = list[tuple[int, int]]  # (start, end) in ns


class StepProfiler:
    """Start and stop torch's profiler between steps."""

    def __init__(self, device: torch.device) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it complains on a machine without a GPU
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities):  # the first profile sets up what later ones find there
            pass
        self._device = device
        self._profile = profile(activities=activities)

    def start(self) -> None:
        """Start recording. Call it between two steps."""
        synchronize(self._device)
        self._profile.start()

    def stop(self) -> list[Any]:
        """Return torch's raw events since start()."""
        synchronize(self._device)
        self._profile.stop()
        found: Any = self._profile.profiler
        return list(found.kineto_results.events())

    def write_trace(self, path: Path) -> None:
        """Write a trace for chrome://tracing. Call it after stop()."""
        self._profile.export_chrome_trace(str(path))


def profile_steps(step: Callable[[], Any], steps: int, device: torch.device, trace: Path | None = None) -> list[Any]:
    """Return the profiler's events of `steps` calls of a step that was warmed up before."""
    profiler = StepProfiler(device)
    profiler.start()
    for _ in range(steps):
        step()
    events = profiler.stop()
    if trace is not None:
        profiler.write_trace(trace)
    return events


def host_ranges(events: Iterable[Any]) -> dict[str, Spans]:
    """Return when each phase began and ended on the host: a pair of nanoseconds for each step."""
    found: dict[str, Spans] = {name: [] for name in PHASES}
    for event in events:
        if event.device_type() == DeviceType.CPU and event.is_user_annotation() and event.name() in found:
            found[event.name()].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return {name: sorted(spans) for name, spans in found.items()}


def host_ms(events: Iterable[Any], steps: int) -> dict[str, float]:
    """Return the milliseconds of the host in each phase of a step, the mean over `steps`."""
    return {
        name: sum(end - start for start, end in spans) / NS_PER_MS / steps
        for name, spans in host_ranges(events).items()
    }


def device_ms(events: Sequence[Any], steps: int) -> dict[str, float]:
    """Return the milliseconds of a step that the device was busy with each of DEVICE_PARTS, and "busy", with any of them.

    A kernel belongs to the range in which the host launched it. "outside": torch's own work outside the ranges, the loop's
    and the loader's copies. "all_reduce": NCCL's, wherever launched. "augmentation": kernels on streams that torch launched
    nothing on: DALI's. Parts that run at the same time add up to more than "busy".
    """
    launched = {e.correlation_id(): e.start_ns() for e in events if LAUNCH.match(e.name())}
    kernels = [e for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()]
    own_streams = {e.device_resource_id() for e in kernels if e.linked_correlation_id()}
    ranges = sorted((start, end, name) for name, spans in host_ranges(events).items() for start, end in spans)
    spans: dict[str, Spans] = {name: [] for name in DEVICE_PARTS}
    for event in kernels:
        if "nccl" in event.name().lower():
            part = "all_reduce"
        elif event.device_resource_id() not in own_streams:
            part = "augmentation"
        else:
            part = _range_at(ranges, launched.get(event.correlation_id(), 0))
        spans[part].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    busy = {name: covered_ns(parts) / NS_PER_MS / steps for name, parts in spans.items()}
    every = [span for parts in spans.values() for span in parts]
    return {**busy, "busy": covered_ns(every) / NS_PER_MS / steps}


def _range_at(ranges: list[tuple[int, int, str]], moment: int) -> str:
    at = bisect_right(ranges, (moment, 1 << 62, "")) - 1
    return ranges[at][2] if at >= 0 and moment < ranges[at][1] else "outside"


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length that the spans cover together; an overlap counts once."""
    covered, until = 0, -(1 << 62)
    for start, end in sorted(spans):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered
