"""Measure the speed of a step without a loader: the real `TrainStep` on batches that are already on the device."""

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

WARMUP_STEPS = 3  # compile, autotune and allocate; they are not measured
PROFILED_STEPS = 3
BATCHES = 2  # alternate, so that no step finds its input in a cache
CEILING_SECONDS = 3.0  # longest time to measure the machine's best rates
# Cells along each edge of a synthetic image. An encoder averages pixels, so noise of single pixels would make all images alike.
COARSE_CELLS = 5
BATCH_NORMS = {  # name -> how BatchNorm takes its statistics
    "joint_local": ("joint", "local"),
    "per_view_local": ("per_view", "local"),
    "joint_all": ("joint", "all"),
}


def bench_compute(
    config: Config, seconds: float, *, trace: Path | None = None, batch_norm: bool = False
) -> dict[str, Any] | None:
    """Measure steps of one rank, or of all ranks under torchrun, for about `seconds`. This needs no images.

    trace: file for the profiler's trace. batch_norm: measure BATCH_NORMS as well, in alternating windows.
    Returns a dict for JSON on rank 0, None on the others:
    views_per_s (of all ranks) and step_ms: median and quartiles of windows, without the warm-up.
    phases: milliseconds of a step in each phase on the host; on a GPU also on the device (`phases.device_ms`).
    roofline: see `ceilings.MEANING`.
    skipped_steps: number of skipped updates; the time of these steps is without the update.
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

    # Compare with the best speed that this machine can reach.
    micro_batch = steps.step.images.count // steps.step.micro_batches
    result["roofline"] = measure_roofline(
        config,
        device,
        steps.step.autocast_dtype,
        views=micro_batch * config.views.num_views,
        views_per_s=result["views_per_s_a_rank"],
        seconds=min(CEILING_SECONDS, seconds / 4),
    )
    return {"bench": "compute", **result, **sizes(config, device, ranks), **provenance(device)}


class FixedSteps:
    """A training step on a few fixed batches that alternate. A call makes one update.

    The learning rate is 0, so that weights do not change and every window has the same work."""

    def __init__(self, config: Config, step: TrainStep) -> None:
        self.config = config
        self.step = step
        self.device = step.device
        images = step.images.count
        self._batches = [synthetic_views(config, images, step.device, seed) for seed in range(BATCHES)]
        # The count stays on the device, because reading it would make each step wait.
        self._skipped = torch.zeros((), dtype=torch.int64, device=step.device)
        self._calls = 0

    def __call__(self) -> None:
        batch = self._batches[self._calls % BATCHES]
        self._calls += 1
        self._skipped += self.step(batch, 0, 0.0).skipped

    def take_skipped(self) -> int:
        """Return the number of updates that were skipped since the last call of this method."""
        skipped = int(self._skipped)
        self._skipped.zero_()
        return skipped

    def warm_up(self) -> None:
        """Make the first steps, which compile and allocate, and reset the peak of the memory."""
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
        min_calls = MIN_CALLS[self.device.type]
        return interleave(windows, seconds, ranks=self.step.ranks, min_calls=min_calls)["step"]


def fixed_steps(config: Config, ranks: Ranks, device: torch.device) -> FixedSteps:
    """Build the step of `config` and its batches. Raises InputError if the settings do not fit device or ranks."""
    check_device(config, device)
    return FixedSteps(config, build_step(config, ranks, device))


def synthetic_views(config: Config, images: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw smooth random images that all differ, (d * images, 3, S, S) uint8, channels_last."""
    views = config.views.num_views * images
    size = config.views.size
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(views, 3, COARSE_CELLS, COARSE_CELLS, generator=generator).to(device)
    out = torch.empty(views, 3, size, size, dtype=torch.uint8, device=device, memory_format=torch.channels_last)
    # Enlarge few at a time, because float32 images of a whole step would set the peak of memory.
    for first in range(0, views, 64):
        part = slice(first, first + 64)
        smooth = F.interpolate(coarse[part], size=size, mode="bilinear", align_corners=True)
        out[part] = 255 * smooth
    return out


def measure_compute(steps: FixedSteps, seconds: float, trace: Path | None = None) -> dict[str, Any]:
    """Warm up, measure and profile the steps. Every rank calls this."""
    device = steps.device
    is_first = steps.step.ranks.is_first
    steps.warm_up()
    steps.take_skipped()
    result = {**step_figures(steps.times(seconds), steps), **peak_memory(device)}
    networks = steps.step.method.networks
    result["parameters"] = sum(p.numel() for p in networks.parameters())
    # A skipped update takes less time, so say that the figures contain some.
    skipped = steps.take_skipped()
    result["skipped_steps"] = skipped
    if skipped and is_first:
        print(f"note: {skipped} updates were skipped; the time of these steps is without the update", file=sys.stderr)
    events = profile_steps(steps, PROFILED_STEPS, device, trace if is_first else None)
    result["phases"] = phase_figures(events, PROFILED_STEPS, device)
    return result


def step_figures(seconds: Sequence[float], steps: FixedSteps) -> dict[str, Any]:
    """Convert the seconds of a step in each window to views_per_s (of all ranks), its quartiles, and step_ms."""
    views = steps.config.data.images_per_step * steps.config.views.num_views
    rates = spread([views / each for each in seconds])
    return {
        "views_per_s": rates["median"],
        "views_per_s_spread": rates,
        "views_per_s_a_rank": rates["median"] / steps.step.ranks.world_size,
        "step_ms": spread(seconds, 1e3),
    }


def phase_figures(events: list[Any], steps: int, device: torch.device) -> dict[str, Any]:
    """Return milliseconds and percent of each phase of profiled steps: on the host and, on a GPU, on the device."""
    host = host_ms(events, steps)
    figures: dict[str, Any] = {"host_ms": host, "percent": percent_of(host, sum(host.values()))}
    if device.type == "cuda":
        busy = device_ms(events, steps)
        parts = {name: busy[name] for name in PHASES}
        figures |= {"device_ms": busy, "percent": percent_of(parts, sum(parts.values()))}
    return figures


def percent_of(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return each part in percent of the whole."""
    return {name: 100 * value / whole for name, value in parts.items()}


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the peak of torch's used and reserved GPU memory since the warm-up in bytes; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def sizes(config: Config, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """Return the settings that were measured, for the head of a result."""
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
    """Return step_ms of each way to take BatchNorm statistics, and the percentage of its median above that of joint_local."""
    windows: dict[str, Window] = {}
    for name, (over_views, over_ranks) in BATCH_NORMS.items():
        if over_ranks == "all" and ranks.world_size == 1:
            continue  # the same as joint_local
        changes: Any = {
            "encoder_batch_norm": over_views,
            "projector_batch_norm": over_views,
            "batch_norm_ranks": over_ranks,
        }
        model = replace(config.model, **changes)
        steps = fixed_steps(replace(config, model=model), ranks, device)
        steps.warm_up()
        windows[name] = steps.window()
    samples = interleave(windows, seconds, ranks=ranks, min_calls=MIN_CALLS[device.type])
    times = {name: spread(values, 1e3) for name, values in samples.items()}
    # Every other way is compared with joint_local, which needs no collective.
    base = times["joint_local"]["median"]
    found = {}
    for name, time in times.items():
        percent_above = 100 * (time["median"] / base - 1)
        found[name] = {"step_ms": time, "percent_above": percent_above}
    return found
