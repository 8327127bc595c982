"""Swapped prediction of cluster assignments (SwAV).

Caron et al., "Unsupervised Learning of Visual Features by Contrasting Cluster Assignments", NeurIPS 2020, equations 1-5.
Shapes: d views, N images of this rank, C prototypes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.precision import without_autocast
from trainer.precision import at_least_float32


def swapped_prediction_loss(
    scores: Tensor,
    *,
    num_views: int,
    temperature: float,
    epsilon: float,
    iterations: int,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Compute the mean cross-entropy of each view's assignment with the other views' predictions, in float32 (or float64).

    scores: (d*N, C), view-major: cosines between embeddings and prototypes. sum_over_ranks: see `assignments`. The mean over
    ranks of this loss is the loss of all images.
    """
    with without_autocast(scores.device):
        views = at_least_float32(scores).unflatten(0, (num_views, -1))  # (d, N, C)
        targets = assignments(views.detach(), epsilon, iterations, sum_over_ranks)
        log_predictions = functional.log_softmax(views / temperature, dim=-1)
        # Each view predicts the assignments of all other views.
        others = targets.sum(0) - targets
        num_terms = num_views * (num_views - 1) * views.shape[1]
        return -(others * log_predictions).sum() / num_terms


@torch.no_grad()
def assignments(
    scores: Tensor, epsilon: float, iterations: int, sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """Assign the images of each view to the prototypes in about equal shares (Sinkhorn-Knopp); each row sums to 1.

    scores: (d, N, C). epsilon: smoothness. sum_over_ranks: sums a tensor (d, 1, C) over ranks, once in each iteration, so that
    the shares are those of the images of all ranks.
    """
    # Scores are cosines, so the range of epsilon keeps this finite without subtracting a maximum.
    q = (scores / epsilon).exp()
    for _ in range(iterations):
        # The constant factors of the usual formulation cancel in the last division.
        of_prototypes = sum_over_ranks(q.sum(1, keepdim=True))
        q = q / of_prototypes
        q = q / q.sum(2, keepdim=True)
    return q
