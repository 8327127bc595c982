"""W-MSE loss: whitens the embeddings slice by slice, then measures the distance between the views of an image.

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
from trainer.precision import at_least_float32

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
    whitening: str = "cholesky",
) -> Tensor:
    """Compute the W-MSE loss of v, a scalar in float32 (float64 if v is), inside and outside of autocast.

    v: (num_views * N, k) floating, view-major; N a multiple of slice_size, slice_size > k (2k in the paper);
        slice_size > 1 with whitening="standardise".
    normalize: True: squared distance of L2-normalised rows, 2 - 2 cos, in 0..4. False: squared difference of the whitened
        rows, averaged over the k elements. Both are averaged over iterations, images and pairs of views.
    permutations: (iterations, N) int64, each row a permutation of the images, the same for every view. None: drawn from
        `generator`, which is on the device of v (None: torch's default generator).
    eps, backend, cholesky_float64, whitening: see `kernels.whitening.whiten`.

    If the whitening of a slice fails in any view, the images of the slice do not count in the mean of that iteration. If
    all slices fail, the loss is 0 and its gradient is zero. Raises InputError for sizes that do not fit.
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
        whitening=whitening,
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
    whitening: str = "cholesky",
) -> tuple[Tensor, WhiteningStatus]:
    """Compute `wmse_loss`, and return it with the status of every slice.

    The status has ok and min_pivot of shape (num_views * iterations * N / M,): by view, then iteration, then slice.
    """
    _check(v, num_views, slice_size, iterations, whitening)
    num_images = v.shape[0] // num_views
    # The trainer passes permutations of the seed; a caller without them gets random ones.
    if permutations is None:
        permutations = draw_permutations(iterations, num_images, v.device, generator)
    elif permutations.shape != (iterations, num_images) or permutations.dtype != torch.int64:
        raise InputError(
            f"permutations must be int64 of shape (iterations, images) = ({iterations}, {num_images}), "
            f"got {permutations.dtype} {tuple(permutations.shape)}"
        )
    with without_autocast(v.device):
        v = at_least_float32(v)
        backend = choose_backend(backend, v, v.shape[1], cholesky_float64, whitening)
        if backend == "reference":
            return _reference_loss(v, permutations, num_views, slice_size, normalize, eps, cholesky_float64, whitening)
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
    whitening: str,
) -> tuple[Tensor, WhiteningStatus]:
    """Compute the loss by its definition, with a tensor for each pair of views and torch's gradient.

    This is the reference for tests and benchmarks."""
    # Whiten each slice of the permuted images.
    size = v.shape[1]
    permuted = v.view(num_views, -1, size)[:, permutations.flatten()]
    x = permuted.reshape(-1, slice_size, size)
    z, status = whiten_with_status(
        x, whitening=whitening, eps=eps, backend="reference", cholesky_float64=cholesky_float64
    )
    views = z.view(num_views, -1, slice_size, size)
    if normalize:
        views = torch.nn.functional.normalize(views, dim=-1)
    # Distances of all pairs of views.
    pairs = [(views[i] - views[j]).square() for i in range(num_views) for j in range(i)]
    squares = torch.stack(pairs)
    distances = squares.sum(-1) if normalize else squares.mean(-1)  # (pairs, S, M)
    # Average over the slices that could be whitened in every view.
    complete = status.ok.view(num_views, -1).all(0)
    of_slices = torch.where(complete, distances.mean((0, 2)), 0.0)
    return of_slices.sum() / complete.sum().clamp_min(1), status


def draw_permutations(
    iterations: int, num_images: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw a random permutation of the images for each iteration, (iterations, num_images) int64."""
    orders = [torch.randperm(num_images, generator=generator, device=device) for _ in range(iterations)]
    return torch.stack(orders)


def _check(v: Tensor, num_views: int, slice_size: int, iterations: int, whitening: str) -> None:
    """Raise InputError for sizes that do not fit, and warn if slices are short."""
    if v.dim() != 2 or not v.is_floating_point():
        raise InputError(f"v must be floating of shape (num_views * images, embedding), got {v.dtype} {tuple(v.shape)}")
    if num_views < 2 or iterations < 1:
        raise InputError(
            f"num_views is {num_views} and iterations {iterations}: W-MSE needs at least 2 views and 1 iteration"
        )
    num_rows, size = v.shape
    if num_rows % num_views:
        raise InputError(
            f"v has {num_rows} rows, which num_views={num_views} does not divide: give all views of each image"
        )
    # Standardising needs variances only.
    if whitening == "standardise" and slice_size < 2:
        raise InputError(f"slice_size={slice_size} has no variance; set slice_size to 2 or more")
    if whitening != "standardise" and slice_size <= size:
        raise InputError(
            f"slice_size={slice_size} gives a singular covariance for embeddings of size {size}; "
            f"set slice_size above {size}; the paper uses {2 * size}"
        )
    # Name the nearest possible numbers of images.
    num_images = num_rows // num_views
    if num_images % slice_size or num_images == 0:
        below = num_images // slice_size * slice_size
        nearest = [str(n) for n in (below, below + slice_size) if n > 0]
        raise InputError(
            f"{num_images} images cannot be cut into slices of slice_size={slice_size}; "
            f"use {' or '.join(nearest)} images, or another slice_size"
        )
    if whitening != "standardise" and slice_size < 2 * size:
        _warn_of_short_slices(slice_size, size)


# The compiler runs this function while it traces, because it cannot trace a log record.
@torch.compiler.assume_constant_result
def _warn_of_short_slices(slice_size: int, size: int) -> None:
    _warn_once(
        f"slice_size={slice_size} is below twice the embedding size {size}: the whitening is badly conditioned; "
        f"the paper uses {2 * size}"
    )


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning(message)
