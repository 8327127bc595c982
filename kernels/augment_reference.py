"""The definition of the augmentation after the resize: colour, blur, solarisation and normalisation of each view.

It rounds to whole levels where DALI's graph rounds, so both give the same views. `augment_triton` computes the same on a GPU.

Shapes: R views, S the size of a view in pixels.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# The choices for one view: A (9), C (9), sigma, taps, first level that is inverted. A view without blur has one tap.
CHOICES = 21
SIGMA, TAPS, LEVEL = 18, 19, 20
NO_LEVEL = 256  # no value of a pixel reaches it


def no_augmentation(num_views: int) -> NDArray[np.float32]:
    """Return the choices (num_views, CHOICES) of views that are not changed."""
    choices = np.zeros((num_views, CHOICES), np.float32)
    choices[:, :9] = np.eye(3).ravel()
    choices[:, SIGMA] = 1.0
    choices[:, TAPS] = 1.0
    choices[:, LEVEL] = NO_LEVEL
    return choices


def augment(pixels: Tensor, choices: Tensor, factor: Tensor, shift: Tensor, means: Tensor | None = None) -> Tensor:
    """Return the normalised views (R, 3, S, S) in the data type of `choices`.

    pixels: (R, 3, S, S) uint8, views after the resize. choices: (R, CHOICES).
    factor, shift: (3,), the result is factor y + shift for the levels y of a channel.
    means: (R, 3), the mean pixel m that the colours of each view refer to; None: that of the view itself.
    """
    x = pixels.to(choices.dtype)
    if means is None:
        means = x.mean((2, 3))
    # Colour: A x + C m.
    a = choices[:, :9].view(-1, 3, 3)
    c = choices[:, 9:18].view(-1, 3, 3)
    moved = torch.einsum("rij,rjhw->rihw", a, x)
    moved += torch.einsum("rij,rj->ri", c, means.to(x.dtype))[..., None, None]
    x = _rounded(moved)
    for view, choice in zip(x, choices, strict=True):
        if choice[TAPS] > 1:
            view.copy_(_rounded(_blurred(view, float(choice[SIGMA]), int(choice[TAPS]))))
    level = choices[:, LEVEL, None, None, None]
    x = torch.where(x >= level, 255 - x, x)
    return x * factor.to(x)[:, None, None] + shift.to(x)[:, None, None]


def _rounded(x: Tensor) -> Tensor:
    """Round to the levels 0..255."""
    return (x + 0.5).floor().clamp(0, 255)


def _blurred(view: Tensor, sigma: float, taps: int) -> Tensor:
    """Blur a view (3, S, S) along both axes. Beyond its border the view continues mirrored at the outermost pixel."""
    radius = taps // 2
    size = view.shape[-1]
    distance = torch.arange(-radius, radius + 1, dtype=view.dtype, device=view.device)
    weights = torch.exp(-(distance**2) / (2 * sigma**2))
    weights /= weights.sum()
    # Positions ..., 2, 1, 0, 1, 2, ..., S - 2, S - 1, S - 2, ...: the outermost pixel does not occur twice.
    period = 2 * size - 2
    position = torch.arange(-radius, size + radius, device=view.device) % period
    position = torch.minimum(position, period - position)
    view = F.conv2d(view[:, None, position], weights.view(1, 1, -1, 1))
    return F.conv2d(view[..., position], weights.view(1, 1, 1, -1))[:, 0]
