"""W-MSE: whiten the embeddings slice by slice, then pull the views of one image together.

REFERENCE section 1 (Ermolov et al., ICML 2021, equations 4-6). Shapes used below:
    v  (num_views * N, k)           embeddings, view-major: all of view 0, then view 1, ...
    z  (num_views, S, M, k)         whitened; S = iterations * N / M slices of each view, M = slice_size
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from kernels.whitening import WhiteningStatus, whiten_with_status
from trainer.errors import InputError

_logger = logging.getLogger(__name__)


def wmse_loss(
    v: Tensor,
    *,
    num_views: int,
    slice_size: int,
    iterations: int = 1,
    normalize: bool = True,
    permutations: Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 0.0,
    backend: str = "auto",
    float64_factor: bool = False,
) -> Tensor:
    """The W-MSE loss of v, a scalar in float32 (float64 if v is), whatever autocast says.

    v: (num_views * N, k) floating, view-major; N a multiple of slice_size, slice_size > k (2k in the paper).
    normalize: True: squared distance of L2-normalised rows, 2 - 2 cos, in 0..4; False: mean squared difference of the
        whitened rows. Both are means over iterations, images and pairs of views (False: and over the k elements).
    permutations: (iterations, N) int64, each row a permutation of the images, the same for every view; None draws
        one per iteration from `generator` (on the device of v; None: torch's default one).
    eps, backend, float64_factor: see `kernels.whitening.whiten`.

    Where the whitening of a slice fails in any view, its images are left out of the mean of that iteration; the loss is
    0, with zero gradient, if all fail. Raises InputError for sizes that do not fit.
    """
    return wmse_loss_with_status(
        v,
        num_views=num_views,
        slice_size=slice_size,
        iterations=iterations,
        normalize=normalize,
        permutations=permutations,
        generator=generator,
        eps=eps,
        backend=backend,
        float64_factor=float64_factor,
    )[0]


def wmse_loss_with_status(
    v: Tensor,
    *,
    num_views: int,
    slice_size: int,
    iterations: int = 1,
    normalize: bool = True,
    permutations: Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 0.0,
    backend: str = "auto",
    float64_factor: bool = False,
) -> tuple[Tensor, WhiteningStatus]:
    """As `wmse_loss`, and also returns the status of every slice that was whitened.

    status: ok and min_pivot of shape (num_views * iterations * N / M,), in this order, the last index fastest.
    """
    _check(v, num_views, slice_size, iterations)
    num_images = v.shape[0] // num_views
    if permutations is None:
        permutations = draw_permutations(iterations, num_images, v.device, generator)
    elif permutations.shape != (iterations, num_images) or permutations.dtype != torch.int64:
        raise InputError(
            f"permutations must be int64 of shape (iterations, images) = ({iterations}, {num_images}), "
            f"got {permutations.dtype} {tuple(permutations.shape)}"
        )
    with torch.autocast(v.device.type, enabled=False):
        v = v if v.dtype == torch.float64 else v.float()
        x = _CutSlices.apply(v, permutations, num_views, slice_size)
        z, status = whiten_with_status(x, eps=eps, backend=backend, float64_factor=float64_factor)
        complete = status.ok.view(num_views, -1).all(0)
        return MeanPairDistance.apply(z, complete, normalize), status


class _CutSlices(torch.autograd.Function):
    """v (num_views * N, k), permutations (iterations, N) of the images -> x (num_views * S, M, k).

    Backward gathers by the inverse permutations: a fifth of the time of index_select's own backward, which adds row by row,
    and in an order of its own on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, permutations: Tensor, num_views: int, slice_size: int) -> Tensor:
        ctx.num_views = num_views
        ctx.save_for_backward(permutations)
        views = v.view(num_views, -1, v.shape[1])
        return views.index_select(1, permutations.flatten()).view(-1, slice_size, v.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        _refuse_second_order()
        (permutations,) = ctx.saved_tensors
        iterations, num_images = permutations.shape
        places = torch.arange(iterations * num_images, device=gradient.device).view_as(permutations)
        inverse = torch.empty_like(permutations).scatter_(1, permutations, places)
        back = gradient.view(ctx.num_views, -1, gradient.shape[-1]).index_select(1, inverse.flatten())
        if iterations > 1:
            back = back.unflatten(1, (iterations, num_images)).sum(1)
        return back.view(-1, gradient.shape[-1]), None, None, None


class MeanPairDistance(torch.autograd.Function):
    """Mean distance over all pairs of views, images and (Euclidean) elements of the complete slices, in O(num_views).

    z: (num_views * S, M, k), complete: (S,) bool, normalize: bool -> scalar, 0 if no slice is complete. The squared
    differences of all pairs of views of an image add up to num_views * sum_i |z_i - mean z|^2, which rounding never makes
    negative; for unit rows |u_i - u_j|^2 = 2 - 2 cos. Its gradient at z_i is a multiple of z_i - mean z; where rows are
    normalised, of the part of -mean u across u_i. Written out, that takes a third of the passes over z that autograd's
    backward takes, and nothing of the size of z is saved but z itself.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, complete: Tensor, normalize: bool) -> Tensor:
        z = z.unflatten(0, (-1, len(complete)))
        num_views, _, num_rows, size = z.shape
        inverse_norm, rows = None, z
        if normalize:
            inverse_norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min_(1e-12).reciprocal_()
            rows = z * inverse_norm
        total = rows.sum(0)
        squares = torch.linalg.vector_norm(torch.sub(rows, total, alpha=1 / num_views), dim=(0, 2, 3)).square_()
        terms = (num_views - 1) / 2 * num_rows * (1 if normalize else size)
        weight = complete / complete.sum(dtype=z.dtype).clamp_min_(1).mul_(terms)
        ctx.save_for_backward(z, inverse_norm, total, weight)
        return torch.dot(squares, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _refuse_second_order()
        z, inverse_norm, total, weight = ctx.saved_tensors
        scale = (weight * gradient)[:, None, None].mul_(2)
        if inverse_norm is None:
            grad_z = torch.sub(z, total, alpha=1 / len(z)).mul_(scale)
        else:
            along = (z * total).sum(-1, keepdim=True).mul_(inverse_norm).mul_(inverse_norm)
            grad_z = torch.addcmul(total, z, along, value=-1).mul_(inverse_norm * scale.div_(-len(z)))
        return grad_z.flatten(0, 1), None, None


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():  # once_differentiable stays silent where the gradient itself needs no gradient
        raise NotImplementedError("the W-MSE loss has no second derivative: call backward without create_graph")


def draw_permutations(
    iterations: int, num_images: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """-> (iterations, num_images) int64, one random permutation of the images for each iteration."""
    return torch.stack([torch.randperm(num_images, generator=generator, device=device) for _ in range(iterations)])


def _check(v: Tensor, num_views: int, slice_size: int, iterations: int) -> None:
    if v.dim() != 2 or not v.is_floating_point():
        raise InputError(f"v must be floating of shape (num_views * images, embedding), got {v.dtype} {tuple(v.shape)}")
    if num_views < 2 or iterations < 1:
        raise InputError(f"W-MSE needs 2 views and 1 iteration or more, got {num_views} and {iterations}")
    num_rows, size = v.shape
    if num_rows % num_views:
        raise InputError(f"v has {num_rows} rows, not a multiple of num_views={num_views}")
    if slice_size <= size:
        raise InputError(
            f"slice_size={slice_size} gives a singular covariance for embeddings of size {size}; "
            f"set slice_size above {size}, best {2 * size}"
        )
    num_images = num_rows // num_views
    if num_images % slice_size or num_images == 0:
        below = num_images // slice_size * slice_size
        nearest = [str(n) for n in (below, below + slice_size) if n > 0]
        raise InputError(
            f"{num_images} images cannot be cut into slices of slice_size={slice_size}; "
            f"use {' or '.join(nearest)} images, or another slice_size"
        )
    if slice_size < 2 * size:
        _warn_of_short_slices(slice_size, size)


@torch.compiler.assume_constant_result  # run by the compiler while it traces, since it cannot trace a log record
def _warn_of_short_slices(slice_size: int, size: int) -> None:
    _warn_once(
        f"slice_size={slice_size} is below twice the embedding size {size}: the whitening is badly conditioned; "
        f"the paper uses {2 * size}"
    )


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning(message)
