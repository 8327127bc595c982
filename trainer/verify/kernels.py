"""Group `kernels`: every kernel equals its definition on this machine, at several sizes and conditions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from kernels.backends import WHITENINGS, why_not
from kernels.whitening import whiten, whiten_with_status
from trainer.config.schema import OptimizerConfig
from trainer.optimizer import build_optimizer, update
from trainer.verify import plain
from trainer.verify.check import EXACT, Item, Measured, Place, SkipCheck, largest, relative_error

# Slices, rows, columns: small ones, one that does not fill the tiles of a kernel, and the sizes of the recipes.
_SIZES = ((2, 5, 2), (3, 70, 33), (4, 256, 128))
_INTERPRETED_SIZES = ((2, 5, 2), (1, 40, 17))
_CONDITION = 100.0
_FLOAT64 = 1e-9
_FLOAT32 = 1e-3  # the rounding of float32 times the condition, with a margin for the sums of 256 rows
_RATES = (0.5, 2.0, 0.1)


def kernels_items(place: Place) -> Iterator[Item]:
    """Yield the checks of kernels."""
    device = place.device
    for whitening in WHITENINGS:
        for backend in ("reference", "torch"):
            for eps in (0.0, 0.1):
                name = f"{whitening} by {backend}" + (f", eps {eps}" if eps else "")
                yield name, partial(_whitening, device, whitening, backend, eps, torch.float32)
        yield f"{whitening} by torch in float64", partial(_whitening, device, whitening, "torch", 0.1, torch.float64)
    yield "cholesky by torch, factor in float64", partial(_float64_factor, device)
    for eps in (0.0, 0.1):
        name = "cholesky by Triton" + (f", eps {eps}" if eps else "")
        yield name, partial(_whitening, device, "cholesky", "triton", eps, torch.float32)
    for backend in ("reference", "torch", "triton"):
        yield f"a slice that cannot be whitened, {backend}", partial(_failed_slice, device, backend)
    yield "LARS by Triton", partial(_lars, device)


def _require_triton(device: torch.device) -> None:
    """Raise SkipCheck if the Triton kernels cannot run here."""
    reason = why_not("triton", device.type, 1, in_float64=False)
    if reason:
        raise SkipCheck(f"Triton {reason}")


def _slices(batch: int, num_rows: int, size: int, condition: float = _CONDITION) -> Tensor:
    """Draw slices (B, M, k) in float64 whose covariances have about the given condition number, with a mean of 1."""
    generator = torch.Generator().manual_seed(size)
    white = torch.randn(batch, num_rows, size, dtype=torch.float64, generator=generator)
    rotation = torch.randn(batch, size, size, dtype=torch.float64, generator=generator)
    deviations = torch.logspace(0, 0.5, size, base=condition, dtype=torch.float64)
    return (white * deviations) @ torch.linalg.qr(rotation).Q + 1


def _whitening(
    device: torch.device, whitening: str, backend: str, eps: float, dtype: torch.dtype, condition: float = _CONDITION
) -> Measured:
    """Compare z and the gradient of sum(z * g) with the definition of the same rounded rows."""
    is_interpreted = backend == "triton" and device.type == "cpu"
    if backend == "triton":
        _require_triton(device)
    errors = []
    for batch, num_rows, size in _INTERPRETED_SIZES if is_interpreted else _SIZES:
        x = _slices(batch, num_rows, size, condition).to(device, dtype).requires_grad_()
        grad_z = _slices(batch, num_rows, size).flip(1).to(device, dtype)
        z = whiten(x, whitening=whitening, eps=eps, backend=backend)
        (gradient,) = torch.autograd.grad(z, x, grad_z)
        exact = x.detach().double().requires_grad_()
        expected = torch.stack([plain.whiten(rows, whitening, eps) for rows in exact])
        (exact_gradient,) = torch.autograd.grad(expected, exact, grad_z.double())
        errors += [relative_error(z, expected), relative_error(gradient, exact_gradient)]
    return Measured(largest(*errors), _FLOAT64 if dtype == torch.float64 else _FLOAT32)


def _float64_factor(device: torch.device) -> Measured:
    """Whiten float32 rows of condition 1e6: only a factor in float64 is as exact as this bound."""
    x = _slices(4, 128, 64, 1e6).float().to(device)
    z = whiten(x, backend="torch", cholesky_float64=True)
    expected = torch.stack([plain.whiten(rows) for rows in x.double()])
    return Measured(relative_error(z, expected), 1e-6)


def _failed_slice(device: torch.device, backend: str) -> Measured:
    """Spoil one of two slices: it must give zeros and a gradient of zeros, and not change a bit of the other slice."""
    if backend == "triton":
        _require_triton(device)
    x = _slices(2, 19, 17).float().to(device)
    spoiled = x.clone()
    spoiled[0, 4, 2] = float("nan")
    found = []
    for rows in (x, spoiled):
        leaf = rows.clone().requires_grad_()
        z, status = whiten_with_status(leaf, backend=backend)
        (gradient,) = torch.autograd.grad(z, leaf, torch.ones_like(z).cumsum(1))
        found.append((z.detach(), gradient, status.ok.tolist()))
    (z, gradient, _), (spoiled_z, spoiled_gradient, ok) = found
    if ok != [False, True]:
        raise ValueError(f"the status of the two slices is {ok}, expected [False, True]")
    zeros = torch.cat([spoiled_z[0], spoiled_gradient[0]]).abs().max().item()
    changes = [(spoiled_z[1] - z[1]).abs().max().item(), (spoiled_gradient[1] - gradient[1]).abs().max().item()]
    return Measured(largest(zeros, *changes), EXACT)


def _lars(device: torch.device) -> Measured:
    """Compare three updates with the formula, for tensors of more than one chunk, of odd sizes and of zeros."""
    _require_triton(device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (8193, 1), (8, 3, 3, 3), (7,), (4, 4)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    weights[-1].zero_()
    model = nn.ParameterList(weights).to(device).to(memory_format=torch.channels_last)
    config = OptimizerConfig(name="lars", backend="triton", weight_decay=1e-2)
    optimizer = build_optimizer(model, config, device)
    expected = [w.double() for w in weights]
    states: list[dict] = [{} for _ in weights]
    for rate in _RATES:
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        for number, (p, g) in enumerate(zip(model.parameters(), gradients, strict=True)):
            p.grad = torch.empty_like(p).copy_(g)
            expected[number] = plain.updated(config, expected[number], g.double(), states[number], rate)
        update(optimizer, rate, torch.tensor(False, device=device))
    pairs = zip(model.parameters(), expected, strict=True)
    return Measured(largest(*(relative_error(p, w) for p, w in pairs)), 1e-5)
