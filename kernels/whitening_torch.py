"""Whitening of all slices at once by batched torch.linalg, with an analytic backward. Runs on any device.

x (B, M, k) --centre--> c --> cov (B, k, k) = c^T c / (M-1) = L L^T --> W = L^-1 --> z = c W^T

`whitening_zca` and `whitening_standardise` use the same `forward` and `backward` with another W.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.precision import full_float32
from kernels.whitening_reference import judge_factor


class Factor(NamedTuple):
    """Factor of each covariance A (B, k, k), by which its slice is whitened."""

    w: Tensor
    """(B, k, k) matrix W with W A W^T = I, so that z = c W^T."""
    u: Tensor
    """(B, k, k) inverse of W^T, so that c = z U; empty if the backward does not need it."""
    pivots: Tensor
    """(B, k) variances that must exceed their rounding noise, see `judge_factor`."""
    info: Tensor
    """(B,) 0 if the factorisation succeeded."""


def cholesky(a: Tensor) -> Factor:
    """Factor a = L L^T (B, k, k), with W = L^-1."""
    w, info = _inverse_factor(a)
    # The diagonal of W is the reciprocal of that of L. The backward needs no U.
    pivots = w.diagonal(dim1=1, dim2=2).square().reciprocal_()
    return Factor(w, a.new_empty(0), pivots, info)


def _inverse_factor(a: Tensor) -> tuple[Tensor, Tensor]:
    """Factor a (B, k, k) = L L^T; return L^-1 (B, k, k) and info (B,) int32, 0 if a is positive definite.

    On a CPU torch passes one matrix after the other to LAPACK. Large matrices are therefore split into halves recursively,
    which turns most of the work into batched products. Factor and inverse then take half the time (32 slices, k = 128); at
    k = 64 nothing is gained.
    """
    # Sizes up to which one call of LAPACK is faster than splitting; many slices make splitting pay off earlier.
    size = a.shape[-1]
    leaf = 32 if a.shape[0] >= 16 else 64
    if size <= leaf or a.device.type != "cpu":
        # Inverting the upper factor from the right takes 192 us instead of 234 us (8 slices, k = 64, one CPU thread).
        upper, info = torch.linalg.cholesky_ex(a, upper=True)
        identity = _constants(size, a.dtype, a.device).identity.expand_as(a)
        return torch.linalg.solve_triangular(upper, identity, upper=True, left=False).mT, info
    # Invert the factor of the upper left block, then that of the Schur complement, and join both.
    h = size // 2
    first, first_info = _inverse_factor(a[:, :h, :h])
    # the upper right block of L^T
    corner = torch.bmm(first, a[:, :h, h:])
    complement = torch.baddbmm(a[:, h:, h:], corner.mT, corner, alpha=-1)
    last, last_info = _inverse_factor(complement)
    w = torch.zeros_like(a)
    w[:, :h, :h] = first
    w[:, h:, h:] = last
    below = torch.bmm(torch.bmm(last, corner.mT), first)
    w[:, h:, :h] = below.neg_()
    return w, first_info + last_info


def forward(
    x: Tensor, eps: float, cholesky_float64: bool, factorise: Callable[[Tensor], Factor] = cholesky
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Whiten x (B, M, k), float32 or float64, by the factor that `factorise` finds for the covariances.

    Returns z (B, M, k), W (B, k, k), U (B, k, k) or empty, ok (B,) and min_pivot (B,).
    """
    num_rows = x.shape[1]
    with full_float32(x.device):
        # Centre the rows and compute their covariance.
        rows = x.double() if cholesky_float64 else x
        total = rows.sum(1, keepdim=True)
        centred = torch.sub(rows, total, alpha=1 / num_rows)
        covariance = torch.bmm(centred.mT, centred).mul_(1 / (num_rows - 1))
        # Shrink the covariance towards a multiple of the identity, in place: `variance` is a view of its diagonal.
        if eps > 0:
            variance = covariance.diagonal(dim1=1, dim2=2)
            mean_variance = variance.mean(-1, keepdim=True)
            covariance.mul_(1 - eps)
            variance.add_(eps * mean_variance)
        w, u, pivots, info = factorise(covariance)
        # A failed factor may contain NaN, so z is overwritten where it failed.
        ok, min_pivot = judge_factor(pivots, covariance, total[:, 0], num_rows, info, x.dtype)
        z = torch.bmm(centred, w.mT)
        _zero_where_failed(ok, z)
        # With cholesky_float64 the results are rounded to the dtype of x.
        return (
            z.to(x.dtype),
            w.to(x.dtype),
            u.to(x.dtype),
            ok,
            min_pivot.to(x.dtype),
        )


def _zero_where_failed(ok: Tensor, values: Tensor) -> None:
    """Overwrite values (B, M, k) with 0 in the slices that are not ok."""
    # On a CPU, reading `ok` makes nothing wait, and it saves a pass over the values.
    if ok.device.type == "cpu" and ok.all():
        return
    values.masked_fill_(~ok[:, None, None], 0.0)


def symmetric_triangle(product: Tensor, _: Tensor) -> Tensor:
    """Return H = T + T^T (B, k, k), where T is the lower triangle of the product with half its diagonal."""
    half_triangle = _constants(product.shape[-1], product.dtype, product.device).half_triangle
    triangle = product.mul_(half_triangle)
    return triangle + triangle.mT


def backward(
    grad_z: Tensor,
    z: Tensor,
    w: Tensor,
    u: Tensor,
    ok: Tensor,
    eps: float,
    symmetrise: Callable[[Tensor, Tensor], Tensor] = symmetric_triangle,
) -> Tensor:
    """Return the gradient at x (B, M, k), given that at z and what `forward` returned; kernels/README.md derives it.

    symmetrise: (G^T Z, U) -> H (B, k, k), which belongs to the factor."""
    num_rows, size = z.shape[1:]
    with full_float32(z.device):
        symmetric = symmetrise(torch.bmm(grad_z.mT, z), u)
        # Gradient at the rows: (G - share * Z H) W.
        scale = (1 - eps) / (num_rows - 1)
        inner = torch.baddbmm(grad_z, z, symmetric, alpha=-scale)
        grad_x = torch.bmm(inner, w)
        # The shrinkage depends on the mean variance, which adds a multiple of the centred rows.
        if eps > 0:
            trace = (torch.bmm(symmetric, w) * w).sum((1, 2), keepdim=True)
            # Z = C W^T, so the centred rows C need not be stored.
            centred = torch.bmm(z, u) if u.numel() else torch.linalg.solve_triangular(w.mT, z, upper=True, left=False)
            eps_scale = eps / (size * (num_rows - 1))
            grad_x -= centred.mul_(trace * eps_scale)
        # The gradient through the mean removes the column means.
        grad_x.sub_(grad_x.sum(1, keepdim=True), alpha=1 / num_rows)
        _zero_where_failed(ok, grad_x)
        return grad_x


class _Constants(NamedTuple):
    """Constant matrices (k, k)."""

    identity: Tensor
    # 1 below the diagonal and 1/2 on it. On a CPU a product with it takes a third of the time of tril_ on a batch.
    half_triangle: Tensor


def _constants(size: int, dtype: torch.dtype, device: torch.device) -> _Constants:
    if device.type == "cpu":
        return _cached_constants(size, dtype)
    # Constants for a GPU are not cached: those created while a CUDA graph is captured would belong to the graph.
    return _make_constants(size, dtype, device)


@functools.cache
def _cached_constants(size: int, dtype: torch.dtype) -> _Constants:
    return _make_constants(size, dtype, torch.device("cpu"))


def _make_constants(size: int, dtype: torch.dtype, device: torch.device) -> _Constants:
    identity = torch.eye(size, dtype=dtype, device=device)
    half_triangle = torch.ones_like(identity).tril_() - identity / 2
    return _Constants(identity, half_triangle)
