"""VICReg: invariance between views, and variance and covariance within each view.

Bardes et al., "VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning", ICLR 2022, equations 1-6.
Shapes: d views, N images of this rank, k embedding size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.precision import without_autocast
from trainer.precision import at_least_float32

_EPS = 1e-4  # added to the variance, as in the paper


class VICRegTerms(NamedTuple):
    """Terms of the loss before they are weighted, 0-d."""

    invariance: Tensor
    variance: Tensor
    covariance: Tensor


def vicreg_terms(
    v: Tensor, *, num_views: int, num_images: int, sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x
) -> VICRegTerms:
    """Compute the three terms for embeddings v (d*N, k), view-major, in float32 (float64 if v is).

    invariance: mean squared difference of the elements, over pairs of views; of this rank's images.
    variance: mean over dimensions and views of max(0, 1 - standard deviation), as the authors' code averages it.
    covariance: squared off-diagonal covariances divided by k, summed over two views (for d views, twice their mean).

    num_images: number of images of all ranks, over which variance and covariance are taken. sum_over_ranks: sums over ranks,
    with gradient (`gather.sum_of_group`).
    """
    with without_autocast(v.device):
        views = at_least_float32(v).unflatten(0, (num_views, -1))  # (d, N, k)
        squares = [(views[a] - views[b]).square().mean() for a, b in combinations(range(num_views), 2)]
        invariance = torch.stack(squares).mean()

        # No covariance changes with the mean to first order, so the mean needs no gradient.
        mean = sum_over_ranks(views.detach().sum(1, keepdim=True)) / num_images
        centred = views - mean
        covariance = sum_over_ranks(centred.mT @ centred) / (num_images - 1)  # (d, k, k)
        variance = covariance.diagonal(dim1=1, dim2=2)
        # The gradient of a root at 0 is infinite, so a constant is added.
        deviation = (variance + _EPS).sqrt()
        spread = (1 - deviation).relu().mean()
        off_diagonal = covariance.square().sum() - variance.square().sum()
        return VICRegTerms(invariance, spread, off_diagonal * 2 / (num_views * views.shape[2]))
