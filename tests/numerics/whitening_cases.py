"""What the tests of the whitening share: its definition, rows of a given condition, faults, and measures of error."""

from collections.abc import Callable

import torch
from torch import Tensor


def definition(x: Tensor, eps: float = 0.0) -> Tensor:
    """Row by row as the paper writes it: z_i = W (x_i - mean), W the inverse of the covariance's Cholesky factor."""
    size = x.shape[2]
    slices = []
    for rows in x:
        covariance = torch.cov(rows.T).reshape(size, size)
        identity = torch.eye(size, dtype=x.dtype, device=x.device)
        shrunk = (1 - eps) * covariance + eps * covariance.diag().mean() * identity
        w = torch.linalg.inv(torch.linalg.cholesky(shrunk))
        slices.append((w @ (rows - rows.mean(0)).T).T)
    return torch.stack(slices)


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor, grad_z: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    z = function(x)
    return z.detach(), torch.autograd.grad(z, x, grad_z.to(z.dtype))[0]


def rows_of_condition(
    batch: int, num_rows: int, size: int, condition: float, scale: float = 1.0, seed: int = 0
) -> Tensor:
    """(batch, num_rows, size) float64 rows whose population covariance has the given condition number."""
    generator = torch.Generator().manual_seed(seed)
    white, rotation = (torch.randn(batch, n, size, dtype=torch.float64, generator=generator) for n in (num_rows, size))
    deviations = torch.logspace(0, 0.5, size, base=condition, dtype=torch.float64)
    return scale * (white * deviations) @ torch.linalg.qr(rotation).Q


def random_like(x: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed)).to(x.device)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


# Rows that no covariance can be factored of. Shrinkage would make the last two positive definite.
FAULTS = [(fault, eps) for fault in ("nan", "inf", "-inf", "1e30") for eps in (0.0, 0.1)] + [
    ("constant", 0.0),
    ("dependent", 0.0),
]


def spoil(rows: Tensor, fault: str) -> None:
    if fault == "constant":
        rows[:, 2] = 3.7
    elif fault == "dependent":
        rows[:, 2] = 1.7 * rows[:, 5]
    else:
        rows[4, 2] = float(fault)
