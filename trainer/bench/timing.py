"""Time several functions in windows that alternate, so that a busy machine slows down all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.distributed.ranks import Ranks

MIN_WINDOW_SECONDS = 0.005  # shorter windows measure the clock and the machine's scheduler
MIN_WINDOWS = 3
MAX_WINDOWS = 50
MIN_CALLS = {"cpu": 1, "cuda": 5}  # calls of a window; a GPU is idle until the first launch of a window reaches it

Window = Callable[[int], float]  # makes a number of calls and returns their seconds
Name = TypeVar("Name", bound=Hashable)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], Any], device: torch.device) -> Window:
    """Return a timer of consecutive calls. The device is synchronized before the first call and after the last."""

    def window(calls: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return time.perf_counter() - start

    return window


def timed_after(prepare: Callable[[], Any], function: Callable[[Any], Any], device: torch.device) -> Window:
    """Return a timer of function(prepare()) that excludes the time of prepare().

    It synchronizes the device around each call, so on a GPU the time includes the launch, which `timed` hides."""

    def window(calls: int) -> float:
        # Only the calls themselves are timed, so the device must be idle before each.
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


def interleave(
    windows: Mapping[Name, Window],
    seconds: float,
    *,
    ranks: Ranks | None = None,
    min_calls: int = 1,
    num_windows: int = 0,
    warm_up: bool = True,
) -> dict[Name, list[float]]:
    """Return the seconds of a call in each window of each function. All functions together take about `seconds`.

    Every round has one window of each function, and all windows last about equally long. With several ranks the slowest rank
    determines the number of calls in a window, so that all ranks make the same calls.

    num_windows: number of windows of each function; 0: from 3 to 50, as time allows. warm_up: call every function once before
    it is timed.
    """
    ranks = ranks or Ranks()
    share = seconds / (num_windows or MAX_WINDOWS) / max(1, len(windows))
    target = max(MIN_WINDOW_SECONDS, share)
    # Find how many calls of each function fill a window.
    calls: dict[Name, int] = {}
    round_seconds = 0.0
    for name, window in windows.items():
        if warm_up:
            window(1)
        calls[name], call_seconds = _calls_of_window(window, target, ranks, min_calls)
        round_seconds += calls[name] * call_seconds
    affordable = round(seconds / max(round_seconds, 1e-9))
    rounds = num_windows or min(MAX_WINDOWS, max(MIN_WINDOWS, affordable))
    samples: dict[Name, list[float]] = {name: [] for name in windows}
    for _ in range(rounds):
        for name, window in windows.items():
            samples[name].append(window(calls[name]) / calls[name])
    return samples


def _calls_of_window(window: Window, target: float, ranks: Ranks, min_calls: int) -> tuple[int, float]:
    """Return the number of calls that last about `target` seconds, and the seconds of one call."""
    calls = min_calls
    elapsed = _slowest(window(calls), ranks)
    # A short window may mislead: the first batches of a loader, for example, are ready when it is asked for them.
    while elapsed < target / 4:
        calls *= 4
        elapsed = _slowest(window(calls), ranks)
    call_seconds = elapsed / calls
    return max(min_calls, math.ceil(target / call_seconds)), call_seconds


def _slowest(seconds: float, ranks: Ranks) -> float:
    """Return the largest value of any rank. Every rank calls this."""
    if ranks.world_size == 1:
        return seconds
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def spread(samples: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return median, quartile_1 and quartile_3 of the samples times `scale`, and the number of samples as "windows"."""
    scaled = [scale * sample for sample in samples]
    if len(scaled) > 1:
        lower, median, upper = statistics.quantiles(scaled, n=4, method="inclusive")
    else:
        lower = median = upper = scaled[0]
    return {"median": median, "quartile_1": lower, "quartile_3": upper, "windows": len(scaled)}
