"""The random choices of one step, drawn before anything is read. Ranks, threads and restarts do not change them.

All choices follow from (seed, step) through Philox, a counter-based generator. The choices for each image of a step sit at a
fixed counter, so a rank draws those of its own images without the others and still gets its rows of the joint plan. Raw 64-bit
words are converted to uniforms here, because numpy may change its distributions (but not its bit generators).

Shapes: N images of this rank in the step, d views of each, I slicing iterations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config.schema import ViewsConfig
from trainer.distributed.ranks import ImageRange

PLAN_VERSION = 1  # stored in checkpoints; increased whenever the same seed would give different choices

# Each seed has a stream of random words for each purpose.
_ORDER = 0
_VIEWS = 1
_SLICES = 2
_TRIES = 10  # tries to place a crop, as in torchvision's RandomResizedCrop
# Words of a view: area and ratio of each try, top, left, flip, jitter, 4 factors, 4 order keys, grey, blur, sigma, solarise.
_WORDS = 36
_BLOCK = 4  # words that one value of the Philox counter gives


class Plan(NamedTuple):
    """The choices for the images of one rank in one step. `crop_windows` follows when the sizes of the images are known."""

    step: int
    epoch: int
    image_ids: NDArray[np.int64]  # (N,)
    crop_tries: NDArray[np.float64]  # (N, d, 2, 10) uniforms: area and ratio of each try
    crop_corner: NDArray[np.float64]  # (N, d, 2) uniforms: top and left
    flip: NDArray[np.bool_]  # (N, d)
    jitter: NDArray[np.bool_]  # (N, d) whether the four factors apply
    factors: NDArray[np.float64]  # (N, d, 4) brightness, contrast, saturation, hue (in turns)
    factor_order: NDArray[np.int64]  # (N, d, 4) the order in which they apply
    gray: NDArray[np.bool_]  # (N, d)
    blur_sigma: NDArray[np.float64]  # (N, d) pixels; 0: no blur
    solarize: NDArray[np.bool_]  # (N, d)


class Planner:
    """Draws the plan of any step, independently of all other steps. It only caches the order of the current epoch.

    recipe: the augmentations. num_images: images in the data set. images_per_step: the global batch size. images: those images
    of each step that belong to this rank.
    """

    def __init__(
        self,
        recipe: ViewsConfig,
        *,
        seed: int,
        num_images: int,
        images_per_step: int,
        images: ImageRange,
    ) -> None:
        self.recipe = recipe
        self.seed = seed
        self.images = images
        self.num_images = num_images
        self.images_per_step = images_per_step
        self.steps_per_epoch = num_images // images_per_step
        # The current epoch and its order, which takes a while to draw for a large set.
        self._order_of: tuple[int, NDArray[np.int64]] | None = None

    def plan(self, step: int) -> Plan:
        """Return the choices for this rank's images in `step`, counted from 0 over the whole run."""
        views = draw_views(self.recipe, self.seed, step, self.images)
        return Plan(step, step // self.steps_per_epoch, self.image_ids(step), *views)

    def image_ids(self, step: int) -> NDArray[np.int64]:
        """Return the images of this rank in `step`, (N,)."""
        # Each epoch has a new order; the ranks divide each step of it among them.
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        first = step_of_epoch * self.images_per_step + self.images.first
        return self._order(epoch)[first : first + self.images.count]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        # Steps come in order, so only the order of one epoch is needed at a time.
        if self._order_of is None or self._order_of[0] != epoch:
            self._order_of = epoch, epoch_order(self.seed, epoch, self.num_images)
        return self._order_of[1]


def epoch_order(seed: int, epoch: int, num_images: int) -> NDArray[np.int64]:
    """Return the order of all images in an epoch, (num_images,): the permutation that sorts random keys."""
    keys = _raw(seed, _ORDER, epoch, 0, num_images)
    return np.argsort(keys, kind="stable")


def slice_permutations(seed: int, step: int, num_images: int, iterations: int, block: int) -> NDArray[np.int64]:
    """Return the orders in which a step's images are cut into slices, (iterations, num_images).

    The first order is the identity, because the order of the epoch is random already. Each later one permutes the images inside
    blocks of `block` images, so that no slice spans two blocks and the slices do not depend on the number of ranks.
    """
    # One row of image numbers, (1, num_images).
    identity = np.arange(num_images, dtype=np.int64)[None]
    if iterations == 1:
        return identity
    # Sort random keys inside each block, then add the block's first image.
    num_keys = (iterations - 1) * num_images
    keys = _raw(seed, _SLICES, step, 0, num_keys).reshape(iterations - 1, -1, block)
    order_in_block = np.argsort(keys, axis=-1, kind="stable")
    first_of_block = identity.reshape(-1, block)[:, :1]
    orders = order_in_block + first_of_block
    return np.concatenate([identity, orders.reshape(iterations - 1, num_images)])


def draw_views(recipe: ViewsConfig, seed: int, step: int, rows: ImageRange) -> tuple[NDArray, ...]:
    """Draw the fields of `Plan` from crop_tries on, for the images `rows` of a step, (rows.count, d, ...) each."""
    d = recipe.num_views
    first_block = rows.first * d * _WORDS // _BLOCK
    words = _raw(seed, _VIEWS, step, first_block, rows.count * d * _WORDS)
    # The upper 53 bits of a word give a uniform in [0, 1).
    upper_bits = (words >> np.uint64(11)).astype(np.float64)
    u = upper_bits.reshape(rows.count, d, _WORDS) * 2.0**-53
    # Each choice has its fixed words, so that a change of one probability does not change the other choices.
    tries = u[..., :20].reshape(rows.count, d, 2, _TRIES)
    corner = u[..., 20:22]
    flip = u[..., 22]
    jitter = u[..., 23]
    factors = u[..., 24:28]
    order_keys = u[..., 28:32]
    gray = u[..., 32]
    blur = u[..., 33]
    blur_scale = u[..., 34]
    solarize = u[..., 35]

    # Factors of brightness, contrast and saturation lie around 1 but not below 0, the shift of the hue lies around 0.
    strength = np.array([recipe.brightness, recipe.contrast, recipe.saturation])
    lowest_strength = np.maximum(0, 1 - strength)
    low = np.array([*lowest_strength, -recipe.hue])
    high = np.array([*(1 + strength), recipe.hue])
    lowest_sigma, highest_sigma = recipe.blur_sigma
    sigma = lowest_sigma + (highest_sigma - lowest_sigma) * blur_scale
    return (
        tries,
        corner,
        flip < recipe.flip_probability,
        jitter < recipe.color_probability,
        low + (high - low) * factors,
        np.argsort(order_keys, axis=-1, kind="stable"),
        gray < recipe.gray_probability,
        np.where(blur < _of_views(recipe.blur_probability, d), sigma, 0.0),
        solarize < _of_views(recipe.solarize_probability, d),
    )


def _of_views(probability: float | tuple[float, ...], num_views: int) -> NDArray[np.float64]:
    """Return the probability of each view, (d,). An evaluation draws fewer views than the recipe, the first of them."""
    given = probability[:num_views] if isinstance(probability, tuple) else probability
    return np.broadcast_to(given, num_views)


def crop_windows(
    plan: Plan,
    recipe: ViewsConfig,
    heights: NDArray[np.integer],
    widths: NDArray[np.integer],
) -> NDArray[np.int64]:
    """Return crop windows (N, d, 4): top, left, height and width in pixels of the image.

    This is torchvision's RandomResizedCrop: ten tries draw a share of the area and a log-uniform aspect ratio, and the first
    window that fits into the image gets a uniform position. If none fits, the window is the largest centred one with an allowed
    aspect ratio.

    heights, widths: (N,) pixels of the images.
    """
    image_height = np.asarray(heights, np.float64)[:, None, None]
    image_width = np.asarray(widths, np.float64)[:, None, None]

    # Size of the window in each try, (N, d, tries).
    smallest_share, largest_share = recipe.crop_area
    area_share = smallest_share + (largest_share - smallest_share) * plan.crop_tries[:, :, 0]
    area = image_height * image_width * area_share
    log_ratio_low, log_ratio_high = np.log(recipe.crop_ratio)
    log_ratio = log_ratio_low + (log_ratio_high - log_ratio_low) * plan.crop_tries[:, :, 1]
    ratio = np.exp(log_ratio)
    width = np.rint(np.sqrt(area * ratio))
    height = np.rint(np.sqrt(area / ratio))

    # Take the first try that fits, (N, d). argmax gives 0 if none does; that window is replaced below.
    fits = (width > 0) & (width <= image_width) & (height > 0) & (height <= image_height)
    first = np.argmax(fits, axis=-1)[..., None]
    crop_height = np.take_along_axis(height, first, -1)[..., 0]
    crop_width = np.take_along_axis(width, first, -1)[..., 0]

    # Draw its position uniformly among all positions inside the image.
    image_height = image_height[..., 0]
    image_width = image_width[..., 0]
    rows = image_height - crop_height + 1
    columns = image_width - crop_width + 1
    corner = np.floor(plan.crop_corner * np.stack([rows, columns], -1))
    top = corner[..., 0]
    left = corner[..., 1]
    drawn = np.stack([top, left, crop_height, crop_width], axis=-1)
    fallback = _centre(image_height, image_width, recipe.crop_ratio)
    any_fits = fits.any(-1)[..., None]
    windows = np.where(any_fits, drawn, fallback)
    return windows.astype(np.int64)


def _centre(height: NDArray, width: NDArray, ratio: tuple[float, float]) -> NDArray[np.float64]:
    """Return the largest centred window with an allowed aspect ratio, (N, 1, 4), in images of the given sizes (N, 1)."""
    lowest_ratio, highest_ratio = ratio
    # The ratio is width / height: a narrow image limits the height of the window, a low one its width.
    highest = np.maximum(np.rint(width / lowest_ratio), 1)
    widest = np.maximum(np.rint(height * highest_ratio), 1)
    crop_height = np.minimum(height, highest)
    crop_width = np.minimum(width, widest)
    top = (height - crop_height) // 2
    left = (width - crop_width) // 2
    return np.stack([top, left, crop_height, crop_width], axis=-1)


def _raw(seed: int, stream: int, position: int, first_block: int, count: int) -> NDArray[np.uint64]:
    """Return `count` random 64-bit words of a seed's stream at `position` (a step or an epoch).

    first_block: number of the first block of four words.
    """
    # Key and counter determine the words, so no words have to be skipped to get there.
    generator = np.random.Philox(key=[seed, stream], counter=[first_block, position, 0, 0])
    return generator.random_raw(count)
