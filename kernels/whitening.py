"""The whitening operation: it gives each slice of rows zero mean and identity covariance, using only the slice itself.

The whitening "standardise" is the exception: it gives each column variance 1 and leaves the columns correlated.

Shapes: x, z (B, M, k): B slices of M rows (one view of M images) of k-dimensional embeddings.
Ermolov et al., ICML 2021, section 3.2 and appendix; kernels/README.md has the mathematics.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import whitening_reference
from kernels.backends import BACKENDS, WHITENINGS, why_not
from kernels.torch_ops import Whiten


class WhiteningStatus(NamedTuple):
    """The outcome of the factorisation of each slice. The tensors are on the device of x and have no gradient."""

    ok: Tensor
    """(B,) bool; False if the slice has a non-finite value, or if its covariance is not positive definite to working
    precision (a constant column, linearly dependent columns). "standardise" accepts dependent columns."""
    min_pivot: Tensor
    """(B,) smallest pivot divided by the mean variance; 0 if the slice is not ok. The pivot of a column is its variance, given
    the columns before it (cholesky: squared diagonal element of the factor), given all others (zca), or alone (standardise)."""


def whiten(
    x: Tensor,
    *,
    whitening: str = "cholesky",
    eps: float = 0.0,
    backend: str = "auto",
    cholesky_float64: bool = False,
) -> Tensor:
    """Whiten each slice of x by its own covariance.

    x: (B, M, k) floating, M > k (M > 1 for "standardise"). Returns z (B, M, k) in float64 if x is float64, otherwise in
    float32. With A = (1 - eps) cov + eps mean(diag cov) I:

        "cholesky"     z = (x - mean) @ inv(L).T, where A = L @ L.T
        "zca"          z = (x - mean) @ inv(sqrt(A)), with the symmetric root
        "standardise"  z = (x - mean) / sqrt(diag A)

    cov has the divisor M - 1. The gradient includes that of mean and factor; there is no second derivative. A slice that is not
    ok (`WhiteningStatus`) gives z = 0 and a zero gradient, and does not affect other slices. The call never waits for the
    device. Autocast and TF32 settings have no effect.

    whitening: one of WHITENINGS; the paper uses "cholesky". "zca" fails if the smallest eigenvalue of A is below a share of
        2e-6 (float32) of a bound of the largest, see kernels/README.md.
    eps: shrinkage in [0, 1); the paper uses 0.
    backend: "auto" ("torch") or one of BACKENDS: "reference" is the definition, slice by slice; "torch" is batched
        torch.linalg; "triton" are kernels for NVIDIA GPUs, k up to 512, float32 and "cholesky" only.
    cholesky_float64: compute mean, covariance, factor and z in float64 and round them to float32; the gradient stays float32.
        Use it for embeddings whose covariance has a condition number above 1e5. Not available with "triton", nor with another
        whitening than "cholesky".
    Raises ValueError for a wrong shape, dtype or eps, and for a whitening or backend that does not exist or cannot whiten these
    slices.
    """
    return whiten_with_status(x, whitening=whitening, eps=eps, backend=backend, cholesky_float64=cholesky_float64)[0]


def whiten_with_status(
    x: Tensor,
    *,
    whitening: str = "cholesky",
    eps: float = 0.0,
    backend: str = "auto",
    cholesky_float64: bool = False,
) -> tuple[Tensor, WhiteningStatus]:
    """Whiten as `whiten` does; return z (B, M, k) and the status of each slice."""
    _check(x, whitening, eps)
    # Half-precision input is whitened in float32.
    x = x if x.dtype == torch.float64 else x.float()
    backend = choose_backend(backend, x, x.shape[-1], cholesky_float64, whitening)
    # The reference is differentiated by autograd, the other backends have their own backward.
    if backend == "reference":
        z, ok, min_pivot = whitening_reference.whiten(x, eps, cholesky_float64, whitening)
    else:
        z, ok, min_pivot = Whiten.apply(x, eps, cholesky_float64, backend)
    return z, WhiteningStatus(ok, min_pivot)


def choose_backend(
    backend: str,
    values: Tensor,
    size: int,
    cholesky_float64: bool,
    whitening: str = "cholesky",
) -> str:
    """Return the backend to use for slices in `size` dimensions, with the dtype and device of `values`.

    A whitening other than "cholesky" has one fast backend, which has the name of the whitening.
    Raises ValueError for a whitening or backend that does not exist, or that cannot whiten these slices.
    """
    if whitening not in WHITENINGS:
        raise ValueError(f"no whitening {whitening!r}; available: {', '.join(WHITENINGS)}")
    if whitening != "cholesky":
        if backend not in ("auto", "torch", "reference") or cholesky_float64:
            raise ValueError(
                f"whitening {whitening!r} has the backends auto, torch and reference, without cholesky_float64; got "
                f"backend {backend!r} and cholesky_float64 {cholesky_float64}"
            )
        return "reference" if backend == "reference" else whitening
    # The Triton kernels exist in float32 only.
    in_float64 = cholesky_float64 or values.dtype == torch.float64
    return "torch" if backend == "auto" else _able(backend, values.device.type, size, in_float64)


# The compiler calls this function while it traces, because it cannot trace the search for packages.
@torch.compiler.assume_constant_result
def _able(backend: str, device_type: str, size: int, in_float64: bool) -> str:
    """Return the backend. Raises ValueError if it does not exist or cannot whiten in `size` dimensions."""
    if backend not in BACKENDS:
        raise ValueError(f"no whitening backend {backend!r}; available: auto, {', '.join(BACKENDS)}")
    # The caller asked for this backend, so do not replace it silently.
    reason = why_not(backend, device_type, size, in_float64)
    if reason:
        raise ValueError(f"whitening backend {backend!r} {reason}; use backend='auto' or 'torch'")
    return backend


def _check(x: Tensor, whitening: str, eps: float) -> None:
    """Raise ValueError for a wrong shape, dtype or eps."""
    shape = tuple(x.shape)
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"whiten needs a floating-point x of shape (slices, rows, columns), got {x.dtype} {shape}")
    batch, num_rows, size = shape
    if not batch or not size:
        raise ValueError(f"whiten needs at least one slice and one column, got {shape}")
    # Standardising needs variances only.
    if whitening == "standardise" and num_rows < 2:
        raise ValueError("a slice of 1 row has no variance; use 2 rows or more")
    # A singular covariance has no inverse.
    if whitening != "standardise" and num_rows <= size:
        raise ValueError(
            f"a slice of {num_rows} rows cannot be whitened in {size} dimensions: the covariance of M rows has a rank of "
            f"at most M - 1, so it is singular; use more than {size} rows for each slice ({2 * size} in the paper)"
        )
    if not 0 <= eps < 1:
        raise ValueError(f"eps is the share of shrinkage and must lie in [0, 1), got {eps}")
