"""Helpers of the tests of the whitening: a definition, rows of a given condition, faulty rows, and measures of error."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

UNIT = 2.0**-24  # the largest relative error of one rounding to float32


def definition(x: Tensor, eps: float = 0.0) -> Tensor:
    """Whiten each slice as in the paper: z_i = W (x_i - mean), with W the inverse of the covariance's Cholesky factor."""
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
    """Return z = function(x) and the gradient of sum(z * grad_z) with respect to x."""
    x = x.detach().clone().requires_grad_()
    z = function(x)
    return z.detach(), torch.autograd.grad(z, x, grad_z.to(z.dtype))[0]


def rows_of_condition(
    batch: int, num_rows: int, size: int, condition: float, scale: float = 1.0, seed: int = 0
) -> Tensor:
    """Return (batch, num_rows, size) float64 rows whose population covariance has the given condition number."""
    generator = torch.Generator().manual_seed(seed)
    white, rotation = (torch.randn(batch, n, size, dtype=torch.float64, generator=generator) for n in (num_rows, size))
    deviations = torch.logspace(0, 0.5, size, base=condition, dtype=torch.float64)
    return scale * (white * deviations) @ torch.linalg.qr(rotation).Q


def random_like(x: Tensor, seed: int = 0) -> Tensor:
    # another seed than in rows_of_condition, so that the two are not parallel
    generator = torch.Generator().manual_seed(-1 - seed)
    return torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative to the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def assert_as_good_as_plain_float32(
    function: Callable[[Tensor, float], Tensor], x: Tensor, eps: float = 0.0, *, seed: int = 0, drawn: bool = False
) -> None:
    """Check that the errors (norms) of value and gradient are at most twice those of the definition in plain float32.

    function: (x, eps) -> z. x (B, M, k) is rounded to float32 first, so that the exact result, the definition in float64 with
    torch's backward, has the same rows. Two roundings of x are allowed in addition, because a tiny case may be exact by
    chance.

    drawn: x is one of many random cases. Along the worst conditioned direction an error is one random number, so the error of
    plain float32 is sometimes small by chance. The bound then uses the largest error over three orders of the rows, and
    allows in addition the effect of one rounding of the covariance, UNIT * condition. This is the condition of the
    correlation, because the scales of the columns do not matter.

    Of 5,000 cases of the torch backend with conditions up to 1e6 and at least 8 rows more than columns, 6 values and 11
    gradients needed this addition, and at most 0.3 of it. With one order and without the addition, 12 values and 26 gradients
    of 2,000 failed. The usual error is 0.04 (value) and 0.08 (gradient) of UNIT * condition.
    """
    x = x.float()
    grad_z = random_like(x, seed)
    exact = value_and_gradient(lambda x: definition(x, eps), x.double(), grad_z)
    ours = value_and_gradient(lambda x: function(x, eps), x, grad_z)
    worst = _errors_of_plain_float32(x, grad_z, eps, exact, 3 if drawn else 1)
    # The gradient may cancel (it is 0 for k=1, M=2), so the size of its roundings is that of its term G W.
    w = torch.linalg.inv(torch.linalg.cholesky(shrunk_covariance(x.double(), eps)))
    eigenvalues = correlation_eigenvalues(x.double(), eps)
    condition = (eigenvalues[:, -1] / eigenvalues[:, 0]).max()
    sizes = exact[0].norm(), (grad_z.double() @ w).norm()
    roundings = 2 * (x.double().abs() @ w.abs().mT).norm() / exact[0].norm() + drawn * condition
    for name, actual, truth, plain, size in zip(("z", "gradient"), ours, exact, worst, sizes, strict=True):
        assert actual.dtype == torch.float32
        allowed = 2 * plain + (UNIT * roundings * size).item()
        error = (actual - truth).norm().item()
        assert error <= allowed, f"{name}: error {error:.2e}, plain {plain:.2e}, allowed {allowed:.2e} of {size:.2e}"


def _errors_of_plain_float32(
    x: Tensor, grad_z: Tensor, eps: float, exact: tuple[Tensor, Tensor], orders: int
) -> tuple[float, float]:
    """Return the largest errors of value and gradient in plain float32 over several orders of the rows."""
    generator = torch.Generator().manual_seed(0)
    worst = (0.0, 0.0)
    for number in range(orders):
        order = torch.randperm(x.shape[1], generator=generator) if number else torch.arange(x.shape[1])
        try:
            plain = value_and_gradient(lambda x: definition(x, eps), x[:, order], grad_z[:, order])
        except torch.linalg.LinAlgError:  # for example with one row more than columns: then there is no bound
            return math.inf, math.inf
        errors = [(a - truth[:, order]).norm().item() for a, truth in zip(plain, exact, strict=True)]
        worst = max(worst[0], errors[0]), max(worst[1], errors[1])
    return worst


def shrunk_covariance(x: Tensor, eps: float) -> Tensor:
    """Return the shrunk covariance of each slice, (B, k, k)."""
    centred = x - x.mean(1, keepdim=True)
    covariance = centred.mT @ centred / (x.shape[1] - 1)
    mean_variance = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return (1 - eps) * covariance + eps * mean_variance * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)


def correlation_eigenvalues(x: Tensor, eps: float) -> Tensor:
    """Return the ascending eigenvalues (B, k) of the shrunk covariances, with each column scaled to variance 1."""
    covariance = shrunk_covariance(x, eps)
    deviations = covariance.diagonal(dim1=1, dim2=2).sqrt()
    return torch.linalg.eigvalsh(covariance / deviations[:, :, None] / deviations[:, None, :])


# (fault, eps) of rows whose covariance has no Cholesky factor. Shrinkage would make the last two positive definite.
FAULTS = [(fault, eps) for fault in ("nan", "inf", "-inf", "1e30") for eps in (0.0, 0.1)] + [
    ("constant", 0.0),
    ("dependent", 0.0),
]


def spoil(rows: Tensor, fault: str) -> None:
    """Put a fault of FAULTS into rows, in place."""
    if fault == "constant":
        rows[:, 2] = 3.7
    elif fault == "dependent":
        rows[:, 2] = 1.7 * rows[:, 5]
    else:
        rows[4, 2] = float(fault)
