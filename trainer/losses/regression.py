"""Loss between a prediction of one view's embedding and the embedding of another view (BYOL, SimSiam).

Grill et al., "Bootstrap Your Own Latent", NeurIPS 2020, equation 2; Chen and He, "Exploring Simple Siamese Representation
Learning", CVPR 2021, equation 2. Shapes: N images, d views, k embedding size.
"""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.precision import without_autocast
from trainer.errors import InputError
from trainer.precision import at_least_float32


def regression_loss(predictions: Tensor, targets: Tensor, *, num_views: int, normalize: bool = True) -> Tensor:
    """Compute the mean over images and pairs of views of the two distances of a pair, a scalar in float32 (float64 if given).

    A pair (a, b) has the distance of view a's prediction to view b's target, and that of view b's prediction to view a's
    target. With normalize a distance is 2 - 2 cos, so the loss lies in 0..8; without, it is the mean squared difference of
    the k elements.

    predictions, targets: (d*N, k) floating, view-major. The caller detaches the targets.
    Raises InputError for shapes that do not fit.
    """
    if predictions.shape != targets.shape or predictions.dim() != 2 or num_views < 2 or len(targets) % num_views:
        raise InputError(
            f"predictions and targets must have the same shape ({num_views} views * images, embedding), with 2 views or more, "
            f"got {tuple(predictions.shape)} and {tuple(targets.shape)}"
        )
    with without_autocast(predictions.device):
        p = at_least_float32(predictions)
        t = at_least_float32(targets)
        if normalize:
            p = functional.normalize(p, dim=1)
            t = functional.normalize(t, dim=1)
        p = p.unflatten(0, (num_views, -1))  # (d, N, k)
        t = t.unflatten(0, (num_views, -1))
        # Both directions of each pair of views.
        squares = torch.stack([(p[a] - t[b]).square() for a, b in permutations(range(num_views), 2)])
        # For rows of length 1 the sum of the squares is 2 - 2 cos.
        distances = squares.sum(-1) if normalize else squares.mean(-1)  # (directions, N)
        return 2 * distances.mean()
