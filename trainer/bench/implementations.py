"""The losses to compare: the authors' loop, and each whitening backend that can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kernels.backends import BACKENDS, backends_for, why_not

BASES = ("loop", "reference")  # all ratios refer to these two, so a benchmark fails without them


def runnable_backends(device: torch.device) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the backends that run at full speed on the device, and {name: reason} of the others."""
    runnable = backends_for(device)
    reasons = {}
    for name in BACKENDS:
        if name not in runnable:
            reason = why_not(name, device.type, size=1, in_float64=False)
            reasons[name] = reason or f"does not run at full speed on {device.type}"
    return runnable, reasons


def drop_refusing(steps: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Call each step once. Remove those that refuse the size or run out of memory, and return {name: reason}."""
    refused = {}
    # Copy the items, because the loop deletes from the dict.
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
    """Compute the W-MSE loss slice by slice and pair by pair, as the baseline for the other implementations.

    v: (num_views * N, k), view-major; permutations: (iterations, N) int64 -> scalar. The result equals `wmse_loss` with
    normalize=True and eps=0. Raises torch's LinAlgError if a covariance is not positive definite.

    The structure is that of the authors' published code. It gathers every slice of every view by the indices of its rows,
    whitens it by an explicit inverse of the Cholesky factor, and writes it by the same indices into an empty z. Then each pair
    of views normalises both of its views again. Unlike that code, this function calls torch.linalg instead of deprecated
    functions, and builds the identity once instead of in every slice. Neither makes it slower.
    """
    num_images = v.shape[0] // num_views
    total = v.new_zeros(())
    for permutation in permutations:
        # The rows of every slice of every view; view d begins at row d * N.
        slices = permutation.view(-1, slice_size)
        rows = (images + view * num_images for images in slices for view in range(num_views))
        z = loop_whiten(v, rows)
        # Each pair of views anew, as in the authors' code.
        for i in range(num_views):
            for j in range(i + 1, num_views):
                first = z[i * num_images : (i + 1) * num_images]
                second = z[j * num_images : (j + 1) * num_images]
                total = total + _pair_distance(first, second)
    num_pairs = num_views * (num_views - 1) / 2
    return total / (len(permutations) * num_pairs)


def loop_whiten(v: Tensor, rows_of_slices: Iterable[Tensor]) -> Tensor:
    """Whiten slice by slice, as in `loop_loss`: v (rows, k), the rows of each slice (M,) int64 -> z (rows, k)."""
    identity = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)
    z = torch.empty_like(v)
    for rows in rows_of_slices:
        x = v[rows]
        # z = L^-1 (x - mean), with covariance = L L^T
        centred = x - x.mean(0)
        covariance = centred.T @ centred / (x.shape[0] - 1)
        lower = torch.linalg.cholesky(covariance)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        z[rows] = centred @ inverse.T
    return z


def _pair_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean squared distance of the normalised rows, 2 - 2 cos: (N, k), (N, k) -> scalar."""
    cosines = (normalize(first, dim=1) * normalize(second, dim=1)).sum(1)
    return 2 - 2 * cosines.mean()
