"""Barlow Twins: the cross-correlation of two views' embeddings is pulled towards the identity.

Zbontar et al., "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021, equations 1 and 2.
Shapes: d views, N images of this rank, k embedding size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from kernels.precision import without_autocast
from trainer.precision import at_least_float32

_EPS = 1e-5  # of the BatchNorm by which the authors standardise


def barlow_twins_loss(
    v: Tensor,
    *,
    num_views: int,
    num_images: int,
    off_diagonal_weight: float,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Compute sum_i (1 - c_ii)^2 + weight * sum_(i != j) c_ij^2, averaged over pairs of views, in float32 (float64 if v is).

    c (k, k) is the correlation of the embeddings of two views over all images.

    v: (d*N, k), view-major. num_images: number of images of all ranks. sum_over_ranks: sums over ranks, with gradient
    (`gather.sum_of_group`); every rank computes the same loss.
    """
    with without_autocast(v.device):
        views = at_least_float32(v).unflatten(0, (num_views, -1))  # (d, N, k)
        # No covariance changes with the mean to first order, so the mean needs no gradient.
        mean = sum_over_ranks(views.detach().sum(1, keepdim=True)) / num_images
        centred = views - mean
        variance = sum_over_ranks(centred.square().sum(1)) / num_images  # (d, k)
        # One covariance for each pair of views, (pairs, k, k).
        pairs = list(combinations(range(num_views), 2))
        products = torch.stack([centred[a].T @ centred[b] for a, b in pairs])
        covariance = sum_over_ranks(products) / num_images
        # Rows and columns are scaled here, not before the product: from the sums on, all ranks compute the same.
        scale = (variance + _EPS).rsqrt()
        scales = torch.stack([torch.outer(scale[a], scale[b]) for a, b in pairs])
        correlation = covariance * scales
        diagonal = correlation.diagonal(dim1=1, dim2=2)
        on_diagonal = (diagonal - 1).square().sum()
        off_diagonal = correlation.square().sum() - diagonal.square().sum()
        return (on_diagonal + off_diagonal_weight * off_diagonal) / len(products)
