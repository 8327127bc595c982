"""Brightness, contrast, saturation, hue and grey of a view as one affine map of its pixels.

Each operation is linear in the pixel x and, for contrast, in the mean m of the view's pixels: x -> S x + K m. Composed
in the drawn order the whole is x -> A x + C m, with two 3x3 matrices a view. Hue is a rotation about the grey axis
(1, 1, 1). torchvision clamps after each operation and turns hue in HSV: docs/views.md has the measured differences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.data.plan import Plan

_GRAY = np.array([0.2989, 0.587, 0.114])  # weights of red, green, blue in torchvision's grey
_TO_GRAY = np.tile(_GRAY, (3, 1))
_EYE = np.eye(3)


def color_matrices(plan: Plan) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(A, C), each (N, d, 3, 3): a pixel x of a view with mean m becomes A x + C m, all in levels 0..255."""
    scale, constant = _operations(plan.factors)
    a = np.broadcast_to(_EYE, (*plan.gray.shape, 3, 3)).copy()
    c = np.zeros_like(a)
    for position in range(4):
        which = plan.factor_order[:, :, position][:, :, None, None, None]
        s, k = (np.take_along_axis(x, which, axis=2)[:, :, 0] for x in (scale, constant))
        a, c = s @ a, s @ c + k @ (a + c)  # the mean so far is (A + C) m
    jitter, gray = plan.jitter[:, :, None, None], plan.gray[:, :, None, None]
    a, c = np.where(jitter, a, _EYE), np.where(jitter, c, 0.0)
    a, c = np.where(gray, _TO_GRAY @ a, a), np.where(gray, _TO_GRAY @ c, c)
    return a.astype(np.float32), c.astype(np.float32)


def _operations(factors: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """S and K of brightness, contrast, saturation and hue, each (N, d, 4, 3, 3), for factors (N, d, 4)."""
    brightness, contrast, saturation = (factors[:, :, i, None, None] for i in range(3))
    scale = [
        brightness * _EYE,
        contrast * _EYE,
        saturation * _EYE + (1 - saturation) * _TO_GRAY,
        _rotations(2 * np.pi * factors[:, :, 3]),
    ]
    constant = np.zeros((*factors.shape, 3, 3))
    constant[:, :, 1] = (1 - contrast) * _TO_GRAY
    return np.stack(scale, axis=2), constant


def _rotations(angle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotations (..., 3, 3) about the axis (1, 1, 1) by `angle` radians (Rodrigues); red turns towards green."""
    cross = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / np.sqrt(3)
    cos, sin = np.cos(angle)[..., None, None], np.sin(angle)[..., None, None]
    return cos * _EYE + sin * cross + (1 - cos) / 3
