"""The whitening operation: each slice of rows leaves with zero mean and identity covariance, computed from itself.

Shapes: x, z (B, M, k): B slices of M rows (one view of M images) of k-dimensional embeddings.
REFERENCE section 1 (Ermolov et al., ICML 2021, section 3.2 and appendix); kernels/README.md has the mathematics.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import whitening_reference, whitening_torch

_logger = logging.getLogger(__name__)

# A backend maps (x, eps), x float32 or float64 of shape (B, M, k), to (z, ok, min_pivot) as described below, and
# guards its own precision (`kernels.precision`).
BACKENDS: dict[str, Callable[[Tensor, float], tuple[Tensor, Tensor, Tensor]]] = {
    "reference": whitening_reference.whiten,
    "torch": whitening_torch.whiten,
}


class WhiteningStatus(NamedTuple):
    """How the factor of each slice went; on the device of x, without gradient.

    ok: (B,) bool, False where a slice has a non-finite value or a covariance that is not positive definite to working
        precision (a constant column, dependent columns).
    min_pivot: (B,) the smallest squared diagonal element of the Cholesky factor over the mean variance; 0 where not ok.
    """

    ok: Tensor
    min_pivot: Tensor


def whiten(x: Tensor, *, eps: float = 0.0, backend: str = "auto") -> Tensor:
    """Whiten each slice of x with the inverse Cholesky factor of its own covariance.

    x: (B, M, k) floating, M > k. Returns z (B, M, k), float64 if x is, else float32: z = (x - mean) @ inv(L).T with
    (1 - eps) cov + eps mean(diag cov) I = L @ L.T and cov taken with divisor M - 1. Once differentiable; everything is,
    mean and factor included. A slice that is not ok (`WhiteningStatus`) gives z = 0 and passes a zero gradient, and
    leaves the others untouched. Never waits for the device. Autocast and TF32 settings have no effect.

    eps: shrinkage in [0, 1); the paper uses 0. backend: "auto" or a key of BACKENDS.
    Raises ValueError for a wrong shape, dtype, eps or backend.
    """
    return whiten_with_status(x, eps=eps, backend=backend)[0]


def whiten_with_status(x: Tensor, *, eps: float = 0.0, backend: str = "auto") -> tuple[Tensor, WhiteningStatus]:
    """As `whiten`, and also returns what became of each slice -> z (B, M, k), status."""
    _check(x, eps, backend)
    chosen = _automatic_backend() if backend == "auto" else backend
    z, ok, min_pivot = BACKENDS[chosen](x if x.dtype == torch.float64 else x.float(), eps)
    return z, WhiteningStatus(ok, min_pivot)


@torch.compiler.assume_constant_result  # run by the compiler while it traces, since it cannot trace a log record
def _automatic_backend() -> str:
    _log_once("whitening: backend 'auto' takes 'torch'")
    return "torch"


@functools.cache
def _log_once(message: str) -> None:
    _logger.info(message)


def _check(x: Tensor, eps: float, backend: str) -> None:
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"whiten wants floating x of shape (slices, rows, columns), got {x.dtype} {tuple(x.shape)}")
    _, num_rows, size = x.shape
    if num_rows <= size:
        raise ValueError(
            f"a slice of {num_rows} rows cannot be whitened in {size} dimensions: the covariance of M rows has rank "
            f"M - 1 at most, so it is singular; use more than {size} rows a slice ({2 * size} in the paper)"
        )
    if not 0 <= eps < 1:
        raise ValueError(f"eps is the share of shrinkage and must lie in [0, 1), got {eps}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"no whitening backend {backend!r}; available: auto, {', '.join(BACKENDS)}")
