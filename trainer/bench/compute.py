"""How fast a step is without a loader: the real `TrainStep` on batches that lie on the device already."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.bench.phases import PHASES, device_ms, host_ms, profile_steps
from trainer.bench.roofline import count_model_cost, measure_machine, roofline
from trainer.bench.synthetic import synthetic_run, synthetic_views
from trainer.bench.timing import MIN_WINDOW_SECONDS, MIN_WINDOWS, Window, spread, synchronize, timed
from trainer.config.schema import Config
from trainer.distributed.device import autocast_dtype, choose_device, compiles
from trainer.distributed.process_group import process_group
from trainer.distributed.ranks import Ranks, find_ranks
from trainer.run.machine import provenance
from trainer.setup import Run

WARMUP_STEPS = 3  # compile, autotune, allocate; none of them is measured
PROFILED_STEPS = 3
MAX_WINDOWS = 50
MIN_CALLS = {"cpu": 1, "cuda": 5}  # a window; a GPU stands idle at its start, until the first launches reach it
BATCHES = 2  # in turns, so that no step finds its input in a cache
CEILING_SECONDS = 3.0  # at most, for the machine's best rates
BATCH_NORMS = {  # name -> how BatchNorm takes its statistics
    "joint_local": {"encoder_batch_norm": "joint", "projector_batch_norm": "joint", "batch_norm_ranks": "local"},
    "per_view_local": {
        "encoder_batch_norm": "per_view",
        "projector_batch_norm": "per_view",
        "batch_norm_ranks": "local",
    },
    "joint_all": {"encoder_batch_norm": "joint", "projector_batch_norm": "joint", "batch_norm_ranks": "all"},
}


def bench_compute(
    config: Config, seconds: float, *, trace: Path | None = None, batch_norm: bool = False
) -> dict[str, Any] | None:
    """Steps of one rank, or of all ranks under torchrun, for about `seconds`; needs no set.

    trace: file for the profiler's trace. batch_norm: measure BATCH_NORMS, too, in turns.
    -> a dict for JSON, None on all ranks but the first:
    views_per_s (all ranks), step_ms: median and quartiles of windows; warm-up is left out.
    phases: milliseconds a step in each, on the host; on a GPU also of the device (`phases.device_ms`).
    roofline: see `roofline.MEANING`. skipped_steps: whose update was left out, which is then not in the time.
    """
    ranks = find_ranks()
    device = choose_device(config, ranks)
    with (
        tempfile.TemporaryDirectory(prefix="bench_compute_") as folder,
        process_group(config, ranks, device),
    ):
        run = synthetic_run(config, ranks, device, Path(folder))
        step = FixedSteps(run)
        result = measure_compute(step, seconds, trace)
        if batch_norm:
            result["batch_norm"] = _batch_norms(config, ranks, device, Path(folder), seconds)
    if not ranks.is_first:
        return None
    result["roofline"] = _roofline(config, device, ranks, result, seconds)
    return {"bench": "compute", **result, **sizes(config, device, ranks), **provenance(device)}


class FixedSteps:
    """The run's step on a few fixed batches in turns: call it for one step. The rate is 0, so weights stay as they are and no
    window has other work than the one before."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._batches = [synthetic_views(run, seed) for seed in range(BATCHES)]
        self._failed = torch.zeros((), dtype=torch.int64, device=run.device)
        self._steps = 0

    def __call__(self) -> None:
        batch, self._steps = self._batches[self._steps % BATCHES], self._steps + 1
        self._failed += self.run.step(batch, 0, 0.0).skipped

    def take_failed(self) -> int:
        """Steps that failed since the last call."""
        failed = int(self._failed)
        self._failed.zero_()
        return failed


def measure_compute(step: FixedSteps, seconds: float, trace: Path | None = None) -> dict[str, Any]:
    """Warm up, measure, profile -> the figures of `bench_compute` that need no more than the step. Every rank calls this."""
    run = step.run
    warm_up(step)
    step.take_failed()
    samples = step_times(step, seconds)
    result = {**step_figures(samples, run), **peak_memory(run.device)}
    result["parameters"] = sum(p.numel() for p in run.step.method.networks.parameters())
    result["skipped_steps"] = step.take_failed()
    if result["skipped_steps"] and run.ranks.is_first:
        print(f"note: {result['skipped_steps']} steps failed: their time is without the update", file=sys.stderr)
    events = profile_steps(step, PROFILED_STEPS, run.device, trace if run.ranks.is_first else None)
    result["phases"] = phase_figures(events, PROFILED_STEPS, run.device)
    return result


def warm_up(step: FixedSteps) -> None:
    """The first steps, which compile and allocate; the peak of memory counts from here."""
    for _ in range(WARMUP_STEPS):
        step()
    synchronize(step.run.device)
    if step.run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(step.run.device)


def take_agreed_turns(
    windows: Mapping[str, Window], seconds: float, ranks: Ranks, min_calls: int = 1
) -> dict[str, list[float]]:
    """Microseconds a call in each window, as `timing.take_turns`; but how many calls and windows is told once by the slowest
    rank, since all must make the same steps. Call each function before: nothing is warmed up here."""
    alone = {name: _slowest(window(1), ranks) for name, window in windows.items()}
    calls = {name: max(min_calls, math.ceil(MIN_WINDOW_SECONDS / one)) for name, one in alone.items()}
    round_seconds = sum(one * calls[name] for name, one in alone.items())
    rounds = min(MAX_WINDOWS, max(MIN_WINDOWS, int(seconds / round_seconds)))
    if rounds == MAX_WINDOWS:  # longer windows rather than more of them
        longer = max(1, int(seconds / round_seconds / MAX_WINDOWS))
        calls = {name: count * longer for name, count in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in windows}
    for _ in range(rounds):
        for name, window in windows.items():
            samples[name].append(window(calls[name]) / calls[name] * 1e6)
    return samples


def step_times(step: FixedSteps, seconds: float) -> list[float]:
    """Microseconds a step in each window, for about `seconds`. Every rank calls this, and warmed the step up before."""
    device, ranks = step.run.device, step.run.ranks
    return take_agreed_turns({"step": timed(step, device)}, seconds, ranks, MIN_CALLS[device.type])["step"]


def _slowest(seconds: float, ranks: Ranks) -> float:
    if ranks.world_size == 1:
        return seconds
    on_gpu = dist.get_backend() == "nccl"
    value = torch.tensor(seconds, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def step_figures(samples_us: list[float], run: Run) -> dict[str, Any]:
    """Windows in microseconds a step -> views_per_s (all ranks), its quartiles and step_ms."""
    views = run.config.data.images_per_step * run.config.views.num_views
    rates = spread([views / us * 1e6 for us in samples_us])
    return {
        "views_per_s": rates["median"],
        "views_per_s_spread": rates,
        "views_per_s_a_rank": rates["median"] / run.ranks.world_size,
        "step_ms": spread([us / 1e3 for us in samples_us]),
    }


def phase_figures(events: list[Any], steps: int, device: torch.device) -> dict[str, Any]:
    """Of profiled steps: milliseconds and percent of the phases' sum, on the host and, on a GPU, of the device."""
    host = host_ms(events, steps)
    figures: dict[str, Any] = {"host_ms": host, "percent": percent_of(host, sum(host.values()))}
    if device.type == "cuda":
        busy = device_ms(events, steps)
        parts = {name: busy[name] for name in PHASES}
        figures |= {"device_ms": busy, "percent": percent_of(parts, sum(parts.values()))}
    return figures


def percent_of(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Each part's share of the whole."""
    return {name: 100 * value / whole for name, value in parts.items()}


def peak_memory(device: torch.device) -> dict[str, int]:
    """On CUDA the highest memory that torch held since the warm-up, and reserved."""
    if device.type != "cuda":
        return {}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def sizes(config: Config, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """What was measured, for the head of a result."""
    dtype = autocast_dtype(config, device)
    return {
        "images_per_step": config.data.images_per_step,
        "num_views": config.views.num_views,
        "side": config.views.size,
        "ranks": ranks.world_size,
        "backbone": config.model.backbone,
        "precision": str(dtype or torch.float32).removeprefix("torch."),
        "compile": compiles(config, device),
        "autotune": config.autotune,
        "activation_memory_budget": config.model.activation_memory_budget,
        "accumulation_steps": config.optimizer.accumulation_steps,
        "slice_size": config.wmse.slice_size,
        "embedding_size": config.model.embedding_size,
    }


def _roofline(
    config: Config, device: torch.device, ranks: Ranks, result: dict[str, Any], seconds: float
) -> dict[str, Any]:
    dtype = autocast_dtype(config, device)
    machine = measure_machine(device, dtype, min(CEILING_SECONDS, seconds / 4))
    views = config.data.images_per_step // ranks.world_size * config.views.num_views
    return roofline(count_model_cost(config, device, dtype), machine, views, result["views_per_s_a_rank"])


def _batch_norms(config: Config, ranks: Ranks, device: torch.device, folder: Path, seconds: float) -> dict[str, Any]:
    """-> variant -> step_ms, and by how many percent its median is above that of joint_local. Alone, all ranks are one."""
    names = [name for name in BATCH_NORMS if name != "joint_all" or ranks.world_size > 1]
    windows: dict[str, Window] = {}
    for name in names:
        changed = replace(config, model=replace(config.model, **BATCH_NORMS[name]))  # type: ignore[arg-type]
        (folder / name).mkdir()
        step = FixedSteps(synthetic_run(changed, ranks, device, folder / name))
        warm_up(step)
        windows[name] = timed(step, device)
    turns = take_agreed_turns(windows, seconds, ranks, MIN_CALLS[device.type])
    times = {name: spread([us / 1e3 for us in all_us]) for name, all_us in turns.items()}
    base = times["joint_local"]["median"]
    return {name: {"step_ms": time, "percent_above": 100 * (time["median"] / base - 1)} for name, time in times.items()}
