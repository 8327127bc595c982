"""Division of a step's images among ranks and micro-batches. It does not change the images, crops and slices of a step."""

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

    Raises InputError if the images cannot be divided evenly. The error proposes the nearest multiple of
    `indivisible_images` that can, and the largest smaller number of ranks that divides the images."""
    if images_per_step % ranks.world_size:
        # Propose a number that suits both the ranks and the loss.
        unit = math.lcm(ranks.world_size, indivisible_images)
        nearest = max(round(images_per_step / unit), 1) * unit
        fewer = max(n for n in range(1, ranks.world_size) if images_per_step % n == 0)
        raise InputError(
            f"data.images_per_step is {images_per_step}, which cannot be divided evenly among {ranks.world_size} ranks: use "
            f"{nearest}, or start {fewer} rank(s)"
        )
    count = images_per_step // ranks.world_size
    return ImageRange(ranks.rank * count, count)


def loss_group_size(images_per_rank: int, world_size: int, indivisible_images: int) -> int:
    """Return the size of a loss group: the number of neighbouring ranks that compute the loss of their images together.

    It is the smallest number of ranks that hold a multiple of `indivisible_images`, often 1. Raises InputError if the ranks
    cannot be divided into groups of that size."""
    # The least common multiple is the smallest number of images that fills both whole ranks and whole units.
    size = math.lcm(images_per_rank, indivisible_images) // images_per_rank
    if world_size % size:
        raise InputError(
            f"the loss needs multiples of {indivisible_images} images, but {world_size} ranks of {images_per_rank} images "
            f"cannot be divided into groups that hold them: data.images_per_step must be a multiple of {indivisible_images}, "
            f"and the number of ranks a multiple of {size}"
        )
    return size


def indivisible_images(config: Config) -> int:
    """Return the number of images of a step that the loss needs together, see `MethodSettings.indivisible_images`."""
    return config.method_settings.indivisible_images(config)


def micro_batches(config: Config, images_per_rank: int) -> int:
    """Return the number of micro-batches that a rank's images are divided into.

    Raises InputError if the rank does not hold whole blocks of the method, if its images cannot be divided into
    accumulation_steps micro-batches, or into micro-batches of at most images_per_micro_batch images, or if CUDA graphs are
    on and one micro-batch is not enough."""
    block = config.method_settings.images_of_block()
    if images_per_rank % block:
        images = config.data.images_per_step
        raise InputError(
            f"each of {images // images_per_rank} ranks holds {images_per_rank} of the {images} images of a step, but "
            f"{config.method} needs a multiple of {block} on every rank: start a number of ranks that divides "
            f"{images // block}, or set data.images_per_step higher"
        )
    count = _micro_batches(config, images_per_rank)
    if count > 1 and config.cuda_graphs:
        # torch keeps a graph's gradients in the memory of the graph, and the next replay overwrites them.
        raise InputError(
            f"cuda_graphs is true, but the {images_per_rank} images of a rank are divided into {count} micro-batches, whose "
            "gradients CUDA graphs cannot accumulate: set cuda_graphs to false, or use one micro-batch (with more ranks, or "
            "with model.activation_memory_budget 0.9 for less memory)"
        )
    return count


def _micro_batches(config: Config, images_per_rank: int) -> int:
    unit = indivisible_images(config)
    largest = config.optimizer.images_per_micro_batch
    if largest and images_per_rank > largest:
        # Take the smallest number of equal micro-batches that respects the limit.
        for count in range(2, images_per_rank // unit + 1):
            if images_per_rank % (count * unit) == 0 and images_per_rank <= count * largest:
                return count
        raise InputError(
            f"optimizer.images_per_micro_batch is {largest}: the {images_per_rank} images of a rank cannot be divided into "
            f"micro-batches of at most this size that are multiples of {unit} images, as {config.method} needs them; use "
            f"{unit} or more, or more ranks"
        )
    count = config.optimizer.accumulation_steps
    if count > 1 and images_per_rank % (count * unit):
        raise InputError(
            f"optimizer.accumulation_steps is {count}: the {images_per_rank} images of a rank cannot be divided into {count} "
            f"micro-batches that are multiples of {unit} images, as {config.method} needs them; use "
            f"{divisors(images_per_rank // unit)}"
        )
    return count


def batch_norm_group_size(config: Config, world_size: int) -> int:
    """Return the number of neighbouring ranks that share BatchNorm statistics.

    Raises InputError if the ranks cannot be divided into groups of model.batch_norm_ranks."""
    wanted = config.model.batch_norm_ranks
    if wanted == "all":
        return world_size
    size = 1 if wanted == "local" else int(wanted)
    if world_size % size:
        raise InputError(
            f"model.batch_norm_ranks is {size}, but {world_size} rank(s) cannot be divided into groups of {size}: use "
            f"{divisors(world_size)}, local or all"
        )
    return size


def check_ranks(config: Config, world_size: int) -> None:
    """Raise InputError if a step cannot be divided among this number of ranks."""
    # Each of these calls raises InputError for one kind of misfit. The rank does not matter.
    together = indivisible_images(config)
    count = images_of_rank(Ranks(0, world_size), config.data.images_per_step, together).count
    loss_group_size(count, world_size, together)
    batch_norm_group_size(config, world_size)
    micro_batches(config, count)


def usable_ranks(config: Config, available: int) -> int:
    """Return the largest number of ranks, up to `available`, that a step can be divided among.

    Raises InputError if a single rank cannot run the step either."""
    # Try all numbers from the largest on, because divisibility does not depend on the number in a simple way.
    for world_size in range(available, 1, -1):
        try:
            check_ranks(config, world_size)
        except InputError:
            continue
        return world_size
    check_ranks(config, 1)
    return 1


def batch_norm_images(config: Config, world_size: int) -> int:
    """Return the number of images whose views share BatchNorm statistics.

    These are a micro-batch of one rank, of a group of ranks or of all, or as many as the method fixes."""
    rows = config.method_settings.rows_of_statistics()
    if rows:
        return rows
    images_per_rank = config.data.images_per_step // world_size
    micro_batch = images_per_rank // micro_batches(config, images_per_rank)
    return micro_batch * batch_norm_group_size(config, world_size)


def check_set_size(config: Config, num_images: int, *, warn: bool = True) -> None:
    """Raise InputError if the data set is smaller than one step. Log a warning if its size is not data.expected_images."""
    data = config.data
    if num_images < data.images_per_step:
        raise InputError(
            f"the split {data.train_split!r} in {data.root} has {num_images} images, but one step needs "
            f"{data.images_per_step} (data.images_per_step): use a larger data set or a smaller global batch"
        )
    expected = data.expected_images
    if warn and expected and expected != num_images:
        _log.warning("the recipe expects %d training images, this data set has %d", expected, num_images)
