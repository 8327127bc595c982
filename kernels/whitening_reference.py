"""The definition of the whitening, slice by slice, differentiated by torch's own autograd: for tests and benchmarks.

Ermolov et al., "Whitening for Self-Supervised Representation Learning", ICML 2021, section 3.2.
"""

import torch
from torch import Tensor

from kernels.precision import full_float32


def whiten(x: Tensor, eps: float, cholesky_float64: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Whiten every slice of x by its own rows.

    x: (B, M, k) float32 or float64 -> z (B, M, k), ok (B,) bool, min_pivot (B,) float; see `kernels.whitening`.
    The backward is torch's: it follows the autocast and TF32 settings under which `backward()` is called.
    """
    with full_float32(x.device):
        slices = [_whiten_slice(rows.double() if cholesky_float64 else rows, eps, x.dtype) for rows in x.unbind(0)]
        z, ok, min_pivot = (torch.stack(parts) for parts in zip(*slices, strict=True))
    return z.to(x.dtype), ok, min_pivot.to(x.dtype)


def _whiten_slice(rows: Tensor, eps: float, input_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, size = rows.shape
    mean = rows.mean(0)
    centred = rows - mean
    covariance = centred.T @ centred / (num_rows - 1)
    if eps > 0:
        mean_variance = covariance.diagonal().mean()
        covariance = (1 - eps) * covariance + eps * mean_variance * torch.eye(
            size, dtype=rows.dtype, device=rows.device
        )
    lower, info = torch.linalg.cholesky_ex(covariance)
    pivots = lower.detach().diagonal().square()
    ok, min_pivot = judge_factor(pivots, covariance.detach(), rows.detach().sum(0), num_rows, info, input_dtype)
    z = torch.linalg.solve_triangular(lower, centred.T, upper=False).T
    if centred.requires_grad:  # behind a bad factor every gradient is NaN: this is the first place all of them pass
        centred.register_hook(lambda gradient: gradient if gradient is None else torch.where(ok, gradient, 0.0))
    return torch.where(ok, z, 0.0), ok, min_pivot


def judge_factor(
    pivots: Tensor, covariance: Tensor, total: Tensor, num_rows: int, info: Tensor, input_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Whether each Cholesky factor can be trusted -> ok (...) bool, min_pivot (...) float, 0 where not ok.

    pivots: (..., k), squared diagonal of the factor; covariance: (..., k, k) that was factored; total: (..., k), sum of the
    num_rows rows; info: (...), 0 where the factor was found; input_dtype: that of the rows, maybe narrower than the factor's.
    A pivot must stand above the rounding noise of its own variance, else a rank deficit passes by luck in about two of
    five slices, and above that of its column's rounded values, else a constant column passes as white noise. At M = 2k
    noise was at most 12 machine epsilons (k up to 256) and sound covariances of condition 1e6 had 44 and more; with M - k
    of a few rows the two overlap, and either mistake was seen. A non-finite
    row makes variances NaN or infinite, and no comparison with those holds; `info` alone may be 0 for them on a GPU.
    """
    resolution, input_noise = noise_coefficients(pivots.dtype, input_dtype)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    noise = (variance * resolution).addcmul_(total, total, value=input_noise / num_rows**2)
    ok = noise.div_(pivots).amax(-1).add_(info) < 1
    return ok, torch.where(ok, pivots.amin(-1) / variance.mean(-1), 0.0)


def noise_coefficients(factor_dtype: torch.dtype, input_dtype: torch.dtype) -> tuple[float, float]:
    """How much of a column's variance, and of its squared mean, a pivot must exceed to be more than rounding."""
    input_noise = (16 * torch.finfo(input_dtype).eps) ** 2
    return 16 * torch.finfo(factor_dtype).eps + input_noise, input_noise
