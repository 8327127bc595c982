"""Measure how fast training is and where a step's time goes: the real loop on a real set, watched through its loader.

A step lasts from the moment that the loop gets its batch to the moment that it gets the next one.
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

WARMUP_STEPS = 5  # the loader's read-ahead fills, and what is compiled is compiled
PROFILED_STEPS = 5  # at least
PROFILED_SHARE = 0.25  # at most, of the number of measured steps
MAX_WINDOWS = 10
COMPUTE_SHARE = 0.3  # of the time, half before and half after the loop, for the step alone
ENDLESS_EPOCHS = 1_000_000  # the time ends the run, not the set

Train = Callable[..., int]  # `loop.train`, which only the command line imports


def bench_end2end(config: Config, seconds: float, train: Train, *, trace: Path | None = None) -> dict[str, Any] | None:
    """Measure the loop for about `seconds`, and the same step alone before and after it.

    train: `trainer.loop.train`. trace: file for the profiler's trace.
    Returns a dict for JSON, None on all ranks but the first:
    views_per_s: median and quartiles of windows, without profiler and warm-up; compute: the step alone; share_of_compute.
    step: milliseconds and percent of a step in each part, from profiled steps (`host_parts`; on a GPU also `device_parts`), and
    loop_overhead_percent: all but waiting for data, forward, loss, backward and update, and with several ranks but "agree",
    where they wait for the slowest. skipped_steps: steps of the run whose update was skipped.
    """
    ranks = find_ranks()
    device = choose_device(config, ranks)
    with (
        tempfile.TemporaryDirectory(prefix="bench_end2end_") as folder,
        process_group(config, ranks, device),
    ):
        run = _endless_run(config, ranks, device, Path(folder))
        start_logging(run.run_dir, ranks.rank)  # as a run does: the time of its lines is in the figures
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
        "page_cache": "warm where the set fits and was read before",
        **sizes(config, device, ranks),
        **provenance(device),
    }


def _endless_run(config: Config, ranks: Ranks, device: torch.device, folder: Path) -> Run:
    """Set up a run that only the clock ends, with views of their last size from the start."""
    if config.views.early_sizes and ranks.is_first:
        print(f"note: views.early_sizes are left out: measured at {config.views.size} px", file=sys.stderr)
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
    alone = FixedSteps(run.config, run.step)
    alone.warm_up()
    around = seconds * COMPUTE_SHARE / 2
    compute = alone.times(around)
    counting: Any = CountingStep(run.step)
    watch = _watch_training(replace(run, step=counting), seconds - 2 * around, train)
    compute += alone.times(around)
    if not run.ranks.is_first:
        return {}
    if trace is not None:
        watch.profiler.write_trace(trace)
    views = run.config.data.images_per_step * run.config.views.num_views
    rates = spread(_window_rates(watch.starts[: watch.measured + 1], views))
    figures = step_figures(compute, alone)
    return {
        "views_per_s": rates["median"],
        "views_per_s_spread": rates,
        "steps": watch.measured,
        "compute": figures,
        "share_of_compute": rates["median"] / figures["views_per_s"],
        "skipped_steps": int(sum(counting.skipped)),  # of the warm-up too: their time is without the update
        "step": _where_time_goes(watch, run.device, alone=run.ranks.world_size == 1),
        "cores_shared": run.device.type == "cpu",  # loader and model then take them from each other
    }


class CountingStep:
    """Hand on the calls of a step, and keep which updates were skipped."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.skipped: list[torch.Tensor] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result = self._step(*arguments, **keywords)
        self.skipped.append(result.skipped)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class WatchedLoader:
    """Hand on the batches of a loader, note when the loop took each, and end the run when the time is over.

    After the warm-up come measured steps, then steps under the profiler. Only the first rank profiles and asks for the end."""

    def __init__(self, run: Run, seconds: float, stop: StopRequest) -> None:
        self.profiler = StepProfiler(run.device)
        self.starts: list[float] = []  # perf_counter's seconds at the start of each step after the warm-up
        self.waits: list[
            float
        ] = []  # seconds that the loop waited for the batch of the step at the same place in `starts`
        self.measured = 0  # steps before the profiler was started
        self.to_profile = 0
        self.events: list[Any] = []
        self._seconds = seconds
        self._stop = stop
        # as many as there are between two logged lines, if time allows, so that one line is among them
        self._most_profiled = run.config.log.every_steps + 1
        self._is_first = run.ranks.is_first
        self._loader: Any = None

    def watch(self, run: Run, first_step: int) -> Any:
        """Build the run's loader, and return this one in its place."""
        self._loader = build_loader(run, first_step)
        return self

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._loader):
            if number >= WARMUP_STEPS:
                self.waits.append(batch.wait_seconds)
                self.starts.append(time.perf_counter())
                if self._is_first and not self._stop.asked:
                    self._step_starts()
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def _step_starts(self) -> None:
        """Start or stop the profiler, if it is time, outside the measured steps."""
        done = len(self.starts) - 1
        if self.measured:
            if done == self.measured + self.to_profile:
                self.events = self.profiler.stop()
                self._stop.ask()
        elif done >= MIN_WINDOWS and self.starts[-1] - self.starts[0] >= self._seconds:
            self.measured = done
            self.to_profile = max(PROFILED_STEPS, min(int(PROFILED_SHARE * done), self._most_profiled))
            self.profiler.start()


def _watch_training(run: Run, seconds: float, train: Train) -> WatchedLoader:
    """Train for about `seconds` of measured steps, then some under the profiler, then stop as by a signal."""
    stop = StopRequest()
    state = RunState(run.run_dir, run.ranks)
    state.start(max_idle_restarts=1)
    watch = WatchedLoader(run, seconds, stop)
    train(run, stop, state, watch.watch)
    return watch


def _window_rates(starts: Sequence[float], views_per_step: int) -> list[float]:
    """Return the views a second of up to MAX_WINDOWS windows of equally many steps. starts: one more than there are steps."""
    steps = len(starts) - 1
    size = max(1, steps // MAX_WINDOWS)
    edges = starts[steps % size :: size]  # the first steps are left out if they fill no window
    return [size * views_per_step / (end - start) for start, end in pairwise(edges)]


def _where_time_goes(watch: WatchedLoader, device: torch.device, *, alone: bool) -> dict[str, Any]:
    """Return the parts of a profiled step, those of the device on a GPU, else those of the host.

    alone: one rank. Several wait for the slowest in "agree", which is then no overhead of the loop."""
    ranges = host_ranges(watch.events)
    intervals = step_intervals(ranges, watch.to_profile)
    first = watch.measured + 1  # the wait for a batch ends the step before
    waits = watch.waits[first : first + len(intervals)]
    whole_ms = (intervals[-1][1] - intervals[0][0]) / 1e6 / len(intervals)
    wait_ms = 1e3 * sum(waits) / len(intervals)
    parts = host_parts(ranges, intervals, wait_ms)
    found: dict[str, Any] = {"profiled_steps": len(intervals), "step_ms": whole_ms, "host_ms": parts}
    if device.type == "cuda":
        parts = found["device_ms"] = device_parts(device_ms(watch.events, watch.to_profile), whole_ms, wait_ms)
    percent = found["percent"] = percent_of(parts, whole_ms)
    found["loop_overhead_percent"] = percent["rest"] + (percent["agree"] if alone else 0.0)
    return found


def step_intervals(ranges: dict[str, list[tuple[int, int]]], steps: int) -> list[tuple[int, int]]:
    """Return steps as (start, end) in ns, from one "forward" to the next; of several micro-batches the first counts."""
    starts = [start for start, _ in ranges["forward"]]
    micro_batches = len(starts) // steps
    return list(pairwise(starts[::micro_batches]))


def host_parts(
    ranges: dict[str, list[tuple[int, int]]], intervals: list[tuple[int, int]], wait_ms: float
) -> dict[str, float]:
    """Return milliseconds of a step: data_wait, the phases, and rest, which is the loop's. They add up to the step."""
    begin, end = intervals[0][0], intervals[-1][1]
    spans = {name: [s for s in ranges[name] if begin <= s[0] < end] for name in PHASES}
    parts = {name: covered_ns(found) / 1e6 / len(intervals) for name, found in spans.items()}
    whole = (end - begin) / 1e6 / len(intervals)
    return {"data_wait": wait_ms, **parts, "rest": whole - wait_ms - sum(parts.values())}


def device_parts(busy: dict[str, float], whole_ms: float, wait_ms: float) -> dict[str, float]:
    """Return milliseconds of a step on a GPU. data_wait, the phases, beside and rest add up to the step.

    busy: of `phases.device_ms`. data_wait: idle while the host waits for data. beside: the all-reduce and DALI's kernels while
    nothing else runs. rest: torch's work outside the ranges, and other idle time. all_reduce, augmentation, idle: all of each.
    """
    idle = max(0.0, whole_ms - busy["busy"])
    data_wait = min(idle, wait_ms)
    phases = {name: busy[name] for name in PHASES}
    return {
        "data_wait": data_wait,
        **phases,
        "beside": max(0.0, busy["busy"] - sum(phases.values()) - busy["outside"]),
        "rest": busy["outside"] + idle - data_wait,
        "all_reduce": busy["all_reduce"],
        "augmentation": busy["augmentation"],
        "idle": idle,
    }
