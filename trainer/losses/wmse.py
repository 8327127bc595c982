"""W-MSE: whiten the embeddings slice by slice, then pull the views of one image together.

REFERENCE section 1 (Ermolov et al., ICML 2021, equations 4-6). Shapes used below:
    v     (num_views * N, k)              embeddings, view-major: all of view 0, then view 1, ...
    rows  (iterations, num_views, N)      which row of v stands where, after each iteration's permutation of the images
    z     (iterations, num_views, slices, M, k)   whitened; slices = N / M, M = slice_size
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
) -> Tensor:
    """The W-MSE loss of v, a scalar in float32 (float64 if v is), whatever autocast says.

    v: (num_views * N, k) floating, view-major; N a multiple of slice_size, slice_size > k (2k in the paper).
    normalize: True: squared distance of L2-normalised rows, 2 - 2 cos, in 0..4; False: mean squared difference of the
        whitened rows. Both are means over iterations, images and pairs of views (False: and over the k elements).
    permutations: (iterations, N) int64, each row a permutation of the images, the same for every view; None draws
        one per iteration from `generator` (on the device of v; None: torch's default one).
    eps, backend: see `kernels.whitening.whiten`.

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
) -> tuple[Tensor, WhiteningStatus]:
    """As `wmse_loss`, and also returns the status of every slice that was whitened.

    status: ok and min_pivot of shape (iterations * num_views * slices,), in this order, the last index fastest.
    """
    _check(v, num_views, slice_size, iterations)
    num_images, size = v.shape[0] // num_views, v.shape[1]
    if permutations is None:
        permutations = draw_permutations(iterations, num_images, v.device, generator)
    elif permutations.shape != (iterations, num_images) or permutations.dtype != torch.int64:
        raise InputError(
            f"permutations must be int64 of shape (iterations, images) = ({iterations}, {num_images}), "
            f"got {permutations.dtype} {tuple(permutations.shape)}"
        )
    with torch.autocast(v.device.type, enabled=False):
        v = v if v.dtype == torch.float64 else v.float()
        first_rows = torch.arange(0, v.shape[0], num_images, device=v.device)
        rows = permutations[:, None, :] + first_rows[None, :, None]
        x = _PermuteRows.apply(v, rows.flatten(1)).view(-1, slice_size, size)
        z, status = whiten_with_status(x, eps=eps, backend=backend)
        z = z.view(iterations, num_views, -1, slice_size, size)
        complete = status.ok.view(iterations, num_views, -1).all(1)
        return MeanPairDistance.apply(z, complete, normalize), status


class _PermuteRows(torch.autograd.Function):
    """v (R, k), rows (iterations, R), each a permutation -> (iterations * R, k).

    Backward gathers by the inverse permutations: a fifth of the time of index_select's own backward, which adds row by row,
    and in an order of its own on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return v.index_select(0, rows.flatten())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        inverse = torch.empty_like(rows).scatter_(1, rows, torch.arange(rows.numel(), device=rows.device).view_as(rows))
        back = gradient.index_select(0, inverse.flatten())
        return (back if rows.shape[0] == 1 else back.view(*rows.shape, -1).sum(0)), None


class MeanPairDistance(torch.autograd.Function):
    """Mean distance over all pairs of views, images and (Euclidean) elements of the complete slices, in O(num_views).

    z: (iterations, num_views, slices, M, k), complete: (iterations, slices) bool, normalize: bool -> scalar, 0 if no
    slice is complete. The squared differences of all pairs of views of an image add up to
    num_views * sum_i |z_i - mean z|^2, which rounding never makes negative; for unit rows |u_i - u_j|^2 = 2 - 2 cos.
    Its gradient at z_i is a multiple of z_i - mean z, less its part along u_i where rows are normalised. Written out,
    that takes a third of the passes over z that autograd's backward takes.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, complete: Tensor, normalize: bool) -> Tensor:
        _, num_views, _, num_rows, size = z.shape
        inverse_norm = None
        if normalize:
            inverse_norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min_(1e-12).reciprocal_()
            z = z * inverse_norm
        deviation = z - z.mean(1, keepdim=True)
        terms = (num_views - 1) * num_rows * (1 if normalize else size) * complete.sum().clamp_min(1)
        weight = complete * 2 / terms.to(z.dtype)
        ctx.save_for_backward(z if normalize else None, inverse_norm, deviation, weight)
        images = deviation.flatten(3)
        return (torch.linalg.vecdot(images, images).sum(1) * weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # once_differentiable stays silent where `gradient` itself needs no gradient
            raise NotImplementedError("the W-MSE loss has no second derivative: call backward without create_graph")
        unit, inverse_norm, deviation, weight = ctx.saved_tensors
        scale = (2 * gradient * weight)[:, None, :, None, None]
        if unit is None:
            return deviation * scale, None, None
        along = (unit * deviation).sum(-1, keepdim=True)
        return torch.addcmul(deviation, unit, along, value=-1).mul_(inverse_norm * scale), None, None


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
