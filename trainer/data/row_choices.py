"""The choices for each row of a step, as `wmse plan` shows them and as the digest of the rows covers them.

A row is one image of a step with its views. Its hash covers the step, the number of the row, the image that was really used
and every random choice of its views. Hashes are summed modulo 2^64, so the digest of many rows does not depend on their order,
on the ranks or on restarts.

Shapes: N rows, d views of each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config.schema import ViewsConfig
from trainer.data.plan import Plan, crop_windows

# Odd factors of the finaliser of splitmix64. They are part of the digest: changing them makes all digests incomparable.
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15  # step of the keys of the words


class RowChoices(NamedTuple):
    """Choices of the rows of a step: the images that are shown, and how."""

    step: int
    rows: NDArray[np.int64]  # (N,) numbers of the rows in the step
    image_ids: NDArray[np.int64]  # (N,) images that are shown
    crop: NDArray[np.int64] | None  # (N, d, 4) top, left, height, width in pixels; None: the sizes are unknown
    flip: NDArray[np.bool_]  # (N, d)
    jitter: NDArray[np.bool_]  # (N, d)
    factors: NDArray[np.float64]  # (N, d, 4) brightness, contrast, saturation, hue
    factor_order: NDArray[np.int64]  # (N, d, 4)
    gray: NDArray[np.bool_]  # (N, d)
    blur_sigma: NDArray[np.float64]  # (N, d)
    solarize: NDArray[np.bool_]  # (N, d)


def row_choices(
    plan: Plan,
    recipe: ViewsConfig,
    first_row: int,
    image_ids: NDArray[np.int64],
    sizes: tuple[NDArray[np.integer], NDArray[np.integer]] | None,
) -> RowChoices:
    """Return the choices of a plan for the images that are really used.

    first_row: number of the plan's first row in the step. sizes: heights and widths (N,) of the images in pixels."""
    crop = None if sizes is None else crop_windows(plan, recipe, *sizes)
    rows = np.arange(first_row, first_row + len(image_ids), dtype=np.int64)
    return RowChoices(
        plan.step,
        rows,
        image_ids,
        crop,
        plan.flip,
        plan.jitter,
        plan.factors,
        plan.factor_order,
        plan.gray,
        plan.blur_sigma,
        plan.solarize,
    )


def row_hashes(choices: RowChoices) -> NDArray[np.uint64]:
    """Return the hash of each row, (N,). The sizes of the images must be known."""
    assert choices.crop is not None
    # Pack what is small, because the cost is that of the number of words.
    small = choices.flip.astype(np.uint64)
    for bit, values in enumerate((choices.jitter, choices.gray, choices.solarize), 1):
        small |= values.astype(np.uint64) << np.uint64(bit)
    for place in range(4):
        small |= choices.factor_order[..., place].astype(np.uint64) << np.uint64(4 + 2 * place)
    crop = choices.crop.astype(np.uint64)
    corners_and_sizes = (crop[..., 0::2] << np.uint64(32)) | crop[..., 1::2]
    # 8 words for each view: the packed ones, crop, factors and sigma by their bits.
    floats = np.concatenate([choices.factors, choices.blur_sigma[..., None]], axis=-1)
    of_views = np.concatenate([small[..., None], corners_and_sizes, floats.view(np.uint64)], axis=-1)
    num_rows = len(choices.rows)
    step = np.full(num_rows, choices.step)
    of_row = np.stack([step, choices.rows, choices.image_ids], axis=-1).astype(np.uint64)
    words = np.concatenate([of_row, of_views.reshape(num_rows, -1)], axis=1)
    # A key for each place keeps equal values in two places apart. Python's integers do not overflow.
    keys = [(place + 1) * _GOLDEN % 2**64 for place in range(words.shape[1])]
    words ^= np.array(keys, np.uint64)
    return _mixed(_mixed(words).sum(axis=1, dtype=np.uint64))


def rows_digest(choices: RowChoices) -> int:
    """Return the sum of the hashes of the rows modulo 2^64."""
    return int(row_hashes(choices).sum(dtype=np.uint64))


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return words in which every bit of the input has changed about half of the bits."""
    mixed = words ^ (words >> np.uint64(30))
    mixed *= _FACTOR_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _FACTOR_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
