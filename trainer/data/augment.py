"""The augmentation after the resize outside of DALI's graph, by the kernels of `kernels.augment_triton`.

DALI's graph then ends at the resize. The kernels run on the stream of the training and read DALI's outputs where they lie.

Shapes: N images of this rank, d views, R = d*N, S the size of a view in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import augment_triton
from kernels.augment_reference import LEVEL, SIGMA, TAPS, no_augmentation
from trainer.config.schema import ViewsConfig
from trainer.data.dali_graph import has_blur, has_color, has_solarisation, uses_image_mean
from trainer.models.encoder import Normalize


def split_choices(arrays: list[NDArray], recipe: ViewsConfig) -> tuple[list[NDArray], NDArray[np.float32]]:
    """Divide what `view_arrays` returned into the inputs of a graph that ends at the resize, and the choices for the rest.

    The choices are those of `kernels.augment_reference`, (R, CHOICES), view-major."""
    num_images = len(arrays[0])
    fields = len(arrays) // recipe.num_views
    windows: list[NDArray] = []
    choices = no_augmentation(recipe.num_views * num_images)
    for view in range(recipe.num_views):
        start, end, *rest = arrays[view * fields : (view + 1) * fields]
        windows += [start, end]
        own = choices[view * num_images : (view + 1) * num_images]
        # A and C come first, then sigma and taps, and the level.
        if has_color(recipe):
            own[:, :9] = rest.pop(0).reshape(-1, 9)
            own[:, 9:18] = rest.pop(0).reshape(-1, 9)
        if has_blur(recipe):
            own[:, SIGMA] = rest.pop(0)
            own[:, TAPS] = rest.pop(0)
        if has_solarisation(recipe):
            own[:, LEVEL] = rest.pop(0)
    return windows, choices


class Augmentation:
    """The augmentation of a loader's batches after DALI's resize."""

    def __init__(self, recipe: ViewsConfig, device: torch.device) -> None:
        self.recipe = recipe
        normalize = Normalize(recipe)
        self._normalisation = torch.stack([normalize.factor.flatten(), normalize.shift.flatten()]).to(device)

    def split(self, arrays: list[NDArray]) -> tuple[list[NDArray], NDArray[np.float32]]:
        """Divide the arrays of a step, see `split_choices`."""
        return split_choices(arrays, self.recipe)

    def __call__(self, outputs: Sequence[Tensor], choices: NDArray[np.float32], out: Tensor) -> None:
        """Augment and normalise the outputs of a graph that ends at the resize, and write them to `out`, (R, S, S, 3)."""
        views, means = outputs[: self.recipe.num_views], None
        if uses_image_mean(self.recipe):
            # The mean pixels (N, 1, 3) of the images are those of each of their views.
            means = outputs[-1].flatten(1).repeat(self.recipe.num_views, 1)
        color = has_color(self.recipe)
        augment_triton.augment(views, choices, self._normalisation, out, color=color, means=means)
