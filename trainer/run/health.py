"""Health of the embeddings: how many dimensions they fill, how well they tell images apart, how well they can be whitened.

The device only forms sums of products, which one all-reduce adds up over ranks. The host takes eigenvalues of the small
matrices when it writes a line, two steps later, so no step waits for them.

Shapes: R = d*n views of this rank (view-major), n its images, k embedding size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_DIMENSIONS = 512
"""Embedding size above which only the effective rank is computed."""
_RANKME_EPS = 1e-7  # as in the paper
_LIDAR_DELTA = 1e-4  # likewise
_VALUES = ("rankme", "lidar", "largest_share", "dimensions_99", "condition", "condition_view")
_DIGITS = 6  # more digits would differ with the number of threads of the host
_Matrix = NDArray[np.float64]


def sums_of_products(embeddings: Tensor, num_views: int) -> Tensor:
    """Return the sums that `measure_health` needs, float64; those of several ranks add up.

    One matrix (k+1, k+1) for each view: products of its embeddings, with a column of ones, so that the last row holds sums and
    the count. The last matrix has the products of the differences of each embedding from the mean of its image.

    embeddings: (R, k)."""
    k = embeddings.shape[1]
    # Differences of large sums need float64.
    x = embeddings.double()
    by_view = x.unflatten(0, (num_views, -1))  # (d, n, k)
    of_views = _with_ones(by_view)
    sums = x.new_zeros(num_views + 1, k + 1, k + 1)
    torch.bmm(of_views.transpose(1, 2), of_views, out=sums[:-1])
    # The mean over views is the mean of each image.
    centred = (by_view - by_view.mean(0)).flatten(0, 1)
    sums[-1, :-1, :-1] = centred.T @ centred
    return sums


def joint_products(embeddings: Tensor) -> Tensor:
    """Return the first kind of these sums of all views together, (1, k+1, k+1), which is enough for the effective rank."""
    x = _with_ones(embeddings.double())
    return (x.T @ x)[None]


def _with_ones(x: Tensor) -> Tensor:
    """Add a column of ones. x: (..., k)."""
    return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)


def effective_rank(sums: Tensor) -> Tensor:
    """Compute the effective rank (tr S)^2 / |S|^2 of the covariance S of all embeddings, 0-d.

    It is k if S is a multiple of the identity, and 1 if all embeddings lie on a line. sums: as above."""
    products = sums[0] if len(sums) == 1 else sums[:-1].sum(0)
    # A common factor of the covariance cancels in the effective rank, so it is not divided by the count.
    totals = products[:-1, -1]
    covariance = products[:-1, :-1] - totals.outer(totals) / products[-1, -1]
    trace = covariance.diagonal().sum()
    return trace.square() / covariance.square().sum()


def undefined_health() -> dict[str, Any]:
    """Return the values of `measure_health` if none is known: NaN."""
    return dict.fromkeys(_VALUES, np.nan)


def measure_health(sums: _Matrix) -> dict[str, Any]:
    """Return the values of a line about the embeddings, by their names in metrics.jsonl; NaN where one is not defined.

    sums: those of all ranks, from `sums_of_products`, with a matrix for each view."""
    found = undefined_health()
    if not np.isfinite(sums).all():
        return found
    of_views = sums[:-1]
    total = of_views.sum(0)
    count = total[-1, -1]
    covariance = _covariance(total)
    shares = _shares(covariance)
    conditions = [_condition(view) for view in of_views]
    worst = int(np.argmax(conditions))  # a NaN counts as the largest
    values = {
        "rankme": rankme(total[:-1, :-1], count),
        "lidar": lidar_of(sums),
        "largest_share": shares[0],
        "condition": conditions[worst],
    }
    # Without any variance the shares are not defined.
    if not np.isnan(shares[0]):
        # The number of the largest eigenvalues that hold 99 % of the variance.
        last = np.searchsorted(np.cumsum(shares), 0.99)
        found["dimensions_99"] = int(last) + 1
    if not np.isnan(conditions[worst]):
        found["condition_view"] = worst
    for name, value in values.items():
        found[name] = float(f"{value:.{_DIGITS}g}")
    return found


def rankme(products: _Matrix, count: float) -> float:
    """Return RankMe (Garrido et al., ICML 2023): exp of the entropy of the normalised singular values of the embeddings.

    products: (k, k), X^T X of the embeddings X, not centred. count: number of rows of X."""
    # Their squares are the eigenvalues of the products. A matrix has at most as many singular values as rows.
    squares = _eigenvalues(products)[: int(count)]
    singular = np.sqrt(squares)
    return _exp_entropy(singular, _RANKME_EPS)


def lidar(between: _Matrix, within: _Matrix) -> float:
    """Return LiDAR (Thilak et al., ICLR 2024): exp of the entropy of the eigenvalues of Sw^-1/2 Sb Sw^-1/2.

    between: Sb (k, k), the covariance of the means of the images. within: Sw (k, k), the covariance of the views of an image
    around its mean, to which 1e-4 times the identity is added."""
    identity = np.eye(len(within))
    factor = np.linalg.cholesky(within + _LIDAR_DELTA * identity)
    # With Sw = L L^T, the matrix L^-1 Sb L^-T has the same eigenvalues.
    half = np.linalg.solve(factor, between)
    matrix = np.linalg.solve(factor, half.T)
    # Rounding makes the matrix slightly asymmetric.
    symmetric = (matrix + matrix.T) / 2
    return _exp_entropy(_eigenvalues(symmetric), _RANKME_EPS)


def lidar_of(sums: _Matrix) -> float:
    """Return LiDAR from the sums of `sums_of_products`; NaN with one view for each image, and for equal embeddings."""
    if len(sums) == 2:
        return np.nan
    total = sums[:-1].sum(0)
    within = sums[-1, :-1, :-1]
    count = total[-1, -1]
    mean = total[:-1, -1] / count
    # The products of all views are those of the d equal means of each image, and those around the means.
    between = (total[:-1, :-1] - within) / count - np.outer(mean, mean)
    return lidar(between, within / count)


def _condition(products: _Matrix) -> float:
    """Return the condition number of a view's covariance; infinite if it is singular, NaN with at most k images."""
    count = products[-1, -1]
    values = _eigenvalues(_covariance(products))
    # The covariance of so few images is always singular.
    if count <= len(values):
        return np.nan
    is_singular = values[-1] <= 1e-14 * values[0]
    return np.inf if is_singular else values[0] / values[-1]


def _covariance(products: _Matrix) -> _Matrix:
    """Return the covariance (k, k) from the products of embeddings with a column of ones, (k+1, k+1)."""
    count = products[-1, -1]
    mean = products[:-1, -1] / count
    return products[:-1, :-1] / count - np.outer(mean, mean)


def _eigenvalues(matrix: _Matrix) -> _Matrix:
    """Return the eigenvalues, the largest first. Rounding may make the smallest ones slightly negative; they become 0."""
    return np.linalg.eigvalsh(matrix)[::-1].clip(min=0)


def _shares(covariance: _Matrix) -> _Matrix:
    """Return the eigenvalues as shares of the variance, the largest first; NaN without any variance."""
    values = _eigenvalues(covariance)
    total = values.sum()
    return values / total if total > 0 else np.full_like(values, np.nan)


def _exp_entropy(values: _Matrix, eps: float) -> float:
    """Return exp of the entropy of values above 0 divided by their sum; NaN if all are 0."""
    total = values.sum()
    if total <= 0:
        return np.nan
    # As in the papers, eps keeps the logarithm of 0 out.
    shares = values / total + eps
    entropy = -(shares * np.log(shares)).sum()
    return float(np.exp(entropy))
