"""Measure the speed of training and the time of each part of a step: the real loop on a real set, watched through its loader.

A step lasts from the moment when the loop gets its batch to the moment when it gets the next one.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trainer.bench.compute import FixedSteps, percent_of, sizes, step_figures
from trainer.bench.phases import PHASES, StepProfiler, covered_ns, device_ms, host_ranges
from trainer.bench.timing import MIN_WINDOWS, spread
from trainer.config.schema import Config
from trainer.distributed.device import choose_device
from trainer.distributed.process_group import process_group
from trainer.distributed.ranks import Ranks, find_ranks
from trainer.run.folder import start_logging
from trainer.run.machine import provenance
from trainer.run.signals import StopRequest
from trainer.run.state import RunState
from trainer.setup import Run, build_loader, set_up

WARMUP_STEPS = 5  # fill the loader's read-ahead, and compile
PROFILED_STEPS = 5  # smallest number of profiled steps
PROFILED_SHARE = 0.25  # largest number of profiled steps, as a share of the measured ones
MAX_WINDOWS = 10
COMPUTE_SHARE = 0.3  # share of the time for the step alone, half before and half after the loop
ENDLESS_EPOCHS = 1_000_000  # the clock ends the run

Train = Callable[..., int]  # `loop.train`, which only the command line imports


def bench_end2end(config: Config, seconds: float, train: Train, *, trace: Path | None = None) -> dict[str, Any] | None:
    """Measure the loop for about `seconds`, and the same step alone before and after it.

    train: `trainer.loop.train`. trace: file for the profiler's trace.
    Returns a dict for JSON on rank 0, None on the others:
    views_per_s: median and quartiles of windows, without profiler and warm-up.
    compute: the figures of the step alone. share_of_compute: views_per_s over that of the step alone.
    step: milliseconds and percent of each part of a profiled step (`host_parts`; on a GPU also `device_parts`).
    step.loop_overhead_percent: everything except waiting for data, forward, loss, backward and update. With several ranks it
    excludes "agree" as well, where they wait for the slowest.
    skipped_steps: number of steps of the run whose update was skipped.
    """
    ranks = find_ranks()
    device = choose_device(config, ranks)
    with (
        tempfile.TemporaryDirectory(prefix="bench_end2end_") as folder,
        process_group(config, ranks, device),
    ):
        run = _endless_run(config, ranks, device, Path(folder))
        start_logging(run.run_dir, ranks.rank)  # as in a run, so that the figures contain the time to log
        try:
            result = _measure(run, seconds, train, trace)
        finally:
            start_logging(None, ranks.rank)
            logging.getLogger().setLevel(logging.WARNING)
    if not ranks.is_first:
        return None
    return {
        "bench": "end2end",
        **result,
        "log_every_steps": config.log.every_steps,
        "page_cache": "warm if the set fits and was read before",
        **sizes(config, device, ranks),
        **provenance(device),
    }


def _endless_run(config: Config, ranks: Ranks, device: torch.device, folder: Path) -> Run:
    """Set up a run that only the clock ends. Its views have their final size from the start."""
    if config.views.early_sizes and ranks.is_first:
        print(f"note: views.early_sizes is ignored; measuring at {config.views.size} px", file=sys.stderr)
    (folder / "checkpoints").mkdir()
    endless = replace(
        config,
        views=replace(config.views, early_sizes=(), early_size_epochs=()),
        optimizer=replace(config.optimizer, epochs=ENDLESS_EPOCHS),
        max_steps=0,
        run_dir=str(folder),
    )
    return set_up(endless, ranks, device, folder)


def _measure(run: Run, seconds: float, train: Train, trace: Path | None) -> dict[str, Any]:
    # Measure the step alone before and after the loop, so that a machine that slows down affects both.
    alone = FixedSteps(run.config, run.step)
    alone.warm_up()
    around = seconds * COMPUTE_SHARE / 2
    compute = alone.times(around)
    # The loop gets the step and the loader through wrappers, so it runs the code of a real run.
    counting: Any = CountingStep(run.step)
    watch = _watch_training(replace(run, step=counting), seconds - 2 * around, train)
    compute += alone.times(around)
    if not run.ranks.is_first:
        return {}
    if trace is not None:
        watch.profiler.write_trace(trace)
    # The profiler slows steps down, so only those before it count.
    views = run.config.data.images_per_step * run.config.views.num_views
    measured_starts = watch.starts[: watch.measured + 1]
    rates = spread(_window_rates(measured_starts, views))
    figures = step_figures(compute, alone)
    return {
        "views_per_s": rates["median"],
        "views_per_s_spread": rates,
        "steps": watch.measured,
        "compute": figures,
        "share_of_compute": rates["median"] / figures["views_per_s"],
        # This includes the warm-up. The time of these steps is without the update.
        "skipped_steps": int(sum(counting.skipped)),
        "step": _where_time_goes(watch, run.device, alone=run.ranks.world_size == 1),
        "cores_shared": run.device.type == "cpu",  # loader and model then share the cores
    }


class CountingStep:
    """A step that passes calls on to another one and records which updates were skipped."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.skipped: list[torch.Tensor] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result = self._step(*arguments, **keywords)
        # The loop also makes steps without an update, to time them.
        if keywords.get("apply", True):
            self.skipped.append(result.skipped)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class WatchedLoader:
    """A loader that yields another one's batches, records when the loop takes each, and ends the run when the time is over.

    After the warm-up come measured steps, then steps under the profiler. Only rank 0 profiles and stops the run."""

    def __init__(self, run: Run, seconds: float, stop: StopRequest) -> None:
        self.profiler = StepProfiler(run.device)
        # For each step after the warm-up: its start in seconds of perf_counter, and the seconds of waiting for its batch.
        self.starts: list[float] = []
        self.waits: list[float] = []
        self.measured = 0  # steps before the profiler was started
        self.to_profile = 0
        self.events: list[Any] = []
        self._seconds = seconds
        self._stop = stop
        # Enough steps to contain one that logs, if time allows.
        self._most_profiled = run.config.log.every_steps + 1
        self._is_first = run.ranks.is_first
        self._loader: Any = None

    def watch(self, run: Run, first_step: int) -> Any:
        """Build the run's loader and return this one instead of it."""
        self._loader = build_loader(run, first_step)
        return self

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._loader):
            if number >= WARMUP_STEPS:
                self.waits.append(batch.wait_seconds)
                self.starts.append(time.perf_counter())
                if self._is_first and not self._stop.asked:
                    self._start_or_stop_profiler()
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def _start_or_stop_profiler(self) -> None:
        """Start the profiler after the measured steps, and stop it and the run after the profiled steps."""
        done = len(self.starts) - 1
        elapsed = self.starts[-1] - self.starts[0]
        # Profiling slows the steps down, so it follows the measurement.
        if self.measured:
            if done == self.measured + self.to_profile:
                self.events = self.profiler.stop()
                self._stop.ask()
        elif done >= MIN_WINDOWS and elapsed >= self._seconds:
            self.measured = done
            allowed = min(int(PROFILED_SHARE * done), self._most_profiled)
            self.to_profile = max(PROFILED_STEPS, allowed)
            self.profiler.start()


def _watch_training(run: Run, seconds: float, train: Train) -> WatchedLoader:
    """Train for about `seconds` of measured steps, then profile some steps, then stop as a signal would."""
    stop = StopRequest()
    state = RunState(run.run_dir, run.ranks)
    state.start(max_idle_restarts=1)
    watch = WatchedLoader(run, seconds, stop)
    train(run, stop, state, watch.watch)
    return watch


def _window_rates(starts: Sequence[float], views_per_step: int) -> list[float]:
    """Return the views per second of at most MAX_WINDOWS windows with the same number of steps.

    starts: the start of each step, and of one more."""
    steps = len(starts) - 1
    size = max(1, steps // MAX_WINDOWS)
    # Skip the first steps if they do not fill a window.
    edges = starts[steps % size :: size]
    views = size * views_per_step
    return [views / (end - start) for start, end in pairwise(edges)]


def _where_time_goes(watch: WatchedLoader, device: torch.device, *, alone: bool) -> dict[str, Any]:
    """Return the parts of a profiled step: on a GPU those of the device, else those of the host.

    alone: True for one rank. Several ranks wait for the slowest in "agree", which is not overhead of the loop."""
    ranges = host_ranges(watch.events)
    intervals = step_intervals(ranges, watch.to_profile)
    # The wait for a batch belongs to the step before it.
    first = watch.measured + 1
    waits = watch.waits[first : first + len(intervals)]
    whole_ns = intervals[-1][1] - intervals[0][0]
    whole_ms = whole_ns / 1e6 / len(intervals)
    wait_ms = 1e3 * sum(waits) / len(intervals)
    parts = host_parts(ranges, intervals, wait_ms)
    found: dict[str, Any] = {"profiled_steps": len(intervals), "step_ms": whole_ms, "host_ms": parts}
    if device.type == "cuda":
        busy = device_ms(watch.events, watch.to_profile)
        parts = device_parts(busy, whole_ms, wait_ms)
        found["device_ms"] = parts
    percent = percent_of(parts, whole_ms)
    found["percent"] = percent
    found["loop_overhead_percent"] = percent["rest"] + (percent["agree"] if alone else 0.0)
    return found


def step_intervals(ranges: dict[str, list[tuple[int, int]]], steps: int) -> list[tuple[int, int]]:
    """Return (start, end) of each step in ns, from one "forward" to the next one; only a step's first micro-batch counts."""
    starts = [start for start, _ in ranges["forward"]]
    micro_batches = len(starts) // steps
    return list(pairwise(starts[::micro_batches]))


def host_parts(
    ranges: dict[str, list[tuple[int, int]]], intervals: list[tuple[int, int]], wait_ms: float
) -> dict[str, float]:
    """Return the milliseconds of data_wait, each phase, and rest, which the loop takes. Together they are the step."""
    begin, end = intervals[0][0], intervals[-1][1]
    parts = {}
    for name in PHASES:
        spans = [span for span in ranges[name] if begin <= span[0] < end]
        parts[name] = covered_ns(spans) / 1e6 / len(intervals)
    whole = (end - begin) / 1e6 / len(intervals)
    return {"data_wait": wait_ms, **parts, "rest": whole - wait_ms - sum(parts.values())}


def device_parts(busy: dict[str, float], whole_ms: float, wait_ms: float) -> dict[str, float]:
    """Return the milliseconds of a step on a GPU. data_wait, the phases, beside and rest are the step together.

    busy: from `phases.device_ms`. data_wait: idle time while the host waits for data. beside: the all-reduce and DALI's kernels
    while nothing else runs. rest: torch's work outside the ranges, and the other idle time. all_reduce, augmentation, idle: the
    whole time of each.
    """
    # The profiled steps may be slower than the measured ones.
    idle = max(0.0, whole_ms - busy["busy"])
    data_wait = min(idle, wait_ms)
    phases = {name: busy[name] for name in PHASES}
    torch_busy = sum(phases.values()) + busy["outside"]
    return {
        "data_wait": data_wait,
        **phases,
        "beside": max(0.0, busy["busy"] - torch_busy),
        "rest": busy["outside"] + idle - data_wait,
        "all_reduce": busy["all_reduce"],
        "augmentation": busy["augmentation"],
        "idle": idle,
    }
