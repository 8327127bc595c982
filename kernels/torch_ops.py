"""The whitening as torch sees it: two custom operators and the autograd function that joins them.

torch.compile keeps each operator whole, so a backend's float32 guard also holds in a compiled graph, and autograd sees one
node. They are registered by the dispatcher's plain interface: `torch.library.custom_op` costs 60 us more a call on a
CPU, as much as two of the products.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import whitening_torch


def _backend(name: str) -> Any:
    """The module whose `forward` and `backward` are meant."""
    if name == "triton":
        from kernels import whitening_triton  # loads triton, which machines without a GPU may lack

        return whitening_triton
    return whitening_torch


class Whiten(torch.autograd.Function):
    """x (B, M, k), eps, cholesky_float64, backend -> z (B, M, k), ok (B,), min_pivot (B,); see `kernels.whitening`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, cholesky_float64: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        z, w, u, ok, min_pivot = torch.ops.wmse.whiten(x, eps, cholesky_float64, backend)
        ctx.eps, ctx.backend = eps, backend
        ctx.save_for_backward(z, w, u, ok)
        ctx.mark_non_differentiable(ok, min_pivot)
        ctx.set_materialize_grads(False)
        return z, ok, min_pivot

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor | None, *_: None) -> tuple[Tensor | None, None, None, None]:
        if torch.is_grad_enabled():  # once_differentiable stays silent where `grad_z` itself needs no gradient
            raise NotImplementedError(
                f"backend {ctx.backend!r} of the whitening has no second derivative: call backward without create_graph, "
                "or use backend='reference'"
            )
        if grad_z is None:
            return None, None, None, None
        return torch.ops.wmse.whiten_backward(grad_z, *ctx.saved_tensors, ctx.eps, ctx.backend), None, None, None


def _forward(x: Tensor, eps: float, cholesky_float64: bool, backend: str) -> tuple[Tensor, ...]:
    """-> z (B, M, k), W (B, k, k), U (B, k, k) or empty where the backward does without, ok (B,), min_pivot (B,)."""
    return _backend(backend).forward(x, eps, cholesky_float64)


def _backward(grad_z: Tensor, z: Tensor, w: Tensor, u: Tensor, ok: Tensor, eps: float, backend: str) -> Tensor:
    return _backend(backend).backward(grad_z, z, w, u, ok, eps)


def _fake_forward(x: Tensor, eps: float, cholesky_float64: bool, backend: str) -> tuple[Tensor, ...]:
    batch, num_rows, size = x.shape
    z, w = x.new_empty(batch, num_rows, size), x.new_empty(batch, size, size)
    u = torch.empty_like(w) if backend == "triton" and eps > 0 else x.new_empty(0)
    return z, w, u, x.new_empty(batch, dtype=torch.bool), x.new_empty(batch)


def _fake_backward(grad_z: Tensor, z: Tensor, w: Tensor, u: Tensor, ok: Tensor, eps: float, backend: str) -> Tensor:
    return torch.empty_like(z)


_library = torch.library.Library("wmse", "FRAGMENT")
_library.define(
    "whiten(Tensor x, float eps, bool cholesky_float64, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "whiten_backward(Tensor grad_z, Tensor z, Tensor w, Tensor u, Tensor ok, float eps, str backend) -> Tensor"
)
_library.impl("whiten", _forward, "CompositeExplicitAutograd")
_library.impl("whiten_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("wmse::whiten", _fake_forward)
torch.library.register_fake("wmse::whiten_backward", _fake_backward)
