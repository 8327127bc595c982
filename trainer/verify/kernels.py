"""Group `kernels`: every kernel equals its definition on this machine, at several sizes and conditions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from kernels.backends import WHITENINGS, why_no_kernels
from kernels.whitening import whiten, whiten_with_status
from trainer.config.schema import OptimizerConfig
from trainer.optimizer import build_optimizer, update
from trainer.verify import plain
from trainer.verify.check import (
    EXACT,
    Item,
    Measured,
    Place,
    SkipCheck,
    draw_normal,
    largest,
    largest_relative,
    relative_error,
)

# Slices, rows, columns: small ones, one that does not fill the tiles of a kernel, and the sizes of the recipes.
_SIZES: tuple[tuple[int, int, int], ...] = ((2, 5, 2), (3, 70, 33), (4, 256, 128))
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
                name = f"{whitening} by {backend}{_shown_eps(eps)}"
                yield name, partial(_whitening, device, whitening, backend, eps, torch.float32)
        yield f"{whitening} by torch in float64", partial(_whitening, device, whitening, "torch", 0.1, torch.float64)
    yield "cholesky by torch, factor in float64", partial(_float64_factor, device)
    for eps in (0.0, 0.1):
        name = f"cholesky by Triton{_shown_eps(eps)}"
        yield name, partial(_whitening, device, "cholesky", "triton", eps, torch.float32)
    for backend in ("reference", "torch", "triton"):
        yield f"a slice that cannot be whitened, {backend}", partial(_failed_slice, device, backend)
    yield "LARS by Triton", partial(_lars, device)


def _shown_eps(eps: float) -> str:
    return f", eps {eps}" if eps else ""


def _require_triton(device: torch.device) -> None:
    """Raise SkipCheck if the Triton kernels cannot run here."""
    # The same test decides which kernels a run may use.
    reason = why_no_kernels(device.type)
    if reason:
        raise SkipCheck(f"Triton {reason}")


def _slices(batch: int, num_rows: int, size: int, condition: float = _CONDITION) -> Tensor:
    """Draw slices (B, M, k) in float64 whose covariances have about the given condition number, with a mean of 1."""
    generator = torch.Generator().manual_seed(size)
    white = draw_normal(generator, batch, num_rows, size)
    rotation = torch.linalg.qr(draw_normal(generator, batch, size, size)).Q
    # The condition is a ratio of variances, so the deviations have the ratio of its root.
    deviations = torch.logspace(0, 0.5, size, base=condition, dtype=torch.float64)
    return (white * deviations) @ rotation + 1


def _whitening(
    device: torch.device,
    whitening: str,
    backend: str,
    eps: float,
    dtype: torch.dtype,
) -> Measured:
    """Compare z and the gradient of sum(z * g) with the definition of the same rounded rows."""
    sizes = _SIZES
    if backend == "triton":
        _require_triton(device)
        if device.type == "cpu":
            sizes = _INTERPRETED_SIZES
    pairs = []
    for batch, num_rows, size in sizes:
        drawn = _slices(batch, num_rows, size)
        x = drawn.to(device, dtype).requires_grad_()
        grad_z = drawn.flip(1).to(device, dtype)
        z = whiten(x, whitening=whitening, eps=eps, backend=backend)
        (gradient,) = torch.autograd.grad(z, x, grad_z)

        exact = x.detach().double().requires_grad_()
        expected = torch.stack([plain.whiten(rows, whitening, eps) for rows in exact])
        (exact_gradient,) = torch.autograd.grad(expected, exact, grad_z.double())
        pairs += [(z, expected), (gradient, exact_gradient)]
    bound = _FLOAT64 if dtype == torch.float64 else _FLOAT32
    return Measured(largest_relative(pairs), bound)


def _float64_factor(device: torch.device) -> Measured:
    """Whiten float32 rows of condition 1e6: only a factor in float64 is as exact as this bound."""
    # A condition of 1e6 uses up the digits of float32.
    x = _slices(4, 128, 64, condition=1e6).float().to(device)
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
        # Another weight for each row, so that rows cannot be exchanged.
        weights = torch.ones_like(z).cumsum(1)
        (gradient,) = torch.autograd.grad(z, leaf, weights)
        # Value and gradient of both slices, (2, 2, M, k).
        found.append(torch.stack([z.detach(), gradient], dim=1))
    ok = status.ok.tolist()  # of the spoiled slices
    if ok != [False, True]:
        raise ValueError(f"the status of the two slices is {ok}, expected [False, True]")
    before, after = found
    not_zero = after[0].abs().max().item()
    change = (after[1] - before[1]).abs().max().item()
    return Measured(largest(not_zero, change), EXACT)


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
    not_skipped = torch.tensor(False, device=device)
    expected = [w.double() for w in weights]
    states: list[dict] = [{} for _ in weights]
    for rate in _RATES:
        for number, p in enumerate(model.parameters()):
            g = torch.randn(shapes[number], generator=generator)
            # The gradient gets the memory layout of its weight, as in training.
            p.grad = torch.empty_like(p).copy_(g)
            expected[number] = plain.updated(config, expected[number], g.double(), states[number], rate)
        update(optimizer, rate, not_skipped)
    pairs = zip(model.parameters(), expected, strict=True)
    return Measured(largest_relative(pairs), 1e-5)
