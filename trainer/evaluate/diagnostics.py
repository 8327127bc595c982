"""Properties of the features that need no labels: ranks, spectrum, alignment, uniformity, signs of a collapse.

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

from trainer.config.schema import Config
from trainer.data.dali_graph import view_arrays
from trainer.data.loader import Request, ViewLoader
from trainer.data.plan import Plan, draw_views
from trainer.distributed.ranks import ImageRange
from trainer.errors import InputError
from trainer.evaluate.features import Split, evenly_spread, in_precision
from trainer.evaluate.protocol import Protocol, Subject
from trainer.run.health import lidar_of, rankme, sums_of_products

_COLLAPSED_RANK = 2.0  # features of a lower effective rank lie nearly on a line
_COLLAPSED_UNIFORMITY = -0.1  # 0: all features have the same direction; about -4: they are spread over the sphere
_BLOCK = 2048


def _measure(subject: Subject) -> dict[str, Any]:
    """Measure the features of test images, and how close two views of an image are."""
    x = subject.test.x
    x = x[evenly_spread(len(x), subject.place.config.diagnostics.images)]
    values = spectrum(x)
    total = float(values.sum())
    # As in the log of a run, but of features instead of embeddings: (sum of eigenvalues)^2 / sum of their squares.
    rank = total**2 / float(values.square().sum()) if total else 0.0
    products = x.double().T @ x.double()
    spread = uniformity(x)
    distance, lidar_of_views = compare_views(subject)
    warnings = collapse_warnings(rank, spread)
    return {
        "label": "diagnostics",
        "figures": ["effective_rank", "rankme", "lidar", "alignment", "uniformity"],
        "images": len(x),
        "effective_rank": round(rank, 4),
        "rankme": round(_or_zero(rankme(products.cpu().numpy(), len(x))), 4),
        "lidar": round(lidar_of_views, 4),
        "alignment": round(distance, 6),
        "uniformity": round(spread, 6),
        "constant_features": int((x.std(0) <= 1e-6 * x.mean(0).abs()).sum()),
        # Shares of the total variance, the largest first.
        "spectrum": [float(f"{value / total:.4g}") if total else 0.0 for value in values.tolist()],
        "warnings": warnings,
        "protocol": "features of centre crops of test images; alignment: mean squared distance of two views of an image, "
        "and uniformity: log of the mean of exp(-2 squared distance) over pairs of images, both of features scaled to "
        "length 1 (Wang and Isola, ICML 2020); rankme: of the features of the centre crops (Garrido et al., ICML 2023); "
        "lidar: of the features of the two views of each image (Thilak et al., ICLR 2024)",
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


def compare_views(subject: Subject) -> tuple[float, float]:
    """Return the alignment and LiDAR of the features of two views of each test image.

    The alignment is the mean squared distance of the two, scaled to length 1. LiDAR is 0 if all features are equal.
    The views are those of `views`, as in the pre-training. Every rank calls this, for its share of the images; the number
    of ranks changes nothing."""
    place, split = subject.place, subject.test_split
    ranks = place.ranks
    recipe = replace(place.config.views, num_views=2)
    labelled = split.labelled
    ids = labelled[evenly_spread(len(labelled), place.config.diagnostics.images)]
    own = np.array_split(np.arange(len(ids)), ranks.world_size)[ranks.rank]
    batch_size = place.config.evaluate.images_per_batch

    def request(step: int) -> Request:
        rows = own[step * batch_size : (step + 1) * batch_size]
        # The choices of a view depend on the row of its image alone.
        views = draw_views(recipe, place.config.seed, 0, ImageRange(int(rows[0]), len(rows)))
        plan = Plan(step, 0, ids[rows], *views)
        return Request(plan.image_ids, lambda heights, widths: view_arrays(plan, recipe, heights, widths))

    loader = ViewLoader(
        split.index,
        recipe,
        place.config.data,
        request,
        batch_size=batch_size,
        device=place.device,
        first_step=0,
        end_step=math.ceil(len(own) / batch_size),
    )
    # The sum of the squared distances, and the number of images.
    totals = torch.zeros(2, dtype=torch.float64, device=place.device)
    size = subject.test.x.shape[1] + 1
    sums = torch.zeros(3, size, size, dtype=torch.float64, device=place.device)
    for batch in loader:
        with torch.inference_mode(), in_precision(place):
            features = subject.encode(batch.views).float()
        first, second = functional.normalize(features, dim=1).chunk(2)
        totals[0] += (first - second).square().sum().double()
        totals[1] += len(first)
        sums += sums_of_products(features, 2)
    if ranks.world_size > 1:
        dist.all_reduce(totals)
        dist.all_reduce(sums)
    distance, count = totals.tolist()
    return distance / count, _or_zero(lidar_of(sums.cpu().numpy()))


def _or_zero(value: float) -> float:
    """Replace NaN, which JSON lacks."""
    return 0.0 if math.isnan(value) else value


def _check(config: Config, train: Split, test: Split) -> None:
    """Raise InputError if there are too few test images."""
    if len(test.labelled) < 2:
        raise InputError(f"diagnostics compare images, but the split {test.name!r} has only one with a label")


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
    check=_check,
    needs="loader",
    settings=("seed", "diagnostics.", "views.", "evaluate.images_per_batch"),
)
