"""Properties of the features that need no labels: effective rank, spectrum, alignment, uniformity, signs of a collapse.

Shapes: n images, F features.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from trainer.data.loader import ViewLoader, train_requests
from trainer.data.plan import Planner
from trainer.distributed.ranks import ImageRange
from trainer.evaluate.features import in_precision
from trainer.evaluate.protocol import Protocol, Subject

_COLLAPSED_RANK = 2.0  # features of a lower effective rank lie nearly on a line
_COLLAPSED_UNIFORMITY = -0.1  # 0: all features have the same direction; about -4: they are spread over the sphere
_BLOCK = 2048


def _measure(subject: Subject) -> dict[str, Any]:
    """Measure the features of test images, and how close two views of an image are."""
    limit = subject.place.config.diagnostics.images
    x = subject.test.x
    if len(x) > limit:
        x = x[np.linspace(0, len(x) - 1, limit).astype(np.int64)]
    values = spectrum(x)
    total = float(values.sum())
    # As in the log of a run, but of features instead of embeddings: (sum of eigenvalues)^2 / sum of their squares.
    rank = total**2 / float(values.square().sum()) if total else 0.0
    spread = uniformity(x)
    warnings = collapse_warnings(rank, spread)
    return {
        "label": "diagnostics",
        "figures": ["effective_rank", "alignment", "uniformity"],
        "images": len(x),
        "effective_rank": round(rank, 4),
        "alignment": round(alignment(subject), 6),
        "uniformity": round(spread, 6),
        "constant_features": int((x.std(0) <= 1e-6 * x.mean(0).abs()).sum()),
        # Shares of the total variance, the largest first.
        "spectrum": [float(f"{value / total:.4g}") if total else 0.0 for value in values.tolist()],
        "warnings": warnings,
        "protocol": "features of centre crops of test images; alignment: mean squared distance of two views of an image, "
        "and uniformity: log of the mean of exp(-2 squared distance) over pairs of images, both of features scaled to "
        "length 1 (Wang and Isola, ICML 2020)",
    }


def spectrum(x: Tensor) -> Tensor:
    """Return the eigenvalues (F,) of the covariance of features (n, F), the largest first, float64."""
    centred = x.double() - x.double().mean(0)
    covariance = centred.T @ centred / len(x)
    # Rounding may make the smallest ones slightly negative.
    return torch.linalg.eigvalsh(covariance).flip(0).clamp_min(0)


def uniformity(x: Tensor) -> float:
    """Return the uniformity of features (n, F): log of the mean of exp(-2 d^2) over all pairs of different images.

    d: distance of two features that are scaled to length 1."""
    x = functional.normalize(x, dim=1)
    total = 0.0
    # In blocks, because all distances at once would need n^2 numbers.
    for block in x.split(_BLOCK):
        squared = (2 - 2 * block @ x.T).clamp_min(0)
        total += float((-2 * squared).exp().double().sum())
    count = len(x)
    # Each image met itself once, at distance 0.
    return math.log(max(total - count, 1e-300) / (count * (count - 1)))


def alignment(subject: Subject) -> float:
    """Return the mean squared distance between the features, scaled to length 1, of two views of a test image.

    The views are those of the pre-training. Every rank calls this, for its share of the images."""
    place, split = subject.place, subject.test_split
    recipe = replace(place.config.views, num_views=2)
    ids = split.labelled
    ranks = place.ranks
    per_rank = min(place.config.evaluate.images_per_batch, len(ids) // ranks.world_size)
    images_per_step = per_rank * ranks.world_size
    # The plan and the loader of the pre-training draw the views, the same for any number of ranks.
    planner = Planner(
        recipe,
        seed=place.config.seed,
        num_images=len(ids),
        images_per_step=images_per_step,
        images=ImageRange(ranks.rank * per_rank, per_rank),
    )
    steps = max(1, min(place.config.diagnostics.images, len(ids)) // images_per_step)
    loader = ViewLoader(
        split.index,
        recipe,
        place.config.data,
        train_requests(planner, image_ids=ids),
        batch_size=per_rank,
        device=place.device,
        first_step=0,
        end_step=steps,
    )
    total = torch.zeros((), dtype=torch.float64, device=place.device)
    for batch in loader:
        with torch.inference_mode(), in_precision(place):
            features = functional.normalize(subject.encode(batch.views).float(), dim=1)
        first, second = features.chunk(2)
        total += (first - second).square().sum().double()
    if ranks.world_size > 1:
        dist.all_reduce(total)
    # All ranks together have seen this number of pairs.
    return total.item() / (steps * images_per_step)


def collapse_warnings(rank: float, spread: float) -> list[str]:
    """Describe signs of a collapse, from the effective rank and the uniformity of features."""
    warnings = []
    if rank < _COLLAPSED_RANK:
        warnings.append(
            f"the effective rank is {rank:.3g}: the features lie nearly on a line, the encoder has collapsed"
        )
    if spread > _COLLAPSED_UNIFORMITY:
        warnings.append(f"the uniformity is {spread:.3g}: all images have nearly the same direction of features")
    return warnings


DIAGNOSTICS = Protocol(
    _measure,
    needs="loader",
    settings=("seed", "diagnostics.", "views.", "evaluate.images_per_batch"),
)
