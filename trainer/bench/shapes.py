"""The shapes at which the loss is measured: those of the recipes, of one experiment, or given by the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from trainer.config.schema import Config
from trainer.distributed.geometry import images_of_rank, indivisible_images, loss_group_size, micro_batches
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError


class LossShape(NamedTuple):
    """Sizes of one measurement: v is (num_views * num_images, embedding_size)."""

    num_views: int
    num_images: int
    slice_size: int
    embedding_size: int
    iterations: int

    @property
    def num_slices(self) -> int:
        """Return the number of slices that one step whitens, over all iterations and views."""
        return self.iterations * self.num_views * (self.num_images // self.slice_size)


RECIPE_SHAPES = (  # the recipes in configs/, each on one rank
    LossShape(2, 512, 128, 64, 1),  # CIFAR-10 and CIFAR-100, 2 views
    LossShape(4, 256, 128, 64, 1),  # the same, 4 views
    LossShape(2, 512, 256, 128, 4),  # STL-10 and Tiny ImageNet, 2 views
    LossShape(2, 512, 256, 128, 1),  # ImageNet-100, 2 views
    LossShape(4, 256, 256, 128, 1),  # these three, 4 views; ImageNet on 16 ranks
    LossShape(4, 1024, 256, 128, 1),  # 16 slices: ImageNet on 4 ranks
    LossShape(4, 4096, 256, 128, 1),  # 64 slices: ImageNet on one rank
)


def shape_of_config(config: Config, num_ranks: int) -> LossShape:
    """Return the shape of the loss on one of `num_ranks` ranks: the images of a micro-batch, or those of its loss group.

    Raises InputError if that many ranks cannot divide the global batch."""
    unit = indivisible_images(config)
    images = images_of_rank(Ranks(0, num_ranks), config.data.images_per_step, unit).count
    # Ranks with too few images for a slice compute the loss of their group together.
    micro_batch = images // micro_batches(config, images)
    group = loss_group_size(images, num_ranks, unit)
    return LossShape(
        num_views=config.views.num_views,
        num_images=micro_batch * group,
        slice_size=config.wmse.slice_size,
        embedding_size=config.model.embedding_size,
        iterations=config.wmse.iterations,
    )


def not_measured(config: Config) -> list[str]:
    """Describe the settings of the loss that the measurement ignores, because the authors' loop does not have them."""
    # The loop has no such options and always computes with these values.
    loop = {"normalize": True, "eps": 0.0, "whitening": "cholesky"}
    notes = []
    for name, value in dataclasses.asdict(config.wmse).items():
        if name in loop and value != loop[name]:
            notes.append(f"wmse.{name} is {value}, measured with {loop[name]}")
    return notes


def parse_shapes(words: Sequence[str]) -> list[LossShape]:
    """Parse shapes such as "4,256,128,64,1". Raises InputError for a shape that W-MSE cannot have."""
    return [_parse_shape(word) for word in words]


def _parse_shape(word: str) -> LossShape:
    parts = word.split(",")
    fields = LossShape._fields
    are_numbers = all(part.strip().isdecimal() for part in parts)
    if len(parts) != len(fields) or not are_numbers:
        raise InputError(f"--shapes {word!r}: give {','.join(fields)} as whole numbers, as in 4,256,128,64,1")
    shape = LossShape(*map(int, parts))
    if shape.num_views < 2 or shape.embedding_size < 1 or shape.iterations < 1:
        raise InputError(f"--shapes {word!r}: W-MSE needs at least 2 views, embedding size 1 and 1 iteration")
    if shape.slice_size <= shape.embedding_size:
        raise InputError(
            f"--shapes {word!r}: slice_size must be larger than embedding_size; give {2 * shape.embedding_size}"
        )
    if shape.num_images == 0 or shape.num_images % shape.slice_size:
        raise InputError(f"--shapes {word!r}: num_images must be a multiple of slice_size={shape.slice_size}")
    return shape
