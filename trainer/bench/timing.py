"""Time of several functions on one machine, in windows that take turns: a machine that gets busy slows all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

MIN_WINDOW_SECONDS = 0.005  # shorter ones measure the clock, the synchronisation and the scheduler of the machine
MIN_WINDOWS = 3

Window = Callable[[int], float]  # makes so many calls -> seconds that they took
Name = TypeVar("Name", bound=Hashable)


def synchronize(device: torch.device) -> None:
    """Wait for the device, where there is something to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], Any], device: torch.device) -> Window:
    """Calls one after the other; the device is waited for before the first and after the last."""

    def window(calls: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return time.perf_counter() - start

    return window


def timed_after(prepare: Callable[[], Any], function: Callable[[Any], Any], device: torch.device) -> Window:
    """Calls function(prepare()); each prepare() runs, and is waited for, outside the clock. Each call is waited for, too, so
    on a GPU the time to launch it is in the figure, which in `timed` hides behind the call before."""

    def window(calls: int) -> float:
        elapsed = 0.0
        for _ in range(calls):
            prepared = prepare()
            synchronize(device)
            start = time.perf_counter()
            function(prepared)
            synchronize(device)
            elapsed += time.perf_counter() - start
        return elapsed

    return window


def take_turns(windows: Mapping[Name, Window], seconds: float) -> dict[Name, list[float]]:
    """Microseconds a call in each window, for about `seconds` and MIN_WINDOWS rounds at least.

    Every function is called twice before, which is left out: the first call warms it up, the second tells how many calls
    last MIN_WINDOW_SECONDS; a function slower than that has one call a window.
    """
    for window in windows.values():
        window(1)
    calls = {name: math.ceil(MIN_WINDOW_SECONDS / window(1)) for name, window in windows.items()}
    samples: dict[Name, list[float]] = {name: [] for name in windows}
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < MIN_WINDOWS or time.perf_counter() < end:
        for name, window in windows.items():
            samples[name].append(window(calls[name]) / calls[name] * 1e6)
        rounds += 1
    return samples


def spread(samples: list[float]) -> dict[str, float]:
    """-> median, quartile_1, quartile_3, windows (how many samples)."""
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "quartile_1": lower, "quartile_3": upper, "windows": len(samples)}
