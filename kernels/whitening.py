"""The whitening operation: each slice of rows leaves with zero mean and identity covariance, computed from itself.

Shapes: x, z (B, M, k): B slices of M rows (one view of M images) of k-dimensional embeddings.
Ermolov et al., ICML 2021, section 3.2 and appendix; kernels/README.md has the mathematics.
"""

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import whitening_reference
from kernels.backends import BACKENDS, fastest_backend, why_not
from kernels.torch_ops import Whiten

_logger = logging.getLogger(__name__)


class WhiteningStatus(NamedTuple):
    """How the factor of each slice went; on the device of x, without gradient.

    ok: (B,) bool, False where a slice has a non-finite value or a covariance that is not positive definite to working
        precision (a constant column, dependent columns).
    min_pivot: (B,) the smallest squared diagonal element of the Cholesky factor over the mean variance; 0 where not ok.
    """

    ok: Tensor
    min_pivot: Tensor


def whiten(x: Tensor, *, eps: float = 0.0, backend: str = "auto", cholesky_float64: bool = False) -> Tensor:
    """Whiten each slice of x with the inverse Cholesky factor of its own covariance.

    x: (B, M, k) floating, M > k. Returns z (B, M, k), float64 if x is, else float32: z = (x - mean) @ inv(L).T with
    (1 - eps) cov + eps mean(diag cov) I = L @ L.T and cov taken with divisor M - 1. Once differentiable; everything is,
    mean and factor included. A slice that is not ok (`WhiteningStatus`) gives z = 0 and passes a zero gradient, and
    leaves the others untouched. Never waits for the device. Autocast and TF32 settings have no effect.

    eps: shrinkage in [0, 1); the paper uses 0.
    backend: "auto" (the fastest by `kernels.backends`) or one of BACKENDS: "reference" is the definition, slice by slice,
        "torch" batched torch.linalg, "triton" kernels for NVIDIA GPUs, k up to 512, float32.
    cholesky_float64: mean, covariance, factor and z in float64, rounded to float32 afterwards; the gradient stays float32.
        Not with "triton". For embeddings whose covariance has a condition number above 1e5.
    Raises ValueError for a wrong shape, dtype, eps, or a backend that does not exist or cannot do it.
    """
    return whiten_with_status(x, eps=eps, backend=backend, cholesky_float64=cholesky_float64)[0]


def whiten_with_status(
    x: Tensor, *, eps: float = 0.0, backend: str = "auto", cholesky_float64: bool = False
) -> tuple[Tensor, WhiteningStatus]:
    """As `whiten`, and also returns what became of each slice -> z (B, M, k), status."""
    _check(x, eps)
    x = x if x.dtype == torch.float64 else x.float()
    backend = choose_backend(backend, x, tuple(x.shape), cholesky_float64)
    if backend == "reference":
        z, ok, min_pivot = whitening_reference.whiten(x, eps, cholesky_float64)
    else:
        z, ok, min_pivot = Whiten.apply(x, eps, cholesky_float64, backend)
    return z, WhiteningStatus(ok, min_pivot)


def choose_backend(backend: str, values: Tensor, shape: tuple[int, ...], cholesky_float64: bool) -> str:
    """The backend that `backend` means for slices of the given shape (B, M, k), of the dtype and device of `values`.

    Raises ValueError for one that does not exist or cannot do it.
    """
    in_float64 = cholesky_float64 or values.dtype == torch.float64
    return _choose(backend, values.device.type, *shape, in_float64)


@torch.compiler.assume_constant_result  # run by the compiler while it traces: it can trace neither records nor caches
def _choose(backend: str, device_type: str, batch: int, num_rows: int, size: int, in_float64: bool) -> str:
    return _chosen(backend, device_type, batch, num_rows, size, in_float64)


@functools.cache
def _chosen(backend: str, device_type: str, batch: int, num_rows: int, size: int, in_float64: bool) -> str:
    """The backend that is meant, once it is known to be able; "auto" is logged once for each size."""
    if backend == "auto":
        fastest = fastest_backend(device_type, batch, num_rows, size, in_float64)
        sizes = f"{batch} slices of {num_rows} x {size} on {device_type}"
        _logger.info("whitening: backend 'auto' takes %r for %s", fastest, sizes)
        return fastest
    if backend not in BACKENDS:
        raise ValueError(f"no whitening backend {backend!r}; available: auto, {', '.join(BACKENDS)}")
    reason = why_not(backend, device_type, size, in_float64)
    if reason:
        raise ValueError(f"whitening backend {backend!r} {reason}; use backend='auto' or 'torch'")
    return backend


def _check(x: Tensor, eps: float) -> None:
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"whiten wants floating x of shape (slices, rows, columns), got {x.dtype} {tuple(x.shape)}")
    batch, num_rows, size = x.shape
    if not batch or not size:
        raise ValueError(f"whiten wants one slice and one column at least, got {tuple(x.shape)}")
    if num_rows <= size:
        raise ValueError(
            f"a slice of {num_rows} rows cannot be whitened in {size} dimensions: the covariance of M rows has rank "
            f"M - 1 at most, so it is singular; use more than {size} rows a slice ({2 * size} in the paper)"
        )
    if not 0 <= eps < 1:
        raise ValueError(f"eps is the share of shrinkage and must lie in [0, 1), got {eps}")
