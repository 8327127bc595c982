"""All slices at once by batched torch.linalg, with the analytic backward. Runs on any device.

    x (B, M, k) --centre--> c --> cov (B, k, k) = c^T c / (M-1) = U^T U --> V = U^-1 --> z = c V     (U^T is the paper's L)

Forward and backward are two custom operators: torch.compile keeps them whole (so the float32 guard inside them also
holds in a compiled graph), and autograd sees one node that stores z and V.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.precision import full_float32
from kernels.whitening_reference import judge_factor


def whiten(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Whiten every slice of x by its own rows.

    x: (B, M, k) float32 or float64 -> z (B, M, k), ok (B,) bool, min_pivot (B,) float; see `kernels.whitening`.
    """
    z, _, _, ok, min_pivot = _forward(x, eps)
    return z, ok, min_pivot


@torch.library.custom_op("wmse::whiten", mutates_args=())
def _forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> z (B, M, k), inverse V (B, k, k), lower factor U^T (B, k, k), ok (B,), min_pivot (B,)."""
    with full_float32(x.device):
        mean = x.mean(1, keepdim=True)
        centred = x - mean
        covariance = torch.bmm(centred.mT, centred).div_(x.shape[1] - 1)
        if eps > 0:
            variance = covariance.diagonal(dim1=1, dim2=2)
            mean_variance = variance.mean(-1, keepdim=True)
            covariance.mul_(1 - eps)
            variance.add_(eps * mean_variance)
        # Inverted from the right: factor and inverse take 192 us instead of 234 (8 slices, k=64, one CPU thread).
        upper, info = torch.linalg.cholesky_ex(covariance, upper=True)
        ok, min_pivot = judge_factor(upper, covariance, mean.squeeze(1), info)
        # Right-hand sides of zero leave only 0, or NaN where the factor is, in the inverse and in z of a slice not ok.
        identity = torch.eye(x.shape[2], dtype=x.dtype, device=x.device) * ok[:, None, None]
        inverse = torch.linalg.solve_triangular(upper, identity, upper=True, left=False).contiguous()
        z = torch.bmm(centred, inverse).nan_to_num_(0.0)
        return z, inverse, upper.mT.contiguous(), ok, min_pivot


@_forward.register_fake
def _(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, num_rows, size = x.shape
    z = x.new_empty(batch, num_rows, size)
    factor = x.new_empty(batch, size, size)
    return z, factor, torch.empty_like(factor), x.new_empty(batch, dtype=torch.bool), x.new_empty(batch)


@torch.library.custom_op("wmse::whiten_backward", mutates_args=())
def _backward(grad_z: Tensor, z: Tensor, inverse: Tensor, lower: Tensor | None, ok: Tensor, eps: float) -> Tensor:
    """Gradient at x (B, M, k) from that at z; kernels/README.md derives it. lower is needed when eps > 0 only."""
    num_rows, size = z.shape[1:]
    with full_float32(z.device):
        half = z.new_ones(size, size).tril_()
        half.diagonal().fill_(0.5)
        triangle = torch.bmm(grad_z.mT, z).mul_(half)  # a product: tril_ of a batch takes three times as long on a CPU
        symmetric = triangle + triangle.mT
        inner = torch.baddbmm(grad_z, z, symmetric, alpha=-(1 - eps) / (num_rows - 1))
        grad_x = torch.bmm(inner, inverse.mT)
        if lower is not None:
            trace = (torch.bmm(inverse, symmetric) * inverse).sum((1, 2), keepdim=True)
            grad_x.baddbmm_(z, lower.mT * trace, alpha=-eps / (size * (num_rows - 1)))
        grad_x -= grad_x.mean(1, keepdim=True)
        return grad_x.masked_fill_(~ok[:, None, None], 0.0)


@_backward.register_fake
def _(grad_z: Tensor, z: Tensor, inverse: Tensor, lower: Tensor | None, ok: Tensor, eps: float) -> Tensor:
    return torch.empty_like(z)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, ...]) -> None:
    z, inverse, lower, ok, min_pivot = output
    ctx.eps = inputs[1]
    ctx.mark_non_differentiable(inverse, lower, ok, min_pivot)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(z, inverse, lower if ctx.eps > 0 else None, ok)


def _differentiate(ctx: Any, grad_z: Tensor | None, *_: None) -> tuple[Tensor | None, None]:
    if grad_z is None:
        return None, None
    z, inverse, lower, ok = ctx.saved_tensors
    return _backward(grad_z, z, inverse, lower, ok, ctx.eps), None


def _refuse_second_order(ctx: Any, *_: Tensor | None) -> None:
    raise NotImplementedError("the torch backend of the whitening has no second derivative; use backend='reference'")


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)
_backward.register_autograd(_refuse_second_order)
