"""Map of features in two dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from trainer.errors import InputError
from trainer.files import atomic_write

_MOST_NAMES = 60  # more texts would cover each other


def plot_map(
    features: NDArray[Any], labels: Sequence[Any] | NDArray[Any] | None = None, out: Path | None = None
) -> Any:
    """Draw features (n, F) in the plane of their two main directions (PCA), and return matplotlib's figure.

    labels: one for each row. Equal labels get one colour and an entry in the legend; if all are different, as names are,
        each is written beside its point. out: also write this picture (.png, .pdf, ...)."""
    x = np.asarray(features, np.float64)
    if x.ndim != 2 or min(x.shape) < 2 or not np.isfinite(x).all():
        raise InputError(f"features of shape {x.shape} have no map: give at least 2 images and 2 features, all finite")
    texts = np.array([str(label) for label in labels]) if labels is not None else np.full(len(x), "")
    if len(texts) != len(x):
        raise InputError(f"there are {len(texts)} labels for {len(x)} images: give one for each")

    # The right singular vectors of the centred features are the main directions.
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    points = u[:, :2] * s[:2]
    shares = 100 * s[:2] ** 2 / max((s**2).sum(), 1e-300)

    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    groups = np.unique(texts)
    if len(groups) == len(x) > 1:
        axes.scatter(points[:, 0], points[:, 1], s=12)
        for text, point in zip(texts[:_MOST_NAMES], points, strict=False):
            axes.annotate(text, point, fontsize=7, parse_math=False)
    else:
        for number, group in enumerate(groups):
            # Ten colours, then the same colours with another marker.
            marker = "os^vD"[number // 10 % 5]
            x, y = points[texts == group].T
            axes.scatter(x, y, s=12, color=f"C{number % 10}", marker=marker, label=group)
        if 1 < len(groups) <= _MOST_NAMES:
            axes.legend(fontsize=8)
    axes.set(xlabel=f"first direction ({shares[0]:.0f}% of the variance)", ylabel=f"second ({shares[1]:.0f}%)")
    if out is not None:
        with atomic_write(Path(out)) as file:
            figure.savefig(file, format=Path(out).suffix.removeprefix(".") or "png", dpi=150)
    return figure
