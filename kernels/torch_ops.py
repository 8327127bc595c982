"""The whitening as torch operations: two custom operators and the autograd function that joins them.

torch.compile treats each operator as a unit, so a backend's float32 guard also applies in a compiled graph, and autograd sees a
single node. The operators are registered through the dispatcher's low-level interface, because `torch.library.custom_op` adds
60 us to each call on a CPU, as much as two of the matrix products.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kernels import whitening_standardise, whitening_torch, whitening_zca

# B M k^2 up to which one CPU thread is faster than several: at 4 slices of 128 x 64 the loss took 1.4 times as long on two
# threads, because its operations are shorter than a thread takes to wake. At 16 such slices it took 0.8 times as long.
_ONE_THREAD_WORK = 8e6

_MODULES = {"torch": whitening_torch, "zca": whitening_zca, "standardise": whitening_standardise}


def _backend(name: str) -> Any:
    """Return the module with `forward` and `backward` of a backend, or of a whitening that has only one backend."""
    if name.startswith("triton"):
        from kernels import whitening_triton  # loads triton, which machines without a GPU may lack

        return whitening_triton
    return _MODULES[name]


class Whiten(torch.autograd.Function):
    """The autograd node: x (B, M, k), eps, cholesky_float64, backend -> z (B, M, k), ok (B,), min_pivot (B,).

    `kernels.whitening` describes the arguments and results.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, cholesky_float64: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        """Whiten x and keep what the backward needs."""
        z, w, u, ok, min_pivot = torch.ops.wmse.whiten(x, eps, cholesky_float64, backend)
        ctx.eps = eps
        ctx.backend = backend
        # x is not saved: the backward needs only the results.
        ctx.save_for_backward(z, w, u, ok)
        ctx.mark_non_differentiable(ok, min_pivot)
        # Without this, torch would allocate zeros for a missing gradient.
        ctx.set_materialize_grads(False)
        return z, ok, min_pivot

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor | None, *_: None) -> tuple[Tensor | None, None, None, None]:
        """Return the gradient at x, and None for the other arguments. Raises NotImplementedError under create_graph."""
        # torch's once_differentiable would raise no error if `grad_z` itself needs no gradient.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"backend {ctx.backend!r} of the whitening has no second derivative: call backward without create_graph, "
                "or use backend='reference'"
            )
        # z was not used, so nothing flows back.
        if grad_z is None:
            return None, None, None, None
        grad_x = torch.ops.wmse.whiten_backward(grad_z, *ctx.saved_tensors, ctx.eps, ctx.backend)
        return grad_x, None, None, None


def _forward(x: Tensor, eps: float, cholesky_float64: bool, backend: str) -> tuple[Tensor, ...]:
    """Return z (B, M, k), W (B, k, k), U (B, k, k) or empty if the backward does not need it, ok (B,), min_pivot (B,)."""
    with enough_threads(x):
        more = {"factor_warps": 4} if backend == "triton_4_warps" else {}
        return _backend(backend).forward(x, eps, cholesky_float64, **more)


def _backward(grad_z: Tensor, z: Tensor, w: Tensor, u: Tensor, ok: Tensor, eps: float, backend: str) -> Tensor:
    """Return the gradient at x (B, M, k)."""
    with enough_threads(z):
        return _backend(backend).backward(grad_z, z, w, u, ok, eps)


def enough_threads(slices: Tensor) -> AbstractContextManager[None]:
    """Return a context that computes on one CPU thread if the slices (B, M, k), or (B M, k), are too few for several."""
    work = slices.numel() * slices.shape[-1]
    if torch.compiler.is_compiling() or slices.device.type != "cpu" or work > _ONE_THREAD_WORK:
        return nullcontext()
    return _one_thread() if torch.get_num_threads() > 1 else nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # takes less than 1 us
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fake_forward(x: Tensor, eps: float, cholesky_float64: bool, backend: str) -> tuple[Tensor, ...]:
    """Return empty tensors with the shapes and types of `_forward`'s results, for torch.compile."""
    batch, num_rows, size = x.shape
    z = x.new_empty(batch, num_rows, size)
    w = x.new_empty(batch, size, size)
    # Compiled graphs rely on these shapes, so they must be those of the results.
    keeps_u = backend == "zca" or (backend.startswith("triton") and eps > 0)
    u = torch.empty_like(w) if keeps_u else x.new_empty(0)
    ok = x.new_empty(batch, dtype=torch.bool)
    min_pivot = x.new_empty(batch)
    return z, w, u, ok, min_pivot


def _fake_backward(grad_z: Tensor, z: Tensor, w: Tensor, u: Tensor, ok: Tensor, eps: float, backend: str) -> Tensor:
    """Return an empty tensor with the shape and type of `_backward`'s result, for torch.compile."""
    return torch.empty_like(z)


# Declare the operators wmse::whiten and wmse::whiten_backward, then register their implementations.
_library = torch.library.Library("wmse", "FRAGMENT")
_library.define(
    "whiten(Tensor x, float eps, bool cholesky_float64, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "whiten_backward(Tensor grad_z, Tensor z, Tensor w, Tensor u, Tensor ok, float eps, str backend) -> Tensor"
)
_library.impl("whiten", _forward, "CompositeExplicitAutograd")
_library.impl("whiten_backward", _backward, "CompositeExplicitAutograd")
# torch.compile traces with these instead of running the kernels.
torch.library.register_fake("wmse::whiten", _fake_forward)
torch.library.register_fake("wmse::whiten_backward", _fake_backward)
