"""The random choices of one step, drawn before anything is read: the same for any number of ranks, threads or restarts.

Everything follows from (seed, step) through Philox, a counter-based generator: the choices of an image's row in a step
sit at a fixed counter, so a rank draws its own rows without the others' and gets the rows of the joined plan. Raw
64-bit words are turned into uniforms here, since numpy may change its distributions (not its bit generators).

Shapes: N images of this rank in the step, d views of each, I slicing iterations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config.schema import ViewsConfig
from trainer.distributed.ranks import ImageRange

PLAN_VERSION = 1  # stored in checkpoints; changes whenever the same seed would give other choices

# streams of a seed
_ORDER = 0
_VIEWS = 1
_SLICES = 2
_TRIES = 10  # of a crop, as in torchvision's RandomResizedCrop
_WORDS = 36  # words a view: 2 x tries, top, left, flip, jitter, 4 factors, 4 order keys, grey, blur, sigma, 1 spare
_BLOCK = 4  # words of one Philox counter


class Plan(NamedTuple):
    """The choices for the rows of one rank in one step. Crop windows come later, when the images' sizes are known."""

    step: int
    epoch: int
    image_ids: NDArray[np.int64]  # (N,)
    crop_tries: NDArray[np.float64]  # (N, d, 2, 10) uniforms: area, ratio of each try
    crop_corner: NDArray[np.float64]  # (N, d, 2) uniforms: top, left
    flip: NDArray[np.bool_]  # (N, d)
    jitter: NDArray[np.bool_]  # (N, d) whether the four factors apply
    factors: NDArray[np.float64]  # (N, d, 4) brightness, contrast, saturation; hue in turns
    factor_order: NDArray[np.int64]  # (N, d, 4) the order in which they apply
    gray: NDArray[np.bool_]  # (N, d)
    blur_sigma: NDArray[np.float64]  # (N, d) pixels; 0: none


class Planner:
    """Draws the plan of any step. Keeps the epoch's order, nothing else: a step's plan depends on no other step's."""

    def __init__(
        self, recipe: ViewsConfig, *, seed: int, num_images: int, images_per_step: int, images: ImageRange
    ) -> None:
        self.recipe = recipe
        self.seed = seed
        self.images = images
        self.num_images, self.images_per_step = num_images, images_per_step
        self.steps_per_epoch = num_images // images_per_step
        self._order_of: tuple[int, NDArray[np.int64]] | None = None

    def plan(self, step: int) -> Plan:
        """The choices of this rank's rows in `step` (counted from 0 over the whole run)."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        first = step_of_epoch * self.images_per_step + self.images.first
        ids = self._order(epoch)[first : first + self.images.count]
        return Plan(step, epoch, ids, *draw_views(self.recipe, self.seed, step, self.images))

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._order_of is None or self._order_of[0] != epoch:
            self._order_of = epoch, epoch_order(self.seed, epoch, self.num_images)
        return self._order_of[1]


def epoch_order(seed: int, epoch: int, num_images: int) -> NDArray[np.int64]:
    """A fresh permutation of all images an epoch, (num_images,): where the keys of a random sort fall."""
    return np.argsort(_raw(seed, _ORDER, epoch, 0, num_images), kind="stable")


def slice_permutations(seed: int, step: int, num_images: int, iterations: int, block: int) -> NDArray[np.int64]:
    """Orders in which a step's images are cut into slices, (iterations, num_images).

    The first is the identity, for the epoch's order is random already. Each later one permutes the images inside blocks
    of `block`, so that a slice never spans two blocks and the slices do not depend on the number of ranks.
    """
    identity = np.arange(num_images, dtype=np.int64)[None]
    if iterations == 1:
        return identity
    keys = _raw(seed, _SLICES, step, 0, (iterations - 1) * num_images).reshape(iterations - 1, -1, block)
    inside = np.argsort(keys, axis=-1, kind="stable") + identity.reshape(-1, block)[:, :1]
    return np.concatenate([identity, inside.reshape(iterations - 1, num_images)])


def draw_views(recipe: ViewsConfig, seed: int, step: int, rows: ImageRange) -> tuple[NDArray, ...]:
    """The fields of `Plan` from crop_tries on, for `rows` of the step's images."""
    r, d = recipe, recipe.num_views
    words = _raw(seed, _VIEWS, step, rows.first * d * _WORDS // _BLOCK, rows.count * d * _WORDS)
    u = (words >> np.uint64(11)).astype(np.float64).reshape(rows.count, d, _WORDS) * 2.0**-53  # uniforms in [0, 1)
    tries, corner, (flip, jitter), factors, keys, (gray, blur, sigma) = (
        u[..., :20].reshape(rows.count, d, 2, _TRIES),
        u[..., 20:22],
        np.moveaxis(u[..., 22:24], -1, 0),
        u[..., 24:28],
        u[..., 28:32],
        np.moveaxis(u[..., 32:35], -1, 0),
    )
    strength = np.array([r.brightness, r.contrast, r.saturation])
    low = np.array([*np.maximum(0, 1 - strength), -r.hue])
    high = np.array([*(1 + strength), r.hue])
    return (
        tries,
        corner,
        flip < r.flip_probability,
        jitter < r.color_probability,
        low + (high - low) * factors,
        np.argsort(keys, axis=-1, kind="stable"),
        gray < r.gray_probability,
        np.where(blur < r.blur_probability, r.blur_sigma[0] + (r.blur_sigma[1] - r.blur_sigma[0]) * sigma, 0.0),
    )


def crop_windows(
    plan: Plan, recipe: ViewsConfig, heights: NDArray[np.integer], widths: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Crop windows (N, d, 4): top, left, height, width in pixels of the image.

    torchvision's RandomResizedCrop: ten tries at an area share and a log-uniform ratio; the first that fits inside the
    image is placed uniformly. Where none fits, the largest centred window whose ratio is allowed.

    heights, widths: (N,) pixels of the images.
    """
    image_height, image_width = (np.asarray(x, np.float64)[:, None, None] for x in (heights, widths))
    area_share, ratio_low, ratio_high = recipe.crop_area, *np.log(recipe.crop_ratio)
    area = image_height * image_width * (area_share[0] + (area_share[1] - area_share[0]) * plan.crop_tries[:, :, 0])
    ratio = np.exp(ratio_low + (ratio_high - ratio_low) * plan.crop_tries[:, :, 1])
    width, height = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))  # (N, d, tries)
    fits = (width > 0) & (width <= image_width) & (height > 0) & (height <= image_height)
    first = np.argmax(fits, axis=-1)[..., None]
    crop_height, crop_width = (np.take_along_axis(x, first, -1)[..., 0] for x in (height, width))
    image_height, image_width = image_height[..., 0], image_width[..., 0]
    corner = np.floor(plan.crop_corner * np.stack([image_height - crop_height + 1, image_width - crop_width + 1], -1))
    drawn = np.stack([corner[..., 0], corner[..., 1], crop_height, crop_width], axis=-1)
    return np.where(fits.any(-1)[..., None], drawn, _centre(image_height, image_width, recipe.crop_ratio)).astype(
        np.int64
    )


def _centre(height: NDArray, width: NDArray, ratio: tuple[float, float]) -> NDArray[np.float64]:
    """The largest centred window with an allowed ratio, (N, 1, 4)."""
    crop_height = np.minimum(height, np.maximum(np.rint(width / ratio[0]), 1))
    crop_width = np.minimum(width, np.maximum(np.rint(height * ratio[1]), 1))
    top, left = (height - crop_height) // 2, (width - crop_width) // 2
    return np.stack([top, left, crop_height, crop_width], axis=-1)


def _raw(seed: int, stream: int, position: int, first_block: int, count: int) -> NDArray[np.uint64]:
    """`count` random 64-bit words of a seed's stream at `position` (a step or an epoch), from a block of four on."""
    return np.random.Philox(key=[seed, stream], counter=[first_block, position, 0, 0]).random_raw(count)
