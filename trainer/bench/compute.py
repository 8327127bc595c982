"""Measure how fast a step is without a loader: the real `TrainStep` on batches that lie on the device already."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.bench.phases import PHASES, device_ms, host_ms, profile_steps
from trainer.bench.timing import MIN_CALLS, Window, interleave, spread, synchronize, timed
from trainer.config.schema import Config
from trainer.distributed.device import autocast_dtype, choose_device, compiles
from trainer.distributed.process_group import process_group
from trainer.distributed.ranks import Ranks, find_ranks
from trainer.run.machine import provenance
from trainer.setup import build_step, check_device
from trainer.step import TrainStep

WARMUP_STEPS = 3  # they compile, autotune and allocate; none of them is measured
PROFILED_STEPS = 3
BATCHES = 2  # in turns, so that no step finds its input in a cache
CEILING_SECONDS = 3.0  # at most, for the machine's best rates
COARSE_CELLS = (
    5  # of a side of a synthetic image: noise of single pixels would look the same to an encoder that averages
)
BATCH_NORMS = {  # name -> how BatchNorm takes its statistics
    "joint_local": ("joint", "local"),
    "per_view_local": ("per_view", "local"),
    "joint_all": ("joint", "all"),
}


def bench_compute(
    config: Config, seconds: float, *, trace: Path | None = None, batch_norm: bool = False
) -> dict[str, Any] | None:
    """Measure steps of one rank, or of all ranks under torchrun, for about `seconds`. No images are needed.

    trace: file for the profiler's trace. batch_norm: measure BATCH_NORMS as well, in turns.
    Returns a dict for JSON, None on all ranks but the first:
    views_per_s (of all ranks) and step_ms: median and quartiles of windows, without the warm-up.
    phases: milliseconds of a step in each, on the host; on a GPU also of the device (`phases.device_ms`).
    roofline: see `ceilings.MEANING`. skipped_steps: their update is not in the time.
    """
    ranks = find_ranks()
    device = choose_device(config, ranks)
    with process_group(config, ranks, device):
        steps = fixed_steps(config, ranks, device)
        result = measure_compute(steps, seconds, trace)
        if batch_norm:
            result["batch_norm"] = _batch_norms(config, ranks, device, seconds)
    if not ranks.is_first:
        return None
    from trainer.bench.ceilings import measure_roofline

    result["roofline"] = measure_roofline(
        config,
        device,
        steps.step.autocast_dtype,
        views=steps.step.images.count // steps.step.micro_batches * config.views.num_views,
        views_per_s=result["views_per_s_a_rank"],
        seconds=min(CEILING_SECONDS, seconds / 4),
    )
    return {"bench": "compute", **result, **sizes(config, device, ranks), **provenance(device)}


class FixedSteps:
    """A step on a few fixed batches in turns: call it for one update.

    The learning rate is 0, so that weights stay as they are and every window has the same work."""

    def __init__(self, config: Config, step: TrainStep) -> None:
        self.config = config
        self.step = step
        self.device = step.device
        self._batches = [synthetic_views(config, step.images.count, step.device, seed) for seed in range(BATCHES)]
        self._skipped = torch.zeros((), dtype=torch.int64, device=step.device)
        self._calls = 0

    def __call__(self) -> None:
        batch = self._batches[self._calls % BATCHES]
        self._calls += 1
        self._skipped += self.step(batch, 0, 0.0).skipped

    def take_skipped(self) -> int:
        """Return the number of updates that were skipped since the last call."""
        skipped = int(self._skipped)
        self._skipped.zero_()
        return skipped

    def warm_up(self) -> None:
        """Make the first steps, which compile and allocate. The peak of memory counts from here."""
        for _ in range(WARMUP_STEPS):
            self()
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def window(self) -> Window:
        """Return the timer of these steps."""
        return timed(self, self.device)

    def times(self, seconds: float) -> list[float]:
        """Return the seconds of a step in each window of about `seconds`. Every rank calls this, after the warm-up."""
        windows = {"step": self.window()}
        return interleave(windows, seconds, ranks=self.step.ranks, min_calls=MIN_CALLS[self.device.type])["step"]


def fixed_steps(config: Config, ranks: Ranks, device: torch.device) -> FixedSteps:
    """Build the step of `config` and its batches. Raises InputError if the settings don't fit device or ranks."""
    check_device(config, device)
    return FixedSteps(config, build_step(config, ranks, device))


def synthetic_views(config: Config, images: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw (d*images, 3, S, S) uint8, channels_last: smooth random images, all different."""
    views, size = config.views.num_views * images, config.views.size
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(views, 3, COARSE_CELLS, COARSE_CELLS, generator=generator).to(device)
    out = torch.empty(views, 3, size, size, dtype=torch.uint8, device=device, memory_format=torch.channels_last)
    for first in range(0, views, 64):  # in parts: float32 images of a whole step would be the peak of memory
        part = slice(first, first + 64)
        out[part] = 255 * F.interpolate(coarse[part], size=size, mode="bilinear", align_corners=True)
    return out


def measure_compute(steps: FixedSteps, seconds: float, trace: Path | None = None) -> dict[str, Any]:
    """Warm up, measure and profile. Every rank calls this."""
    device = steps.device
    is_first = steps.step.ranks.is_first
    steps.warm_up()
    steps.take_skipped()
    result = {**step_figures(steps.times(seconds), steps), **peak_memory(device)}
    result["parameters"] = sum(p.numel() for p in steps.step.method.networks.parameters())
    result["skipped_steps"] = steps.take_skipped()
    if result["skipped_steps"] and is_first:
        print(f"note: {result['skipped_steps']} steps were skipped: their time is without the update", file=sys.stderr)
    events = profile_steps(steps, PROFILED_STEPS, device, trace if is_first else None)
    result["phases"] = phase_figures(events, PROFILED_STEPS, device)
    return result


def step_figures(seconds: Sequence[float], steps: FixedSteps) -> dict[str, Any]:
    """Turn the seconds of a step in each window into views_per_s (of all ranks), its quartiles and step_ms."""
    views = steps.config.data.images_per_step * steps.config.views.num_views
    rates = spread([views / each for each in seconds])
    return {
        "views_per_s": rates["median"],
        "views_per_s_spread": rates,
        "views_per_s_a_rank": rates["median"] / steps.step.ranks.world_size,
        "step_ms": spread(seconds, 1e3),
    }


def phase_figures(events: list[Any], steps: int, device: torch.device) -> dict[str, Any]:
    """Return milliseconds and percent of the phases of profiled steps, on the host and, on a GPU, on the device."""
    host = host_ms(events, steps)
    figures: dict[str, Any] = {"host_ms": host, "percent": percent_of(host, sum(host.values()))}
    if device.type == "cuda":
        busy = device_ms(events, steps)
        parts = {name: busy[name] for name in PHASES}
        figures |= {"device_ms": busy, "percent": percent_of(parts, sum(parts.values()))}
    return figures


def percent_of(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return the share of each part in the whole."""
    return {name: 100 * value / whole for name, value in parts.items()}


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return, on CUDA, the most memory that torch used since the warm-up, and reserved."""
    if device.type != "cuda":
        return {}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def sizes(config: Config, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """Return what was measured, for the head of a result."""
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


def _batch_norms(config: Config, ranks: Ranks, device: torch.device, seconds: float) -> dict[str, Any]:
    """Return step_ms of each way to take statistics, and by how many percent its median is above that of joint_local."""
    windows: dict[str, Window] = {}
    for name, (over_views, over_ranks) in BATCH_NORMS.items():
        if over_ranks == "all" and ranks.world_size == 1:
            continue  # equals joint_local
        changes: Any = {"encoder_batch_norm": over_views, "projector_batch_norm": over_views}
        model = replace(config.model, **changes, batch_norm_ranks=over_ranks)  # type: ignore[arg-type]
        steps = fixed_steps(replace(config, model=model), ranks, device)
        steps.warm_up()
        windows[name] = steps.window()
    samples = interleave(windows, seconds, ranks=ranks, min_calls=MIN_CALLS[device.type])
    times = {name: spread(values, 1e3) for name, values in samples.items()}
    base = times["joint_local"]["median"]
    return {name: {"step_ms": time, "percent_above": 100 * (time["median"] / base - 1)} for name, time in times.items()}
