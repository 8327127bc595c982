"""Times of a step and of its parts on the device. On a GPU they are events, which the host reads later without waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StepTimes:
    """Begin and end of a step, and the spans of its parts."""

    def __init__(self, device: torch.device) -> None:
        """Begin now."""
        self._device = device
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self.begin = self.end = _stamp(device)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block as a part of the step; a part may have several spans, one for each micro-batch."""
        begin = _stamp(self._device)
        yield
        self._spans.setdefault(name, []).append((begin, _stamp(self._device)))

    def finish(self) -> None:
        """End the step now."""
        self.end = _stamp(self._device)

    def is_known(self) -> bool:
        """Return whether the device has reached the end of the step, so that `seconds` can be read."""
        return isinstance(self.end, float) or self.end.query()

    def seconds(self, name: str = "") -> float:
        """Return the seconds of a part, 0 if the step has no such part; without a name those of the whole step."""
        spans = self._spans.get(name, []) if name else [(self.begin, self.end)]
        return sum(seconds_between(begin, end) for begin, end in spans)


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two times of `StepTimes` that the device has reached."""
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


def _stamp(device: torch.device) -> Any:
    """Return the time at which the device has done what was given to it so far: seconds on a CPU, an event on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
