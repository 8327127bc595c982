"""Says at the start, or in a dry run, what a run is going to do: steps, rate, slices, memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from trainer.cluster.cores import core_warnings, own_cores
from trainer.cluster.ranks import Ranks, launch_warnings
from trainer.config import Config, peak_learning_rate
from trainer.data.index import open_index
from trainer.device import autocast_dtype
from trainer.errors import InputError
from trainer.geometry import batch_norm_images, micro_batches, own_rows, rows_together, slice_group_size
from trainer.machine import git_commit
from trainer.model import Model
from trainer.schedule import build_schedule, side_steps
from trainer.setup import Run, check_set_size

_log = logging.getLogger(__name__)
_MEASURED_IMAGES = 2  # of which the dry run measures a forward


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of one rank."""

    state: int
    """Weights, gradients and moments."""
    activations_per_view: int
    """What backward keeps of one view, counted on the CPU without compiling; fused or recomputed it is less."""
    views: int

    @property
    def total(self) -> int:
        """All of it, without the caching allocator's slack."""
        return self.state + self.activations_per_view * self.views


def describe_run(run: Run) -> None:
    """Log the plan of a run that is about to start."""
    _log.info("commit %s, torch %s, device %s", git_commit() or "unknown", torch.__version__, run.device)
    dtype = autocast_dtype(run.config, run.device)
    precision = {None: "float32", torch.bfloat16: "bf16 autocast", torch.float16: "fp16 autocast with a scaled loss"}[
        dtype
    ]
    _log.info("encoder and projector in %s, whitening and loss in float32", precision)
    threads = run.config.data.threads or own_cores()
    for line in [
        *without_effect(run.config, run.ranks.world_size, run.device),
        *launch_warnings(run.ranks),
        *(core_warnings(run.ranks, threads, on_gpu=run.device.type == "cuda") if run.ranks.is_first else []),
    ]:
        _log.warning(line)
    for line in plan_lines(run.config, len(run.index), run.ranks.world_size):
        _log.info(line)


def plan_lines(config: Config, num_images: int, world_size: int) -> list[str]:
    """The numbers that follow from the settings, the set and the number of ranks. Raises InputError where they don't fit."""
    images = config.data.images_per_step
    per_rank = own_rows(Ranks(0, world_size), images, rows_together(config)).count
    group = slice_group_size(per_rank, world_size, rows_together(config))
    parts = micro_batches(config, per_rank)
    in_parts = f", {parts} micro-batches of {per_rank // parts} images one after the other" if parts > 1 else ""
    steps_per_epoch = num_images // images
    s, o, loss, views = build_schedule(config, steps_per_epoch), config.optimizer, config.loss, config.views.num_views
    slices = images // loss.slice_size * views * loss.iterations
    rule = f" = {o.learning_rate:g} x sqrt({images})" if o.learning_rate_rule == "sqrt" else ""
    after = (
        "half cosine to 0"
        if s.drop_steps is None
        else f"x{s.drop_factor:g} at steps {', '.join(map(str, s.drop_steps))}"
    )
    together = "none shared" if group == 1 else f"shared by groups of {group} neighbouring ranks"
    sides = side_steps(config, steps_per_epoch)
    smaller = [f"{side} px until step {end}" for (_, side), (end, _) in pairwise(sides)]
    early = [f"views: {', '.join(smaller)}, then {config.views.side} px"] if smaller else []
    return [
        f"images: {num_images} in {config.data.root or '(no data.root)'}; {steps_per_epoch} steps an epoch, "
        f"{num_images - steps_per_epoch * images} left out of each in turn",
        f"steps: {s.total_steps} = {o.epochs} epochs x {steps_per_epoch}; warm-up {s.warmup_steps} steps, then {after}",
        f"rate: peak {peak_learning_rate(config):g}{rule}, {o.name}, weight decay {o.weight_decay:g}",
        f"step: {images} images x {views} views on {world_size} rank(s), {per_rank} images = {per_rank * views} views a rank"
        + in_parts,
        *early,
        f"whitening: {slices} slices of {loss.slice_size} x {config.model.embedding_size} a step, {together}",
        f"BatchNorm: encoder {config.model.encoder_batch_norm}, projector {config.model.projector_batch_norm}, "
        f"statistics of {batch_norm_images(config, world_size)} images at a time, "
        f"{'over all ranks' if config.model.batch_norm_ranks == 'all' else 'each rank alone'}",
    ]


def without_effect(config: Config, world_size: int, device: torch.device) -> list[str]:
    """Settings that change nothing in this run, in words."""
    said = []
    if config.gradient_compression != "none" and world_size == 1:
        said.append(f"gradient_compression {config.gradient_compression} has no effect: one rank sends nothing")
    if config.cuda_graphs and device.type != "cuda":
        said.append(f"cuda_graphs has no effect on a {device.type.upper()}")
    after_drop = config.checkpoint.keep_every_epochs_after_drop
    if after_drop and config.optimizer.schedule != "drops":
        said.append(
            f"checkpoint.keep_every_epochs_after_drop {after_drop} has no effect: optimizer.schedule is "
            f"{config.optimizer.schedule}, whose rate never drops"
        )
    hint = config.data.decoder_hint
    if any(hint) and (device.type != "cuda" or not all(hint)):
        said.append(
            f"data.decoder_hint {list(hint)} has no effect: it is for a GPU's decoder, and takes both a width and a height"
        )
    return said


def dry_run(config: Config, world_size: int) -> list[str]:
    """The plan of a run without starting it, and its memory. The set is counted where it is there, else
    data.expected_images is taken."""
    lines = plan_lines(config, _count_images(config), world_size)
    per_rank = config.data.images_per_step // world_size
    images = per_rank // micro_batches(config, per_rank)
    memory = estimate_memory(config, images * config.views.num_views)
    gib = 2**30
    lines.append(
        f"memory a rank: about {memory.total / gib:.1f} GiB = {memory.state / gib:.2f} for weights, gradients and moments + "
        f"{memory.views} views x {memory.activations_per_view / 2**20:.1f} MiB kept for backward (eager)"
    )
    return lines


def _count_images(config: Config) -> int:
    if config.data.root and Path(config.data.root).exists():
        num_images = len(open_index(Path(config.data.root), config.data.train_split, progress=True))
    elif config.data.expected_images:
        num_images = config.data.expected_images
    else:
        raise InputError(f"no set at data.root {config.data.root!r}, and data.expected_images is 0: give one of them")
    check_set_size(config, num_images)
    return num_images


def estimate_memory(config: Config, views_per_rank: int) -> Memory:
    """Count what a forward of a few views keeps for backward, each storage once."""
    model = Model(replace(config.model, batch_norm_ranks="local"), config.views)
    weights = sum(p.numel() for p in model.parameters())
    moments = 1 if config.optimizer.name == "lars" else 2
    rows = _MEASURED_IMAGES * config.views.num_views
    pixels = torch.zeros(rows, 3, config.views.side, config.views.side, dtype=torch.uint8)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    dtype = autocast_dtype(
        replace(config, precision="bf16" if config.precision == "auto" else config.precision), torch.device("cpu")
    )
    with (
        torch.autograd.graph.saved_tensors_hooks(count, lambda t: t),
        torch.autocast("cpu", dtype, enabled=dtype is not None),
    ):
        alive = model(pixels.to(memory_format=torch.channels_last))
    del alive
    return Memory(4 * weights * (2 + moments), sum(kept.values()) // rows, views_per_rank)
