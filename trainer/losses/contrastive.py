"""Contrastive loss (InfoNCE) with in-batch negatives.

Chen et al., "A Simple Framework for Contrastive Learning", ICML 2020, in the form that the W-MSE paper compares with.
Shapes: N images of v, T candidate images, d views, k embedding size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.precision import without_autocast
from trainer.errors import InputError
from trainer.precision import at_least_float32


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

    For each pair of views (a, b), an embedding of view a has one positive, the same image in view b, and 2T - 2 negatives,
    the other images in both views. The loss is the mean cross-entropy over both directions of all pairs.

    v: (d*N, k) floating, view-major. candidates: (d*T, k), view-major, the embeddings of all ranks; None: v.
    first_image: v holds the images first_image .. first_image + N - 1 of the candidates.
    temperature: divides the similarities. normalize: compare by cosine; False: by dot product.

    Raises InputError for shapes that do not fit.
    """
    candidates = v if candidates is None else candidates
    _check(v, candidates, num_views, first_image)
    with without_autocast(v.device):
        rows = at_least_float32(v)
        columns = at_least_float32(candidates)
        if normalize:
            rows = torch.nn.functional.normalize(rows, dim=1)
            columns = torch.nn.functional.normalize(columns, dim=1)
        # The similarities of each local embedding with every candidate, by view and image on both sides.
        num_images = len(rows) // num_views
        similarity = rows @ columns.T / temperature
        similarity = similarity.view(num_views, num_images, num_views, -1)  # (d, N, d, T)

        # Numerator: the similarity of image i in view a with the same image in view b, (d, d, N).
        views = torch.arange(num_views, device=v.device)
        view_a = views[:, None]
        images = torch.arange(num_images, device=v.device)
        same_images = first_image + images
        positive = similarity[view_a[..., None], images, view_a, same_images]

        # Denominator: the candidates of view b and of view a itself, without the embedding itself.
        is_itself = torch.zeros_like(similarity, dtype=torch.bool)
        is_itself[view_a, images, view_a, same_images] = True
        log_sum = similarity.masked_fill(is_itself, -torch.inf).logsumexp(-1)  # (d, N, d), over the images of one view
        own_view = log_sum.diagonal(dim1=0, dim2=2).T  # (d, N)
        both_views = torch.logaddexp(log_sum, own_view[..., None])
        losses = both_views.movedim(2, 1) - positive  # (d, d, N)

        # Average over pairs of different views. An index by a mask would wait for the device.
        is_other_view = (view_a != views)[..., None]
        num_losses = num_views * (num_views - 1) * num_images
        return torch.where(is_other_view, losses, 0.0).sum() / num_losses


def _check(v: Tensor, candidates: Tensor, num_views: int, first_image: int) -> None:
    """Raise InputError for shapes that do not fit."""
    for name, x in (("v", v), ("candidates", candidates)):
        # Both must be matrices of rows with the same size, the same number for each view.
        is_matrix = x.dim() == 2 and x.is_floating_point()
        if not is_matrix or x.shape[1] != v.shape[1] or x.shape[0] % num_views:
            raise InputError(
                f"{name} must be floating of shape ({num_views} * images, {v.shape[-1]}), got {x.dtype} {tuple(x.shape)}"
            )
    if num_views < 2:
        raise InputError(f"num_views is {num_views}: a contrastive loss needs 2 views or more")
    # Without another image there is no negative, and the denominator would be empty.
    num_images = len(v) // num_views
    num_candidates = len(candidates) // num_views
    if num_candidates < 2:
        raise InputError(f"candidates hold {num_candidates} image: give 2 images or more, so that negatives exist")
    if not 0 <= first_image <= num_candidates - num_images:
        last_image = first_image + num_images - 1
        raise InputError(
            f"images {first_image} to {last_image} are not among the candidates 0 to {num_candidates - 1}: set first_image "
            "to the position of v in the candidates"
        )
