"""Describe the plan of a run, from the settings, the size of the set and the number of ranks. Needs no torch."""

from __future__ import annotations

import logging
from itertools import pairwise

from trainer.config.schema import Config
from trainer.distributed.geometry import batch_norm_images, micro_batches, own_rows, rows_together, slice_group_size
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.schedule import build_schedule, peak_learning_rate, side_steps

_log = logging.getLogger(__name__)


def plan_lines(config: Config, num_images: int, world_size: int) -> list[str]:
    """Describe the plan of a run, one line a topic. Raises InputError if settings, set and number of ranks don't fit."""
    images = config.data.images_per_step
    per_rank = own_rows(Ranks(0, world_size), images, rows_together(config)).count
    group = slice_group_size(per_rank, world_size, rows_together(config))
    parts = micro_batches(config, per_rank)
    in_parts = f", {parts} micro-batches of {per_rank // parts} images one after the other" if parts > 1 else ""
    steps_per_epoch = num_images // images
    s, o, loss, views = build_schedule(config, steps_per_epoch), config.optimizer, config.loss, config.views.num_views
    slices = images // loss.slice_size * views * loss.iterations
    rule = f" = {o.learning_rate:g} x sqrt({images})" if o.learning_rate_rule == "sqrt" else ""
    drops = f"x{s.drop_factor:g} at steps {', '.join(map(str, s.drop_steps))}" if s.drop_steps else "constant"
    after = "half cosine to 0" if s.drop_steps is None else drops
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


def plan_warnings(config: Config, num_images: int) -> list[str]:
    """Describe what is allowed but probably unintended."""
    schedule = build_schedule(config, num_images // config.data.images_per_step)
    if schedule.warmup_steps < schedule.total_steps:
        return []
    return [
        f"the warm-up of {schedule.warmup_steps} steps is not shorter than the run of {schedule.total_steps}: the rate never "
        "reaches its peak. Set optimizer.warmup_epochs or optimizer.warmup_steps lower, or optimizer.epochs higher"
    ]


def check_set_size(config: Config, num_images: int, *, warn: bool = True) -> None:
    """Raise InputError for a set smaller than one step; log a warning if the size differs from data.expected_images."""
    if num_images < config.data.images_per_step:
        raise InputError(
            f"the split {config.data.train_split!r} in {config.data.root} has {num_images} images, but one step takes "
            f"{config.data.images_per_step} (data.images_per_step): use a larger set or smaller steps"
        )
    expected = config.data.expected_images
    if warn and expected and expected != num_images:
        _log.warning("the recipe expects %d training images, this set has %d", expected, num_images)
