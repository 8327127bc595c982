"""W-MSE loss and its gradient as one autograd node: permutation of the rows, whitening, distances of pairs.

On a CPU an autograd node costs as much as a matrix product of the whitening: three nodes instead of one add 15 % at k = 64.
The explicit gradient of the distances needs a third of the passes over z that autograd needs. Shapes:
    v (num_views * N, k)    permutations (iterations, N)    S = iterations * N / M slices of each view
    x, z, grad_z (num_views * S, M, k)    complete, weight (S,)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.torch_ops import enough_threads  # the module also registers wmse::whiten and wmse::whiten_backward


class FusedLoss(torch.autograd.Function):
    """Autograd function that returns loss (scalar), ok and min_pivot (num_views * S,).

    `trainer.losses.wmse` describes the arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        v: Tensor,
        permutations: Tensor,
        num_views: int,
        slice_size: int,
        normalize: bool,
        eps: float,
        cholesky_float64: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with enough_threads(v):
            x = _cut_slices(v, permutations, num_views, slice_size)
            z, w, u, ok, min_pivot = torch.ops.wmse.whiten(x, eps, cholesky_float64, backend)
            # A slice counts if it could be whitened in every view.
            complete = ok.view(num_views, -1).all(0)
            views = z.view(num_views, len(complete), slice_size, -1)
            loss, pairs = _pair_distance(views, complete, normalize)
        ctx.eps = eps
        ctx.backend = backend
        ctx.save_for_backward(permutations, z, w, u, ok, *pairs)
        ctx.mark_non_differentiable(ok, min_pivot)
        ctx.set_materialize_grads(False)
        return loss, ok, min_pivot

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        # torch's once_differentiable does not notice create_graph if `gradient` itself needs no gradient.
        if torch.is_grad_enabled():
            raise NotImplementedError("the W-MSE loss has no second derivative: call backward without create_graph")
        if gradient is None:
            return (None,) * 8
        permutations, z, w, u, ok, *pairs = ctx.saved_tensors
        num_views = len(z) // len(pairs[-1])
        with enough_threads(z):
            views = z.unflatten(0, (num_views, -1))
            grad_views = _pair_distance_backward(gradient, views, _Pairs(*pairs))
            grad_z = grad_views.flatten(0, 1)
            grad_x = torch.ops.wmse.whiten_backward(grad_z, z, w, u, ok, ctx.eps, ctx.backend)
            grad_v = _join_slices(grad_x, permutations, num_views)
        return grad_v, *[None] * 7


def _cut_slices(v: Tensor, permutations: Tensor, num_views: int, slice_size: int) -> Tensor:
    """Permute the images of every view alike, and cut v into slices x."""
    size = v.shape[1]
    views = v.view(num_views, -1, size)
    permuted = views.index_select(1, permutations.flatten())
    return permuted.view(-1, slice_size, size)


def _join_slices(grad_x: Tensor, permutations: Tensor, num_views: int) -> Tensor:
    """Turn the gradient at x into the gradient at v, by the inverse permutations.

    This takes a fifth of the time of the backward of index_select, which adds row by row, on a GPU in a varying order.
    """
    size = grad_x.shape[-1]
    iterations, num_images = permutations.shape
    # Position in x of each image in each iteration.
    positions = torch.arange(iterations * num_images, device=grad_x.device).view_as(permutations)
    inverse = torch.empty_like(permutations).scatter_(1, permutations, positions)
    views = grad_x.view(num_views, -1, size)
    grad_v = views.index_select(1, inverse.flatten())
    # An image occurs once in each iteration.
    if iterations > 1:
        grad_v = grad_v.unflatten(1, (iterations, num_images)).sum(1)
    return grad_v.view(-1, size)


class _Pairs(NamedTuple):
    """Values that the distances save for their gradient."""

    inverse_norm: Tensor | None  # (num_views, S, M, 1); None if rows are not normalised
    total: Tensor  # (S, M, k), sum of the views
    weight: Tensor  # (S,), factor of the squares of a slice in the loss; 0 if the slice is not complete


def _pair_distance(z: Tensor, complete: Tensor, normalize: bool) -> tuple[Tensor, _Pairs]:
    """Compute the mean distance over all pairs of views and all images of the complete slices, in time O(num_views).

    The squared differences of all pairs of views of an image add up to num_views * sum_i |z_i - mean z|^2, which rounding
    never makes negative. For unit rows, |u_i - u_j|^2 = 2 - 2 cos. Without normalisation, the mean is also over elements.

    z: (num_views, S, M, k). Returns a scalar, which is 0 if no slice is complete, and values for the gradient.
    """
    num_views, _, num_rows, size = z.shape
    inverse_norm = None
    rows = z
    if normalize:
        norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        inverse_norm = norm.clamp_min_(1e-12).reciprocal_()
        rows = z * inverse_norm
    total = rows.sum(0)
    deviations = torch.sub(rows, total, alpha=1 / num_views)
    squares = deviations.square_().flatten(2).sum(2).sum(0)  # (S,)

    # Divide by the number of pairs, rows and (without normalisation) elements of all complete slices. The factor num_views
    # of the sum over pairs cancels against that of the number of pairs.
    terms = (num_views - 1) / 2 * num_rows
    if not normalize:
        terms *= size
    num_complete = complete.sum(dtype=z.dtype).clamp_min_(1)
    weight = complete / num_complete.mul_(terms)
    return torch.dot(squares, weight), _Pairs(inverse_norm, total, weight)


def _pair_distance_backward(gradient: Tensor, z: Tensor, pairs: _Pairs) -> Tensor:
    """Compute the gradient at z.

    It is a multiple of z_i - mean z. If rows are normalised, it is a multiple of the part of -mean u orthogonal to u_i."""
    scale = (pairs.weight * gradient)[:, None, None].mul_(2)
    if pairs.inverse_norm is None:
        return torch.sub(z, pairs.total, alpha=1 / len(z)).mul_(scale)
    # Subtract from the sum of the unit rows its projection onto each row.
    products = (z * pairs.total).sum(-1, keepdim=True)
    along = products.mul_(pairs.inverse_norm).mul_(pairs.inverse_norm)
    orthogonal = torch.addcmul(pairs.total, z, along, value=-1)
    return orthogonal.mul_(pairs.inverse_norm * scale.div_(-len(z)))
