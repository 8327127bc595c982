"""How fast training is, and where a step's time goes: the real loop on a real set, watched from outside.

The loop gets a step and a loader that note the time and hand on. A step lasts from the start of its call to that of the next
one.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trainer.bench.compute import FixedSteps, percent_of, sizes, step_figures, step_times, warm_up
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
PROFILED_SHARE = 0.25  # of the measured steps so many more under the profiler at most
MAX_WINDOWS = 10
COMPUTE_SHARE = 0.3  # of the time, half before and half after the loop, for the step alone
ENDLESS_EPOCHS = 1_000_000  # the time ends the run, not the set
OVERHEAD = ("agree", "rest")  # of the loop, but for waiting for data

Train = Callable[..., int]  # `loop.train`, which only the command line imports


def bench_end2end(config: Config, seconds: float, train: Train, *, trace: Path | None = None) -> dict[str, Any] | None:
    """The loop for about `seconds`, the same step alone before and after it.

    train: `trainer.loop.train`. trace: file for the profiler's trace.
    -> a dict for JSON, None on all ranks but the first:
    views_per_s: median and quartiles of windows, profiler off, warm-up left out; compute: the step alone; share_of_compute.
    step: milliseconds and percent of a step in each part, from profiled steps (`host_parts`; on a GPU also `device_parts`), and
    loop_overhead_percent: all but waiting for data, forward, loss, backward and update, and with several
    ranks but "agree", where they wait for the slowest. skipped_steps: whose update was left out.
    Raises InputError as setting up a run does.
    """
    ranks = find_ranks()
    device = choose_device(config, ranks)
    with (
        tempfile.TemporaryDirectory(prefix="bench_end2end_") as folder,
        process_group(config, ranks, device),
    ):
        run = _endless_run(config, ranks, device, Path(folder))
        start_logging(run.run_dir, ranks.rank)  # as a run does: what its lines cost is in the figures
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
    """The run of `config` into `folder`, but that only the clock ends it, and that views have their last side from the start:
    the step alone is measured at one side."""
    if config.views.early_sizes and ranks.is_first:
        print(f"note: views.early_sizes are left out: measured at {config.views.size} px", file=sys.stderr)
    views = replace(config.views, early_sizes=(), early_size_epochs=())
    (folder / "checkpoints").mkdir()
    endless = replace(config.optimizer, epochs=ENDLESS_EPOCHS)
    return set_up(
        replace(config, views=views, optimizer=endless, max_steps=0, run_dir=str(folder)), ranks, device, folder
    )


def _measure(run: Run, seconds: float, train: Train, trace: Path | None) -> dict[str, Any]:
    alone = FixedSteps(run)
    warm_up(alone)
    around = seconds * COMPUTE_SHARE / 2
    compute = step_times(alone, around)
    watch = watch_training(run, seconds - 2 * around, train)
    compute += step_times(alone, around)
    if not run.ranks.is_first:
        return {}
    if trace is not None:
        watch.profiler.write_trace(trace)
    views = run.config.data.images_per_step * run.config.views.num_views
    rates = spread(window_rates(watch.starts[: watch.measured + 1], views))
    figures = step_figures(compute, run)
    return {
        "views_per_s": rates["median"],
        "views_per_s_spread": rates,
        "steps": watch.measured,
        "compute": figures,
        "share_of_compute": rates["median"] / figures["views_per_s"],
        "skipped_steps": int(sum(watch.failed)),  # of all, the warm-up's too: their time is without the update
        "step": where_time_goes(watch, run.device, alone=run.ranks.world_size == 1),
        "cores_shared": run.device.type == "cpu",  # loader and model then take them from each other
    }


@dataclass
class Watch:
    """What was seen of a training run; the first rank alone profiles, and asks for the end.

    Times are perf_counter's seconds; lists have an entry for each step after the warm-up.
    """

    seconds: float
    """How long to measure for."""
    profiler: StepProfiler
    most_profiled: int
    """Steps under the profiler at most."""
    is_first: bool = True
    starts: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Of the loop for each batch; the batch of the step that starts at the same place in `starts`."""
    seen: int = 0
    """Steps, warm-up included."""
    measured: int = 0
    """Steps before the profiler was started; starts[measured] is the end of the last of them."""
    failed: list[Any] = field(default_factory=list)
    """Of each step, on the device, whether its update was left out."""
    to_profile: int = 0
    events: list[Any] = field(default_factory=list)


def watch_training(run: Run, seconds: float, train: Train) -> Watch:
    """Train for about `seconds` of measured steps, then some with the profiler on, then stop as by a signal."""
    # as many as there are between two logged lines, where time allows, so that one line is in them
    watch = Watch(seconds, StepProfiler(run.device), run.config.log.every_steps + 1, run.ranks.is_first)
    stop = StopRequest()
    state = RunState(run.run_dir, run.ranks)
    state.start(max_idle_restarts=1)
    watched: Any = replace(run, step=_WatchedStep(run.step, watch, stop))  # type: ignore[arg-type]
    train(watched, stop, state, lambda run, first_step: _WatchedLoader(build_loader(run, first_step), watch))
    return watch


class _WatchedStep:
    """Notes when it is called; hands on all else that is asked of the step."""

    def __init__(self, step: Any, watch: Watch, stop: StopRequest) -> None:
        self._step, self._watch, self._stop = step, watch, stop

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        note_start(self._watch, self._stop, time.perf_counter())
        result = self._step(*arguments, **keywords)
        self._watch.failed.append(result.skipped)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


class _WatchedLoader:
    """Notes how long each batch was waited for; hands on all else that is asked of the loader."""

    def __init__(self, loader: Any, watch: Watch) -> None:
        self._loader, self._watch = loader, watch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if self._watch.seen >= WARMUP_STEPS:
                self._watch.waits.append(batch.wait_seconds)
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def note_start(watch: Watch, stop: StopRequest, now: float) -> None:
    """A step starts: what it counts as. The profiler starts and stops here, outside the steps that are measured."""
    watch.seen += 1
    if watch.seen <= WARMUP_STEPS:
        return
    watch.starts.append(now)
    done = len(watch.starts) - 1  # steps since the warm-up
    if not watch.is_first or stop.asked:
        return
    if watch.measured:
        if done == watch.measured + watch.to_profile:
            watch.events = watch.profiler.stop()
            stop.ask()
    elif done >= MIN_WINDOWS and now - watch.starts[0] >= watch.seconds:
        watch.measured = done
        affordable = int(PROFILED_SHARE * done)
        watch.to_profile = max(PROFILED_STEPS, min(affordable, watch.most_profiled))
        watch.profiler.start()


def window_rates(starts: list[float], views_per_step: int) -> list[float]:
    """Views a second of up to MAX_WINDOWS windows of equally many steps; starts: one more than there are steps."""
    steps = len(starts) - 1
    size = max(1, steps // MAX_WINDOWS)
    edges = starts[steps % size :: size]  # the first steps are left out where they fill no window
    return [size * views_per_step / (end - start) for start, end in pairwise(edges)]


def where_time_goes(watch: Watch, device: torch.device, *, alone: bool) -> dict[str, Any]:
    """Parts of a profiled step. On a CPU the host's parts are all there is; on a GPU the device's count.

    alone: one rank. Several wait for the slowest in "agree", which is then no overhead of the loop."""
    first = watch.measured  # the step at whose start the profiler was started
    waits = watch.waits[first + 1 : first + 1 + watch.to_profile]
    intervals = interval_ns(host_ranges(watch.events), watch.to_profile)
    whole_ms = sum(end - start for start, end in intervals) / 1e6 / len(intervals)
    wait_ms = 1e3 * sum(waits[: len(intervals)]) / len(intervals)
    host = host_parts(watch.events, intervals, wait_ms)
    found: dict[str, Any] = {"profiled_steps": len(intervals), "step_ms": whole_ms, "host_ms": host}
    parts = host
    if device.type == "cuda":
        parts = found["device_ms"] = device_parts(device_ms(watch.events, watch.to_profile), whole_ms, wait_ms)
    found["percent"] = percent_of(parts, whole_ms)
    found["loop_overhead_percent"] = sum(found["percent"][name] for name in (OVERHEAD if alone else OVERHEAD[1:]))
    return found


def interval_ns(ranges: dict[str, list[tuple[int, int]]], steps: int) -> list[tuple[int, int]]:
    """Steps from one start of "forward" to the next one. With accumulation a step has several: only its first counts."""
    starts = [start for start, _ in ranges["forward"]]
    parts = len(starts) // steps
    return list(pairwise(starts[::parts]))


def host_parts(events: list[Any], intervals: list[tuple[int, int]], wait_ms: float) -> dict[str, float]:
    """Milliseconds a step: data_wait, the phases, and rest, which is the loop's; they add up to the step."""
    begin, end = intervals[0][0], intervals[-1][1]
    ranges = host_ranges(events)
    spans = {name: [s for s in ranges[name] if begin <= s[0] < end] for name in PHASES}
    parts = {name: covered_ns(found) / 1e6 / len(intervals) for name, found in spans.items()}
    whole = (end - begin) / 1e6 / len(intervals)
    return {"data_wait": wait_ms, **parts, "rest": whole - wait_ms - sum(parts.values())}


def device_parts(busy: dict[str, float], whole_ms: float, wait_ms: float) -> dict[str, float]:
    """Milliseconds a step on a GPU, from `phases.device_ms`; data_wait, the phases, beside and rest add up to the step.

    data_wait: idle while the host waits for data. beside: the all-reduce and DALI's kernels where nothing else runs. rest:
    torch's work outside the ranges, and idle without a reason of the loader's. all_reduce, augmentation, idle: all of each.
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
