"""W-MSE: whiten the embeddings slice by slice, then pull the views of one image together.

Ermolov et al., "Whitening for Self-Supervised Representation Learning", ICML 2021, equations 4-6. Shapes used below:
    v  (num_views * N, k)           embeddings, view-major: all of view 0, then view 1, ...
    z  (num_views, S, M, k)         whitened; S = iterations * N / M slices of each view, M = slice_size
"""

import functools
import logging

import torch
from torch import Tensor

from kernels.precision import without_autocast
from kernels.whitening import WhiteningStatus, choose_backend, whiten_with_status
from trainer.errors import InputError
from trainer.losses.wmse_fused import FusedLoss

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
    cholesky_float64: bool = False,
) -> Tensor:
    """The W-MSE loss of v, a scalar in float32 (float64 if v is), whatever autocast says.

    v: (num_views * N, k) floating, view-major; N a multiple of slice_size, slice_size > k (2k in the paper).
    normalize: True: squared distance of L2-normalised rows, 2 - 2 cos, in 0..4; False: mean squared difference of the
        whitened rows. Both are means over iterations, images and pairs of views (False: and over the k elements).
    permutations: (iterations, N) int64, each row a permutation of the images, the same for every view; None draws
        one per iteration from `generator` (on the device of v; None: torch's default one).
    eps, backend, cholesky_float64: see `kernels.whitening.whiten`.

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
        cholesky_float64=cholesky_float64,
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
    cholesky_float64: bool = False,
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
    with without_autocast(v.device):
        v = v if v.dtype == torch.float64 else v.float()
        slices = (num_views * iterations * num_images // slice_size, slice_size, v.shape[1])
        backend = choose_backend(backend, v, slices, cholesky_float64)
        if backend == "reference":
            return _reference_loss(v, permutations, num_views, slice_size, normalize, eps, cholesky_float64)
        loss, ok, min_pivot = FusedLoss.apply(
            v, permutations, num_views, slice_size, normalize, eps, cholesky_float64, backend
        )
    return loss, WhiteningStatus(ok, min_pivot)


def _reference_loss(
    v: Tensor,
    permutations: Tensor,
    num_views: int,
    slice_size: int,
    normalize: bool,
    eps: float,
    cholesky_float64: bool,
) -> tuple[Tensor, WhiteningStatus]:
    """The definition, every slice and pair by itself, differentiated by torch: for tests and benchmarks."""
    size = v.shape[1]
    x = v.view(num_views, -1, size)[:, permutations.flatten()].reshape(-1, slice_size, size)
    z, status = whiten_with_status(x, eps=eps, backend="reference", cholesky_float64=cholesky_float64)
    views = z.view(num_views, -1, slice_size, size)
    if normalize:
        views = torch.nn.functional.normalize(views, dim=-1)
    pairs = torch.stack([(views[i] - views[j]).square() for i in range(num_views) for j in range(i)])
    distances = pairs.sum(-1) if normalize else pairs.mean(-1)  # (pairs, S, M)
    complete = status.ok.view(num_views, -1).all(0)
    kept = torch.where(complete, distances.mean((0, 2)), 0.0)
    return kept.sum() / complete.sum().clamp_min(1), status


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
