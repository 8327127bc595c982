"""Measure the time of each part of a step with torch's profiler, by the ranges that `TrainStep` names.

On a CPU a range lasts as long as its work. On a GPU the host only launches kernels, so a kernel belongs to the range in which
any thread launched it.
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
DEVICE_PARTS = (*PHASES, "outside", "all_reduce", "augmentation")  # parts of the device's busy time
# Matches CUDA's functions only, because a correlation number of a torch operator may equal one of theirs.
LAUNCH = re.compile("cu(da)?[A-Z]")
NS_PER_MS = 1e6

Spans = list[tuple[int, int]]  # (start, end) in ns


class StepProfiler:
    """Start and stop torch's profiler between steps."""

    def __init__(self, device: torch.device) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences warnings on a machine without a GPU
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # The first profile initialises Kineto, which takes long. Keep that out of the measurement.
        with profile(activities=activities):
            pass
        self._device = device
        self._profile = profile(activities=activities)

    def start(self) -> None:
        """Start recording. Call it between two steps."""
        synchronize(self._device)
        self._profile.start()

    def stop(self) -> list[Any]:
        """Stop recording and return torch's raw events since start()."""
        synchronize(self._device)
        self._profile.stop()
        found: Any = self._profile.profiler
        return list(found.kineto_results.events())

    def write_trace(self, path: Path) -> None:
        """Write a trace for chrome://tracing. Call it after stop()."""
        self._profile.export_chrome_trace(str(path))


def profile_steps(step: Callable[[], Any], steps: int, device: torch.device, trace: Path | None = None) -> list[Any]:
    """Return the profiler's events of `steps` calls of `step`, which must be warm."""
    profiler = StepProfiler(device)
    profiler.start()
    for _ in range(steps):
        step()
    events = profiler.stop()
    if trace is not None:
        profiler.write_trace(trace)
    return events


def host_ranges(events: Iterable[Any]) -> dict[str, Spans]:
    """Return (start, end) of each phase on the host in nanoseconds, one pair for each step."""
    found: dict[str, Spans] = {name: [] for name in PHASES}
    for event in events:
        on_host = event.device_type() == DeviceType.CPU
        if on_host and event.is_user_annotation() and event.name() in found:
            found[event.name()].append(_span(event))
    return {name: sorted(spans) for name, spans in found.items()}


def _span(event: Any) -> tuple[int, int]:
    start = event.start_ns()
    return start, start + event.duration_ns()


def host_ms(events: Iterable[Any], steps: int) -> dict[str, float]:
    """Return the milliseconds of each phase of a step on the host, as the mean over `steps`."""
    found = {}
    for name, spans in host_ranges(events).items():
        nanoseconds = sum(end - start for start, end in spans)
        found[name] = nanoseconds / NS_PER_MS / steps
    return found


def device_ms(events: Sequence[Any], steps: int) -> dict[str, float]:
    """Return the milliseconds of a step in which the device worked on each of DEVICE_PARTS, and on any of them ("busy").

    A kernel belongs to the range in which the host launched it. outside: torch's work outside the ranges, and the copies of
    loop and loader. all_reduce: NCCL's kernels, wherever they were launched. augmentation: DALI's kernels, which run on streams
    on which torch launched nothing. Parts that run at the same time add up to more than "busy".
    """
    # When each kernel was launched, and which streams are torch's.
    launched = {e.correlation_id(): e.start_ns() for e in events if LAUNCH.match(e.name())}
    kernels = [e for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()]
    torch_streams = {e.device_resource_id() for e in kernels if e.linked_correlation_id()}
    ranges = []
    for name, phase_spans in host_ranges(events).items():
        ranges += [(start, end, name) for start, end in phase_spans]
    ranges.sort()
    # Assign each kernel to a part.
    spans: dict[str, Spans] = {name: [] for name in DEVICE_PARTS}
    for event in kernels:
        if "nccl" in event.name().lower():
            part = "all_reduce"
        elif event.device_resource_id() not in torch_streams:
            part = "augmentation"
        else:
            moment = launched.get(event.correlation_id(), 0)
            part = _range_at(ranges, moment)
        spans[part].append(_span(event))
    busy = {name: covered_ns(parts) / NS_PER_MS / steps for name, parts in spans.items()}
    every = [span for parts in spans.values() for span in parts]
    return {**busy, "busy": covered_ns(every) / NS_PER_MS / steps}


def _range_at(ranges: list[tuple[int, int, str]], moment: int) -> str:
    """Return the name of the range at a moment in ns, or "outside". ranges: sorted (start, end, name)."""
    at = bisect_right(ranges, (moment, 1 << 62, "")) - 1
    if at < 0:
        return "outside"
    _, end, name = ranges[at]
    return name if moment < end else "outside"


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the total length that the spans cover. An overlap counts once."""
    covered = 0
    until = -(1 << 62)  # end of what is covered so far
    for start, end in sorted(spans):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered
