"""Spread the images of a step over ranks and micro-batches. Which images, crops and slices a step has depends on neither."""

from __future__ import annotations

import logging
import math

from trainer.config.checks import divisors
from trainer.config.schema import Config
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.errors import InputError

_log = logging.getLogger(__name__)


def images_of_rank(ranks: Ranks, images_per_step: int, indivisible_images: int = 1) -> ImageRange:
    """Return the consecutive images of a step that this rank holds.

    Raises InputError if they can't be divided evenly, with the nearest number that can and is a multiple of
    `indivisible_images`."""
    if images_per_step % ranks.world_size:
        unit = math.lcm(ranks.world_size, indivisible_images)
        near = max(round(images_per_step / unit), 1) * unit
        raise InputError(
            f"data.images_per_step is {images_per_step}, which {ranks.world_size} ranks can't share evenly: take {near}"
        )
    count = images_per_step // ranks.world_size
    return ImageRange(ranks.rank * count, count)


def loss_group_size(images_per_rank: int, world_size: int, indivisible_images: int) -> int:
    """Return the number of neighbouring ranks whose images the loss takes together.

    It is 1 if a rank's images are a multiple of `indivisible_images`, else the smallest number of ranks whose images are.
    Raises InputError if the ranks can't be divided into groups of that size."""
    size = math.lcm(images_per_rank, indivisible_images) // images_per_rank
    if world_size % size:
        raise InputError(
            f"{world_size} ranks of {images_per_rank} images can't be grouped into multiples of {indivisible_images} images, "
            f"which the loss needs together: data.images_per_step must be a multiple of {indivisible_images}, and the number "
            f"of ranks a multiple of {size}"
        )
    return size


def indivisible_images(config: Config) -> int:
    """Return the number of images of a step that the loss needs together, see `MethodSettings.indivisible_images`."""
    return config.method_settings.indivisible_images(config)


def micro_batches(config: Config, images_per_rank: int) -> int:
    """Return the number of micro-batches that a rank's images are divided into.

    Raises InputError if the images can't be divided into accumulation_steps micro-batches, or into ones that are small enough
    for images_per_micro_batch, and for several of them with CUDA graphs."""
    count = _micro_batches(config, images_per_rank)
    if count > 1 and config.cuda_graphs:
        # torch keeps a graph's gradients in the graph's own memory, which the next replay writes over
        raise InputError(
            f"cuda_graphs is true, but the {images_per_rank} images of a rank go through in {count} micro-batches, whose "
            "gradients CUDA graphs can't add up: set cuda_graphs to false, or take one micro-batch (more ranks, or "
            "model.activation_memory_budget 0.9 for less memory)"
        )
    return count


def _micro_batches(config: Config, images_per_rank: int) -> int:
    unit = indivisible_images(config)
    most = config.optimizer.images_per_micro_batch
    if most and images_per_rank > most:
        # the smallest number of equal micro-batches that fit the limit
        counts = range(2, images_per_rank // unit + 1)
        fitting = (n for n in counts if images_per_rank % (n * unit) == 0 and images_per_rank <= n * most)
        found = next(fitting, 0)
        if not found:
            raise InputError(
                f"optimizer.images_per_micro_batch is {most}: the {images_per_rank} images of a rank can't be divided into "
                f"micro-batches that small and of multiples of {unit} images, which {config.method} needs together; take "
                f"{unit} or more, or more ranks"
            )
        return found
    count = config.optimizer.accumulation_steps
    if count > 1 and images_per_rank % (count * unit):
        raise InputError(
            f"optimizer.accumulation_steps is {count}: the {images_per_rank} images of a rank can't be divided into that many "
            f"micro-batches of multiples of {unit} images, which {config.method} needs together; take "
            f"{divisors(images_per_rank // unit)}"
        )
    return count


def check_ranks(config: Config, world_size: int) -> None:
    """Raise InputError if this number of ranks can't share a step."""
    together = indivisible_images(config)
    count = images_of_rank(Ranks(0, world_size), config.data.images_per_step, together).count
    loss_group_size(count, world_size, together)
    micro_batches(config, count)


def usable_ranks(config: Config, available: int) -> int:
    """Return the largest number of ranks, at most `available`, that can share a step. Raises InputError if not even one can."""
    for world_size in range(available, 1, -1):
        try:
            check_ranks(config, world_size)
        except InputError:
            continue
        return world_size
    check_ranks(config, 1)
    return 1


def batch_norm_images(config: Config, world_size: int) -> int:
    """Return the number of images whose views share BatchNorm statistics: a micro-batch of one rank, or of all ranks."""
    images_per_rank = config.data.images_per_step // world_size
    ranks_together = world_size if config.model.batch_norm_ranks == "all" else 1
    return images_per_rank // micro_batches(config, images_per_rank) * ranks_together


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
