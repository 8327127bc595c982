"""The losses that are compared: the loop of the authors, and each backend of the whitening that can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kernels.backends import BACKENDS, backends_for, why_not

BASES = ("loop", "reference")  # every ratio is to these two: a benchmark without them has failed


def runnable_backends(device: torch.device) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names that run at full speed on the device, and why the others do not."""
    runnable = backends_for(device)
    reasons = {
        name: why_not(name, device.type, size=1, in_float64=False) or f"does not run at full speed on {device.type}"
        for name in BACKENDS
        if name not in runnable
    }
    return runnable, reasons


def drop_refusing(steps: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Call each once; remove from `steps` those that refuse the size or run out of memory, and return why."""
    refused = {}
    for name, step in list(steps.items()):
        try:
            step()
        except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
            if name in BASES:
                raise
            refused[name] = f"{type(error).__name__}: {error}"
            del steps[name]
    return refused


def loop_loss(v: Tensor, permutations: Tensor, *, num_views: int, slice_size: int) -> Tensor:
    """Compute W-MSE slice by slice and view by view, then pair by pair: the others are compared with this.

    v: (num_views * N, k), view-major; permutations: (iterations, N) int64 -> scalar; equals `wmse_loss` with
    normalize=True and eps=0. Raises torch's LinAlgError where a covariance is not positive definite.

    Structured as the authors' published code is: every slice of every view is gathered by its rows' indices, whitened by an
    explicit inverse of the Cholesky factor, and written by the same indices into an empty z; then each pair of views
    normalises both of its sides again. Where that code calls torch functions that are deprecated since, this one calls
    torch.linalg, and it makes the identity once, not in every slice: it is if anything the faster of the two.
    """
    num_images = v.shape[0] // num_views
    total = v.new_zeros(())
    for permutation in permutations:
        slices = permutation.view(-1, slice_size)
        z = loop_whiten(v, (images + view * num_images for images in slices for view in range(num_views)))
        for i in range(num_views):
            for j in range(i + 1, num_views):
                first, second = (z[view * num_images : (view + 1) * num_images] for view in (i, j))
                total = total + _pair_distance(first, second)
    return total / (len(permutations) * num_views * (num_views - 1) / 2)


def loop_whiten(v: Tensor, rows_of_slices: Iterable[Tensor]) -> Tensor:
    """Whiten as that loop does: v (rows, k), the rows of each slice (M,) int64 -> z as v."""
    identity = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)
    z = torch.empty_like(v)
    for rows in rows_of_slices:
        x = v[rows]
        centred = x - x.mean(0)
        lower = torch.linalg.cholesky(centred.T @ centred / (x.shape[0] - 1))
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        z[rows] = centred @ inverse.T
    return z


def _pair_distance(first: Tensor, second: Tensor) -> Tensor:
    """(N, k), (N, k) -> mean of 2 - 2 cos over the rows."""
    return 2 - 2 * (normalize(first, dim=1) * normalize(second, dim=1)).sum(1).mean()
