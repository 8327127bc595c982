"""W-MSE and its gradient as one autograd node: rows in order, whitening, distances of pairs.

On a CPU a node costs as much as a product of the whitening (three nodes instead of one add 15 % at k = 64), and written
out, the gradient of the distances takes a third of the passes over z that autograd takes. Shapes:
    v (num_views * N, k)    permutations (iterations, N)    S = iterations * N / M slices of each view
    x, z, grad_z (num_views * S, M, k)    complete, weight (S,)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels.torch_ops  # noqa: F401  the operators wmse::whiten and wmse::whiten_backward


class FusedLoss(torch.autograd.Function):
    """-> loss (scalar), ok (num_views * S,), min_pivot (num_views * S,); see `trainer.losses.wmse` for the arguments."""

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
        x = _cut_slices(v, permutations, num_views, slice_size)
        z, w, u, ok, min_pivot = torch.ops.wmse.whiten(x, eps, cholesky_float64, backend)
        complete = ok.view(num_views, -1).all(0)
        loss, pairs = _pair_distance(z.view(num_views, len(complete), slice_size, -1), complete, normalize)
        ctx.eps, ctx.backend = eps, backend
        ctx.save_for_backward(permutations, z, w, u, ok, *pairs)
        ctx.mark_non_differentiable(ok, min_pivot)
        ctx.set_materialize_grads(False)
        return loss, ok, min_pivot

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # once_differentiable stays silent where `gradient` itself needs no gradient
            raise NotImplementedError("the W-MSE loss has no second derivative: call backward without create_graph")
        if gradient is None:
            return None, *[None] * 7
        permutations, z, w, u, ok, *pairs = ctx.saved_tensors
        num_views = len(z) // len(pairs[-1])
        grad_z = _pair_distance_backward(gradient, z.unflatten(0, (num_views, -1)), _Pairs(*pairs))
        grad_x = torch.ops.wmse.whiten_backward(grad_z.flatten(0, 1), z, w, u, ok, ctx.eps, ctx.backend)
        return _join_slices(grad_x, permutations, num_views), *[None] * 7


def _cut_slices(v: Tensor, permutations: Tensor, num_views: int, slice_size: int) -> Tensor:
    """v -> x: the same permutations of the images for every view, cut into slices."""
    views = v.view(num_views, -1, v.shape[1])
    return views.index_select(1, permutations.flatten()).view(-1, slice_size, v.shape[1])


def _join_slices(grad_x: Tensor, permutations: Tensor, num_views: int) -> Tensor:
    """Gradient at x -> at v, gathered by the inverse permutations.

    A fifth of the time of index_select's own backward, which adds row by row, and in an order of its own on a GPU.
    """
    size, (iterations, num_images) = grad_x.shape[-1], permutations.shape
    places = torch.arange(iterations * num_images, device=grad_x.device).view_as(permutations)
    inverse = torch.empty_like(permutations).scatter_(1, permutations, places)
    back = grad_x.view(num_views, -1, size).index_select(1, inverse.flatten())
    if iterations > 1:
        back = back.unflatten(1, (iterations, num_images)).sum(1)
    return back.view(-1, size)


class _Pairs(NamedTuple):
    """What the distances leave for their gradient."""

    inverse_norm: Tensor | None  # (num_views, S, M, 1); None where rows are not normalised
    total: Tensor  # (S, M, k), sum of the views
    weight: Tensor  # (S,), of the squares of a slice in the loss; 0 where it is not complete


def _pair_distance(z: Tensor, complete: Tensor, normalize: bool) -> tuple[Tensor, _Pairs]:
    """Mean distance over all pairs of views, images and (Euclidean) elements of the complete slices, in O(num_views).

    z: (num_views, S, M, k) -> scalar, 0 if no slice is complete. The squared differences of all pairs of views of an image
    add up to num_views * sum_i |z_i - mean z|^2, which rounding never makes negative; for unit rows
    |u_i - u_j|^2 = 2 - 2 cos.
    """
    num_views, _, num_rows, size = z.shape
    inverse_norm, rows = None, z
    if normalize:
        inverse_norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min_(1e-12).reciprocal_()
        rows = z * inverse_norm
    total = rows.sum(0)
    squares = torch.sub(rows, total, alpha=1 / num_views).square_().flatten(2).sum(2).sum(0)
    terms = (num_views - 1) / 2 * num_rows * (1 if normalize else size)
    weight = complete / complete.sum(dtype=z.dtype).clamp_min_(1).mul_(terms)
    return torch.dot(squares, weight), _Pairs(inverse_norm, total, weight)


def _pair_distance_backward(gradient: Tensor, z: Tensor, pairs: _Pairs) -> Tensor:
    """At z_i a multiple of z_i - mean z; where rows are normalised, of the part of -mean u across u_i."""
    scale = (pairs.weight * gradient)[:, None, None].mul_(2)
    if pairs.inverse_norm is None:
        return torch.sub(z, pairs.total, alpha=1 / len(z)).mul_(scale)
    along = (z * pairs.total).sum(-1, keepdim=True).mul_(pairs.inverse_norm).mul_(pairs.inverse_norm)
    return torch.addcmul(pairs.total, z, along, value=-1).mul_(pairs.inverse_norm * scale.div_(-len(z)))
