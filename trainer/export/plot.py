"""Map of features in two dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from trainer.errors import InputError
from trainer.files import atomic_write

_MOST_NAMES = 60  # more texts would cover each other
_MARKERS = "os^vD"


def plot_map(
    features: NDArray[Any], labels: Sequence[Any] | NDArray[Any] | None = None, out: Path | None = None
) -> Any:
    """Draw features (n, F) in the plane of their two main directions (PCA), and return matplotlib's figure.

    labels: one for each row. Equal labels get one colour and an entry in the legend; if all are different, as names are,
        each is written beside its point. out: also write this picture (.png, .pdf, ...)."""
    x = np.asarray(features, np.float64)
    if x.ndim != 2 or min(x.shape) < 2 or not np.isfinite(x).all():
        raise InputError(f"features of shape {x.shape} have no map: give at least 2 images and 2 features, all finite")
    texts = np.full(len(x), "")
    if labels is not None:
        texts = np.array([str(label) for label in labels])
    if len(texts) != len(x):
        raise InputError(f"there are {len(texts)} labels for {len(x)} images: give one for each")
    points, shares = principal_axes(x)

    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    # If all texts differ, they name the images and not their classes.
    are_names = len(np.unique(texts)) == len(x)
    if are_names:
        _draw_names(axes, points, texts)
    else:
        _draw_groups(axes, points, texts)
    axes.set_xlabel(f"first direction ({shares[0]:.0f}% of the variance)")
    axes.set_ylabel(f"second ({shares[1]:.0f}%)")
    if out is not None:
        path = Path(out)
        kind = path.suffix.removeprefix(".") or "png"
        with atomic_write(path) as file:
            figure.savefig(file, format=kind, dpi=150)
    return figure


def principal_axes(x: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Project features (n, F) on their two main directions: (n, 2), and their shares (2,) of the variance in percent."""
    # The right singular vectors of the centred features are the main directions.
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    points = u[:, :2] * s[:2]
    # One feature, or one image, has a single direction.
    points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    variances = np.pad(s**2, (0, max(0, 2 - len(s))))
    # Equal features have no variance, of which each share is 0.
    total = max(variances.sum(), 1e-300)
    return points, 100 * variances[:2] / total


def _draw_names(axes: Axes, points: NDArray[Any], names: NDArray[Any]) -> None:
    """Draw points (n, 2) in one colour, the first of them with their names (n,)."""
    axes.scatter(points[:, 0], points[:, 1], s=12)
    for name, point in zip(names[:_MOST_NAMES], points, strict=False):
        # A name such as a_$b$.png is not a formula.
        axes.annotate(name, point, fontsize=7, parse_math=False)


def _draw_groups(axes: Axes, points: NDArray[Any], texts: NDArray[Any]) -> None:
    """Draw points (n, 2) with a colour and a marker for each of the texts (n,), and a legend of them."""
    groups = np.unique(texts)
    for number, group in enumerate(groups):
        x, y = points[texts == group].T
        # Ten colours, then the same colours with another marker.
        axes.scatter(
            x,
            y,
            s=12,
            color=f"C{number % 10}",
            marker=_MARKERS[number // 10 % len(_MARKERS)],
            label=group,
        )
    if 1 < len(groups) <= _MOST_NAMES:
        axes.legend(fontsize=8)
