"""ZCA whitening: W is the symmetric inverse square root of the covariance. Runs on any device, by batched products alone.

kernels/README.md has the mathematics, the errors and the times.
"""

import functools
import math
from functools import partial

import torch
from torch import Tensor

from kernels import whitening_torch
from kernels.whitening_reference import noise_coefficients
from kernels.whitening_torch import Factor

_LARGEST_SCALE = 1.7  # below sqrt(3), at which the largest eigenvalue would become the smallest one and lose its digits


def _inverse_root(a: Tensor) -> Factor:
    """Return the factor of a (B, k, k) with W = a^(-1/2) and U = a^(1/2), by the coupled Newton-Schulz iteration.

    Y and Z start from a / norm and I. They converge to the roots of a / norm and of its inverse.
    """
    norm = _bound(a)
    y = a / norm
    z = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    identity = z
    step = z
    for scale in _scales(a.dtype):
        step = torch.baddbmm(identity, z, y, beta=1.5 * scale, alpha=-0.5 * scale**3)
        y = torch.bmm(y, step)
        z = torch.bmm(step, z)
    # The last step is near the identity if all eigenvalues have converged. NaN must fail as well.
    residual = (step - identity).abs().amax((1, 2))
    failed = ~(residual < 3 * math.sqrt(torch.finfo(a.dtype).eps))
    root = norm.sqrt()
    w = z.div_(root)
    # The diagonal of a^-1 = W^2 holds the reciprocal variances of each column given all others.
    pivots = w.square().sum(2).reciprocal_()
    return Factor(w, y.mul_(root), pivots, failed.to(torch.int32))


def _solve_lyapunov(product: Tensor, u: Tensor) -> Tensor:
    """Return H (B, k, k) with U H + H U = K U + U K^T, where K (B, k, k) is the product G^T Z.

    The sign of the block matrix [[U, Q], [0, -U]] is [[I, 2 H], [0, -I]] if Q is the right side. The same iteration as in
    the forward computes it, with the same number of steps, because U has the square roots of the eigenvalues of a.
    """
    identity = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device).expand_as(u)
    u = u / _bound(torch.bmm(u, u)).sqrt()
    q = torch.bmm(product, u)
    q = q + q.mT
    for scale in _scales(u.dtype):
        # The upper right block of the step of the block matrix: 3 s/2 Q - s^3/2 (U (U Q - Q U) + Q U^2).
        uq = torch.bmm(u, q)
        q = torch.baddbmm(q, u, uq - uq.mT, beta=1.5 * scale, alpha=-0.5 * scale**3)
        q = torch.baddbmm(q, uq.mT, u, alpha=-0.5 * scale**3)
        u = torch.bmm(u, torch.baddbmm(identity, u, u, beta=1.5 * scale, alpha=-0.5 * scale**3))
    return q.mul_(0.5)


def _bound(a: Tensor) -> Tensor:
    """Return a bound of the largest eigenvalue of a (B, k, k), as (B, 1, 1): the largest sum of the magnitudes in a row.

    It is at most sqrt(k) times the eigenvalue. Unlike the sum of squares it cannot overflow.
    """
    return a.abs().sum(2).amax(1)[:, None, None]


@functools.cache
def _scales(dtype: torch.dtype) -> tuple[float, ...]:
    """Return the scale s of each step x -> s x (3 - s^2 x^2) / 2, which acts on the roots x of all eigenvalues, in (0, 1].

    The scales bring every root to 1 that is above the square root of the resolution of `judge_factor`. They follow from the
    smallest root alone: a step maps the roots from x to 1 into a shorter range that ends at 1. Without scales (s = 1)
    float32 takes 21 steps instead of 11.
    """
    smallest = math.sqrt(noise_coefficients(dtype, dtype)[0])
    scales = []
    while 1 - smallest > torch.finfo(dtype).eps / 2:
        # The step maps `smallest` and 1 to the same value at the optimal scale.
        scale = min(_LARGEST_SCALE, math.sqrt(3 / (1 + smallest + smallest**2)))
        scales.append(scale)
        # A cut scale maps 1 to a value above 0.08, which may be the new smallest root.
        ends = [scale * x * (3 - (scale * x) ** 2) / 2 for x in (smallest, 1.0)]
        smallest = min(*ends, 1.0)
    return tuple(scales)


forward = partial(whitening_torch.forward, factorise=_inverse_root)
backward = partial(whitening_torch.backward, symmetrise=_solve_lyapunov)
