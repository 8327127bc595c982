"""Sizes at which the loss is measured: those of the recipes, or those that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
        """Slices of slice_size rows that one step whitens, all iterations and views."""
        return self.iterations * self.num_views * (self.num_images // self.slice_size)


RECIPE_SHAPES = (  # sizes of the paper's recipes
    LossShape(2, 512, 128, 64, 1),  # CIFAR-10
    LossShape(4, 256, 128, 64, 1),
    LossShape(2, 512, 256, 128, 4),  # CIFAR-100, STL-10, Tiny ImageNet
    LossShape(4, 256, 256, 128, 1),
    LossShape(4, 1024, 256, 128, 1),  # 16 slices: a large step on few ranks
    LossShape(4, 4096, 256, 128, 1),  # ImageNet's step on one process: 64 slices
)


def parse_shapes(words: Sequence[str]) -> list[LossShape]:
    """["4,256,128,64,1", ...] -> shapes; InputError for one that W-MSE cannot have."""
    return [_parse_shape(word) for word in words]


def _parse_shape(word: str) -> LossShape:
    parts = word.split(",")
    if len(parts) != len(LossShape._fields) or not all(part.strip().isdecimal() for part in parts):
        raise InputError(
            f"--shapes {word!r}: give {','.join(LossShape._fields)} as whole numbers, as in 4,256,128,64,1"
        )
    shape = LossShape(*map(int, parts))
    if shape.num_views < 2 or shape.embedding_size < 1 or shape.iterations < 1:
        raise InputError(f"--shapes {word!r}: W-MSE needs 2 views, 1 column and 1 iteration or more")
    if shape.slice_size <= shape.embedding_size:
        raise InputError(f"--shapes {word!r}: slice_size must be above embedding_size, best {2 * shape.embedding_size}")
    if shape.num_images == 0 or shape.num_images % shape.slice_size:
        raise InputError(f"--shapes {word!r}: num_images must be a multiple of slice_size={shape.slice_size}")
    return shape
