"""How a step's images are spread over ranks and micro-batches. Which images, crops and slices a step has depends on neither."""

from __future__ import annotations

import math

from trainer.config.checks import divisors
from trainer.config.schema import Config
from trainer.data.plan import Rows
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError


def own_rows(ranks: Ranks, images_per_step: int, rows_together: int = 1) -> Rows:
    """The consecutive images of a step that this rank holds. Raises InputError where they do not divide, naming the nearest
    number that does and is a multiple of `rows_together`."""
    if images_per_step % ranks.world_size:
        unit = math.lcm(ranks.world_size, rows_together)
        near = max(round(images_per_step / unit), 1) * unit
        raise InputError(
            f"data.images_per_step is {images_per_step}, which {ranks.world_size} ranks can't share evenly: take {near}"
        )
    count = images_per_step // ranks.world_size
    return Rows(ranks.rank * count, count)


def slice_group_size(images_per_rank: int, world_size: int, rows_together: int) -> int:
    """Ranks whose images are whitened together: one where a rank's images are a multiple of `rows_together` (a slice, or a
    block of permutation), else as many neighbours as make them one. Raises InputError where no number of ranks does."""
    size = math.lcm(images_per_rank, rows_together) // images_per_rank
    if world_size % size:
        raise InputError(
            f"{world_size} ranks of {images_per_rank} images can't be grouped into multiples of {rows_together} rows "
            f"(a slice, or loss.permutation_block): data.images_per_step must be a multiple of {rows_together}, and the "
            f"number of ranks a multiple of {size}"
        )
    return size


def rows_together(config: Config) -> int:
    """Images of one step that can't be split over slice groups: a slice, or a block that is permuted."""
    return config.loss.permutation_block if config.loss.iterations > 1 else config.loss.slice_size


def micro_batches(config: Config, images_per_rank: int) -> int:
    """Parts of a rank's images that go through the model one after the other, each of whole slices.

    Raises InputError if the images can't be divided into accumulation_steps parts, or into parts that are small enough for
    images_per_micro_batch, and for several parts with CUDA graphs."""
    parts = _micro_batches(config, images_per_rank)
    if parts > 1 and config.cuda_graphs:
        # torch keeps a graph's gradients in the graph's own memory, which the next replay writes over
        raise InputError(
            f"cuda_graphs is true, but the {images_per_rank} images of a rank go through in {parts} micro-batches, whose "
            "gradients CUDA graphs can't add up: set cuda_graphs to false, or take one micro-batch (more ranks, or "
            "model.activation_memory_budget 0.9 for less memory)"
        )
    return parts


def _micro_batches(config: Config, images_per_rank: int) -> int:
    unit = rows_together(config)
    most = config.optimizer.images_per_micro_batch
    if most and images_per_rank > most:
        # the smallest number of equal parts that hold whole slices and fit the limit
        counts = range(2, images_per_rank // unit + 1)
        fitting = (n for n in counts if images_per_rank % (n * unit) == 0 and images_per_rank <= n * most)
        found = next(fitting, 0)
        if not found:
            raise InputError(
                f"optimizer.images_per_micro_batch is {most}: the {images_per_rank} images of a rank do not divide into "
                f"micro-batches that small and of whole slices (multiples of {unit} images); take {unit} or more, or more ranks"
            )
        return found
    parts = config.optimizer.accumulation_steps
    if parts > 1 and images_per_rank % (parts * unit):
        raise InputError(
            f"optimizer.accumulation_steps is {parts}: the {images_per_rank} images of a rank do not divide into so many parts "
            f"of whole slices (multiples of {unit} images); take {divisors(images_per_rank // unit)}"
        )
    return parts


def check_ranks(config: Config, world_size: int) -> None:
    """Raises InputError if this number of ranks can't share a step."""
    together = rows_together(config)
    count = own_rows(Ranks(0, world_size), config.data.images_per_step, together).count
    slice_group_size(count, world_size, together)
    micro_batches(config, count)


def usable_ranks(config: Config, available: int) -> int:
    """The largest number of ranks, at most `available`, that can share a step. Raises InputError if not even one can."""
    for world_size in range(available, 1, -1):
        try:
            check_ranks(config, world_size)
        except InputError:
            continue
        return world_size
    check_ranks(config, 1)
    return 1


def batch_norm_images(config: Config, world_size: int) -> int:
    """Images whose views BatchNorm takes its statistics from together: one micro-batch of one rank, or of all ranks."""
    images_per_rank = config.data.images_per_step // world_size
    ranks_together = world_size if config.model.batch_norm_ranks == "all" else 1
    return images_per_rank // micro_batches(config, images_per_rank) * ranks_together
