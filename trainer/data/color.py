"""Brightness, contrast, saturation, hue and greyscale of a view as one affine map of its pixels.

Each operation is linear in the pixel x and, for contrast, in the mean m of the view's pixels: x -> S x + K m. Composed in the
drawn order, all of them together are x -> A x + C m with two 3x3 matrices for each view. Hue is a rotation about the grey axis
(1, 1, 1). torchvision clamps after each operation and rotates the hue in HSV; docs/views.md has the measured differences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.config.schema import ViewsConfig
from trainer.data.plan import Plan

_GRAY = np.array([0.2989, 0.587, 0.114])  # weights of red, green, blue in torchvision's greyscale
# Each row computes the grey level, so all three colours of the result are equal.
_TO_GRAY = np.tile(_GRAY, (3, 1))
_EYE = np.eye(3)
_NUM_OPERATIONS = 4


def color_matrices(plan: Plan, recipe: ViewsConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (A, C), each (N, d, 3, 3): a pixel x of a view with mean m becomes A x + C m, all in levels 0..255."""
    # A pivot maps the mean pixel to the value that contrast keeps.
    pivot = _EYE if recipe.contrast_pivot == "channel" else _TO_GRAY
    scale, constant = _operations(plan.factors, pivot)
    # Start with the identity: A = I, C = 0.
    a = np.broadcast_to(_EYE, (*plan.gray.shape, 3, 3)).copy()
    c = np.zeros_like(a)
    # Compose the four operations in the order that was drawn for each view.
    for position in range(_NUM_OPERATIONS):
        # S and K of this operation for each view, (N, d, 3, 3).
        operation = plan.factor_order[:, :, position]
        operation = operation[:, :, None, None, None]
        s = np.take_along_axis(scale, operation, axis=2)[:, :, 0]
        k = np.take_along_axis(constant, operation, axis=2)[:, :, 0]
        # The mean after the operations so far is (A + C) m.
        c = s @ c + k @ (a + c)
        a = s @ a
    # A view without colour jitter keeps its pixels. Greyscale comes last.
    jitter = plan.jitter[:, :, None, None]
    a = np.where(jitter, a, _EYE)
    c = np.where(jitter, c, 0.0)
    gray = plan.gray[:, :, None, None]
    a = np.where(gray, _TO_GRAY @ a, a)
    c = np.where(gray, _TO_GRAY @ c, c)
    return a.astype(np.float32), c.astype(np.float32)


def _operations(
    factors: NDArray[np.float64], pivot: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return S and K of brightness, contrast, saturation and hue, each (N, d, 4, 3, 3), for factors (N, d, 4).

    pivot: (3, 3), maps the mean pixel to the value that contrast keeps."""
    brightness = factors[:, :, 0, None, None]
    contrast = factors[:, :, 1, None, None]
    saturation = factors[:, :, 2, None, None]
    angle = 2 * np.pi * factors[:, :, 3]
    # S of each operation, in the order of the factors. Saturation blends a pixel with its own grey level.
    scale = [
        brightness * _EYE,
        contrast * _EYE,
        saturation * _EYE + (1 - saturation) * _TO_GRAY,
        _rotations(angle),
    ]
    # Contrast is the only operation that depends on the mean: it blends each pixel with the pivot.
    constant = np.zeros((*factors.shape, 3, 3))
    constant[:, :, 1] = (1 - contrast) * pivot
    return np.stack(scale, axis=2), constant


def _rotations(angle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rotations (..., 3, 3) about the axis (1, 1, 1) by `angle` radians; red turns towards green.

    This is Rodrigues' formula: cos I + sin [axis]_x + (1 - cos) axis axis^T, where every element of axis axis^T is 1/3.
    """
    # the matrix [axis]_x of the cross product with the axis (1, 1, 1) / sqrt(3)
    cross = np.array(
        [
            [0.0, -1.0, 1.0],
            [1.0, 0.0, -1.0],
            [-1.0, 1.0, 0.0],
        ]
    ) / np.sqrt(3)
    cos = np.cos(angle)[..., None, None]
    sin = np.sin(angle)[..., None, None]
    return cos * _EYE + sin * cross + (1 - cos) / 3
