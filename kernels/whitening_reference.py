"""The definition of the whitening, slice by slice, for tests and benchmarks. torch's autograd differentiates it.

Ermolov et al., "Whitening for Self-Supervised Representation Learning", ICML 2021, section 3.2.
"""

import torch
from torch import Tensor

from kernels.precision import full_float32


def whiten(x: Tensor, eps: float, cholesky_float64: bool, whitening: str = "cholesky") -> tuple[Tensor, Tensor, Tensor]:
    """Whiten every slice of x (B, M, k), float32 or float64, by its own rows.

    Returns z (B, M, k), ok (B,) bool and min_pivot (B,) float; see `kernels.whitening`. The backward is torch's: it follows the
    autocast and TF32 settings under which `backward()` is called.
    """
    with full_float32(x.device):
        results = []
        for rows in x.unbind(0):
            rows = rows.double() if cholesky_float64 else rows
            results.append(_whiten_slice(rows, eps, x.dtype, whitening))
        z, ok, min_pivot = (torch.stack(tensors) for tensors in zip(*results, strict=True))
    return z.to(x.dtype), ok, min_pivot.to(x.dtype)


def _whiten_slice(rows: Tensor, eps: float, input_dtype: torch.dtype, whitening: str) -> tuple[Tensor, Tensor, Tensor]:
    """Whiten one slice (M, k); return z (M, k), ok () and min_pivot ()."""
    num_rows, size = rows.shape
    mean = rows.mean(0)
    # The mean belongs to the graph, so the gradient flows through it.
    centred = rows - mean
    covariance = centred.T @ centred / (num_rows - 1)
    if eps > 0:
        mean_variance = covariance.diagonal().mean()
        identity = torch.eye(size, dtype=rows.dtype, device=rows.device)
        covariance = (1 - eps) * covariance + eps * mean_variance * identity
    z, pivots, info = _APPLY[whitening](centred, covariance)
    total = rows.detach().sum(0)
    # The judgement takes no part in the gradient.
    ok, min_pivot = judge_factor(pivots.detach(), covariance.detach(), total, num_rows, info, input_dtype)
    # A failed factor makes every gradient NaN. All gradients pass through `centred`, so they are set to zero there.
    if centred.requires_grad:
        centred.register_hook(lambda gradient: gradient if gradient is None else torch.where(ok, gradient, 0.0))
    return torch.where(ok, z, 0.0), ok, min_pivot


# Each function takes the centred rows (M, k) and their covariance A (k, k). It returns z (M, k), the pivots (k,), and
# info (), which is 0 if A has the factor.


def _apply_cholesky(centred: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lower, info = torch.linalg.cholesky_ex(a)
    z = torch.linalg.solve_triangular(lower, centred.T, upper=False).T
    return z, lower.diagonal().square(), info


def _apply_zca(centred: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # eigh raises an error if a value is not finite. The gradient of its vectors needs eigenvalues that differ.
    is_finite = a.isfinite().all()
    identity = torch.eye(len(a), dtype=a.dtype, device=a.device)
    eigenvalues, vectors = torch.linalg.eigh(torch.where(is_finite, a, identity))
    w = vectors * eigenvalues.rsqrt() @ vectors.T
    # An eigenvalue must exceed the rounding noise of the largest one.
    resolution, _ = noise_coefficients(a.dtype, a.dtype)
    is_positive = eigenvalues[0] > resolution * eigenvalues[-1]
    info = ~(is_finite & is_positive)
    # The diagonal of W^2 = A^-1 holds the reciprocal variances of each column given all others.
    return centred @ w, w.square().sum(1).reciprocal(), info.to(torch.int32)


def _apply_standardise(centred: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    variance = a.diagonal()
    # A column without variance has pivot 0, which is never ok.
    return centred / variance.sqrt(), variance, torch.zeros((), dtype=torch.int32, device=a.device)


_APPLY = {"cholesky": _apply_cholesky, "zca": _apply_zca, "standardise": _apply_standardise}


def judge_factor(
    pivots: Tensor,
    covariance: Tensor,
    total: Tensor,
    num_rows: int,
    info: Tensor,
    input_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Decide whether each Cholesky factor can be trusted; return ok (...) bool and min_pivot (...) float, 0 if not ok.

    pivots: (..., k), squared diagonal of the factor.
    covariance: (..., k, k), the matrix that was factored.
    total: (..., k), sum of the num_rows rows.
    info: (...), 0 if the factorisation succeeded.
    input_dtype: dtype of the rows, which may be narrower than that of the factor.

    A pivot must exceed the rounding noise of its own variance; otherwise a rank-deficient covariance passes by chance in about
    two of five slices. It must also exceed the rounding noise of the values in its column; otherwise a constant column passes
    as white noise. At M = 2k the noise was at most 12 machine epsilons (k up to 256), and sound covariances with a condition
    number of 1e6 had at least 44. If M - k is only a few rows, the two ranges overlap, and both kinds of error were seen.

    A non-finite row makes variances NaN or infinite, and every comparison with those is false. `info` alone is not enough: it
    may be 0 for such rows on a GPU.
    """
    resolution, input_noise = noise_coefficients(pivots.dtype, input_dtype)
    # Noise of each pivot: a share of the variance of its column, and a share of its squared mean.
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    noise = (variance * resolution).addcmul_(total, total, value=input_noise / num_rows**2)
    # ok if every pivot exceeds its noise and info is 0: the largest ratio plus info must be less than 1.
    ok = noise.div_(pivots).amax(-1).add_(info) < 1
    min_pivot = pivots.amin(-1) / variance.mean(-1)
    return ok, torch.where(ok, min_pivot, 0.0)


def noise_coefficients(factor_dtype: torch.dtype, input_dtype: torch.dtype) -> tuple[float, float]:
    """Return the shares of a column's variance and of its squared mean that a pivot must exceed to be more than rounding."""
    # 16 machine epsilons leave a margin over the 12 that were measured, see `judge_factor`.
    input_noise = (16 * torch.finfo(input_dtype).eps) ** 2
    resolution = 16 * torch.finfo(factor_dtype).eps + input_noise
    return resolution, input_noise
