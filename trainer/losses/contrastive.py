"""The contrastive loss (InfoNCE) with in-batch negatives.

Chen et al., "A Simple Framework for Contrastive Learning", ICML 2020; the form and the sizes of the W-MSE paper's comparison.
Shapes: N images whose loss is computed, T images that they are compared with, d views, k embedding size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.precision import without_autocast
from trainer.errors import InputError


def contrastive_loss(
    v: Tensor,
    candidates: Tensor | None = None,
    *,
    num_views: int,
    temperature: float = 0.5,
    normalize: bool = True,
    first_image: int = 0,
) -> Tensor:
    """Compute the mean contrastive loss of the images of v, a scalar in float32 (float64 if v is).

    For each pair of views a, b, an embedding of view a has one positive, its image in view b, and 2T - 2 negatives, the
    other images in both views. The loss is the mean cross-entropy over both directions of all pairs.

    v: (d*N, k) floating, view-major. candidates: (d*T, k), view-major, the embeddings of all ranks; None: v.
    first_image: v holds the images first_image .. first_image + N - 1 of the candidates.
    normalize: compare by cosine; False: by dot product.

    Raises InputError for shapes that don't fit.
    """
    candidates = v if candidates is None else candidates
    _check(v, candidates, num_views, first_image)
    with without_autocast(v.device):
        rows, columns = (x if x.dtype == torch.float64 else x.float() for x in (v, candidates))
        if normalize:
            rows, columns = (torch.nn.functional.normalize(x, dim=1) for x in (rows, columns))
        num_images = len(rows) // num_views
        similarity = (rows @ columns.T / temperature).view(num_views, num_images, num_views, -1)
        views = torch.arange(num_views, device=v.device)
        images = torch.arange(num_images, device=v.device)
        # (d, d, N): of view a's image i with the same image in view b
        positive = similarity[views[:, None, None], images, views[:, None], first_image + images]
        is_itself = torch.zeros_like(similarity, dtype=torch.bool)
        is_itself[views[:, None], images, views[:, None], first_image + images] = True
        # (d, N, d): over the images of one view
        log_sum = similarity.masked_fill(is_itself, -torch.inf).logsumexp(-1)
        own_view = log_sum.diagonal(dim1=0, dim2=2).T  # (d, N)
        losses = torch.logaddexp(log_sum, own_view[..., None]).movedim(2, 1) - positive  # (d, d, N)
        # an index by a mask would wait for the device
        other_views = (views[:, None] != views)[..., None]
        return torch.where(other_views, losses, 0.0).sum() / (num_views * (num_views - 1) * num_images)


def _check(v: Tensor, candidates: Tensor, num_views: int, first_image: int) -> None:
    for name, x in (("v", v), ("candidates", candidates)):
        if x.dim() != 2 or not x.is_floating_point() or x.shape[1] != v.shape[1] or x.shape[0] % num_views:
            raise InputError(
                f"{name} must be floating of shape ({num_views} * images, {v.shape[-1]}), got {x.dtype} {tuple(x.shape)}"
            )
    if num_views < 2:
        raise InputError(f"a contrastive loss needs 2 views or more, got {num_views}")
    num_images, num_candidates = len(v) // num_views, len(candidates) // num_views
    if num_candidates < 2 or not 0 <= first_image <= num_candidates - num_images:
        raise InputError(
            f"images {first_image} to {first_image + num_images - 1} are not among {num_candidates} candidates, of which there "
            "must be 2 or more"
        )
