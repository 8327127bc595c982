"""Describe the plan of a run, from the settings, the size of the set and the number of ranks. Needs no torch."""

from __future__ import annotations

from itertools import pairwise

from trainer.config.schema import Config
from trainer.distributed.geometry import (
    batch_norm_group_size,
    batch_norm_images,
    images_of_rank,
    indivisible_images,
    loss_group_size,
    micro_batches,
)
from trainer.distributed.ranks import Ranks
from trainer.schedule import build_schedule, peak_learning_rate, size_steps


def plan_lines(config: Config, num_images: int, world_size: int) -> list[str]:
    """Describe the plan of a run, with a line for each topic.

    Raises InputError if the settings do not fit the data set or the number of ranks."""
    # An epoch has whole steps only. Its order changes, so each epoch leaves other images unused.
    images = config.data.images_per_step
    unit = indivisible_images(config)
    per_rank = images_of_rank(Ranks(0, world_size), images, unit).count
    steps_per_epoch = num_images // images
    rest = num_images - steps_per_epoch * images
    root = config.data.root or "(no data.root)"
    return [
        f"images: {num_images} in {root}; {steps_per_epoch} steps per epoch, each of which leaves out {rest} images",
        *_schedule_lines(config, steps_per_epoch),
        _step_line(config, per_rank, world_size),
        *_size_lines(config, steps_per_epoch),
        *_method_lines(config, per_rank, world_size),
        _batch_norm_line(config, world_size),
    ]


def _schedule_lines(config: Config, steps_per_epoch: int) -> list[str]:
    schedule = build_schedule(config, steps_per_epoch)
    optimizer = config.optimizer

    # The course of the learning rate after the warm-up.
    if schedule.drop_steps is None:
        course = f"half a cosine to {schedule.final:g}"
    elif schedule.drop_steps:
        steps = ", ".join(map(str, schedule.drop_steps))
        course = f"multiplied by {schedule.drop_factor:g} at steps {steps}"
    else:
        course = "constant"

    peak = f"{peak_learning_rate(config):g}"
    # Show how the peak follows from the setting, because the rule depends on the batch size.
    rules = {
        "fixed": "",
        "sqrt": " x sqrt({})",
        "linear": " x {} / 256",
    }
    rule = rules[optimizer.learning_rate_rule].format(config.data.images_per_step)
    if rule:
        peak += f" = {optimizer.learning_rate:g}{rule}"
    start = f" from {schedule.start:g}" if schedule.start else ""
    return [
        f"steps: {schedule.total_steps} = {optimizer.epochs} epochs x {steps_per_epoch}; warm-up {schedule.warmup_steps} "
        f"steps{start}, then {course}",
        f"learning rate: peak {peak}, {optimizer.name}, weight decay {optimizer.weight_decay:g}",
    ]


def _step_line(config: Config, per_rank: int, world_size: int) -> str:
    views = config.views.num_views
    count = micro_batches(config, per_rank)
    parts = f", in {count} micro-batches of {per_rank // count} images" if count > 1 else ""
    return (
        f"step: {config.data.images_per_step} images (global batch size) x {views} views on {world_size} rank(s), "
        f"{per_rank} images = {per_rank * views} views per rank{parts}"
    )


def _size_lines(config: Config, steps_per_epoch: int) -> list[str]:
    # Each smaller size is used until the next one begins.
    sizes = size_steps(config, steps_per_epoch)
    smaller = [f"{size} px until step {end}" for (_, size), (end, _) in pairwise(sizes)]
    return [f"views: {', '.join(smaller)}, then {config.views.size} px"] if smaller else []


def _batch_norm_line(config: Config, world_size: int) -> str:
    model = config.model
    # If the method fixes the groups, the settings of the model have no effect.
    rows = config.method_settings.rows_of_statistics()
    if rows:
        return f"BatchNorm: statistics of groups of {rows} rows"
    size = batch_norm_group_size(config, world_size)
    ranks = f"of groups of {size} ranks"
    if size == 1:
        ranks = "of each rank alone"
    elif size == world_size:
        ranks = "over all ranks"
    return (
        f"BatchNorm: encoder {model.encoder_batch_norm}, projector {model.projector_batch_norm}, "
        f"statistics of {batch_norm_images(config, world_size)} images at a time, {ranks}"
    )


def _method_lines(config: Config, per_rank: int, world_size: int) -> list[str]:
    # Ranks that hold too few images for the loss join in a group.
    group = loss_group_size(per_rank, world_size, indivisible_images(config))
    together = f"; groups of {group} neighbouring ranks compute the loss together" if group > 1 else ""
    return [f"{config.method}: {line}{together}" for line in config.method_settings.plan_lines(config)]


def plan_warnings(config: Config, num_images: int) -> list[str]:
    """Describe settings that are allowed but probably unintended."""
    schedule = build_schedule(config, num_images // config.data.images_per_step)
    lines = config.method_settings.warnings(config, schedule.total_steps)
    if schedule.warmup_steps >= schedule.total_steps:
        lines.append(
            f"the warm-up of {schedule.warmup_steps} steps is not shorter than the run of {schedule.total_steps}: the learning "
            "rate never reaches its peak. Set optimizer.warmup_epochs or optimizer.warmup_steps lower, or optimizer.epochs "
            "higher"
        )
    return lines
