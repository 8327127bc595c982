"""A loader with DALI's random operators, as one would write it without a plan.

There are two forms. One decodes an image once and crops it d times; the other decodes the crop of each view
(`image_random_crop`). Both use DALI's file reader and iterator, change all colours in one `color_twist`, and blur only the
chosen views (`if` in the graph) with DALI's default window for a sigma. Every random operator needs a different seed, because
DALI merges operators with equal seeds, which would make the views equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from trainer.config.schema import Config, ViewsConfig
from trainer.data.index import open_index
from trainer.distributed.cores import own_cores
from trainer.errors import InputError

INTERPOLATION = {"bicubic": types.INTERP_CUBIC, "bilinear": types.INTERP_LINEAR}
Seeds = Iterator[int]


def dali_batches(config: Config, *, decode_once: bool) -> Iterator[Any]:
    """Yield batches on the CPU: {"view0": (N, S, S, 3) uint8, ...}. Raises InputError for a set of shards."""
    data = config.data
    recipe = config.views
    index = open_index(Path(data.root), data.train_split)
    if not index.is_folder:
        raise InputError(
            f"{data.root} holds shards, but DALI's file reader needs an image folder: give one as --data.root"
        )
    files = [str(index.root / index.split / index.name(i)) for i in range(len(index))]

    @pipeline_def(
        batch_size=data.images_per_step,
        num_threads=data.threads or own_cores(),
        device_id=None,
        prefetch_queue_depth=2,
        seed=config.seed,
        enable_conditionals=True,
    )
    def graph() -> tuple[Any, ...]:
        seeds = itertools.count(config.seed + 1)
        encoded, _ = fn.readers.file(files=files, random_shuffle=True, seed=next(seeds), name="reader")
        if decode_once:
            image = fn.decoders.image(encoded, adjust_orientation=False)
            views = [_crop_of_pixels(image, recipe, seeds) for _ in range(recipe.num_views)]
        else:
            views = [_crop_of_file(encoded, recipe, seeds) for _ in range(recipe.num_views)]
        # The same order as in the recipe: crop, flip, colour, blur.
        flipped = [_flip(view, recipe, seeds) for view in views]
        coloured = [_color(view, recipe, seeds) for view in flipped]
        return tuple(_blur(view, recipe, seeds) for view in coloured)

    names = [f"view{view}" for view in range(recipe.num_views)]
    pipe = graph()
    pipe.build()
    # size -1 lets the reader start over without end, because an epoch of a small set has only few batches.
    return (outputs[0] for outputs in DALIGenericIterator([pipe], names, size=-1))


def _crop_of_pixels(image: Any, recipe: ViewsConfig, seeds: Seeds) -> Any:
    return fn.random_resized_crop(
        image,
        size=recipe.size,
        random_area=recipe.crop_area,
        random_aspect_ratio=recipe.crop_ratio,
        interp_type=INTERPOLATION[recipe.interpolation],
        antialias=True,
        seed=next(seeds),
    )


def _crop_of_file(encoded: Any, recipe: ViewsConfig, seeds: Seeds) -> Any:
    # The decoder skips what lies outside the crop, but each view decodes the file once more.
    crop = fn.decoders.image_random_crop(
        encoded,
        random_area=recipe.crop_area,
        random_aspect_ratio=recipe.crop_ratio,
        adjust_orientation=False,
        seed=next(seeds),
    )
    size = (recipe.size, recipe.size)
    return fn.resize(crop, size=size, interp_type=INTERPOLATION[recipe.interpolation], antialias=True)


def _flip(view: Any, recipe: ViewsConfig, seeds: Seeds) -> Any:
    drawn = fn.random.coin_flip(probability=recipe.flip_probability, seed=next(seeds))
    return fn.flip(view, horizontal=drawn)


def _color(view: Any, recipe: ViewsConfig, seeds: Seeds) -> Any:
    jitter = fn.random.coin_flip(probability=recipe.color_probability, seed=next(seeds))
    gray = fn.random.coin_flip(probability=recipe.gray_probability, seed=next(seeds))

    # Without jitter every factor is 1; grey is a saturation of 0.
    def factor(strength: float) -> Any:
        drawn = fn.random.uniform(range=[max(0.0, 1 - strength), 1 + strength], seed=next(seeds))
        return 1 + jitter * (drawn - 1)

    turn = fn.random.uniform(range=[-360 * recipe.hue, 360 * recipe.hue], seed=next(seeds))
    return fn.color_twist(
        view,
        brightness=factor(recipe.brightness),
        contrast=factor(recipe.contrast),
        saturation=factor(recipe.saturation) * (1 - gray),
        hue=jitter * turn,
    )


def _blur(view: Any, recipe: ViewsConfig, seeds: Seeds) -> Any:
    drawn = fn.random.coin_flip(probability=float(np.mean(recipe.blur_probability)), dtype=types.BOOL, seed=next(seeds))
    sigma = fn.random.uniform(range=list(recipe.blur_sigma), seed=next(seeds))
    # DALI runs this branch only for the views that draw a blur.
    if drawn:
        view = fn.gaussian_blur(view, sigma=sigma)
    return view
