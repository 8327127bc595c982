"""k nearest neighbours: those of the paper (section 4), and the weighted vote by cosine similarity that the field reports.

Shapes: n images, F features, C classes, k neighbours.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainer.config.schema import Config
from trainer.errors import InputError
from trainer.evaluate.features import Features, Split
from trainer.evaluate.protocol import Protocol, Subject
from trainer.evaluate.scores import score
from trainer.progress import with_progress

_TRAIN_BLOCK = 1 << 16  # training images that are compared at once, 0.5 GiB of 2,048 features
_TEST_BLOCK = 1 << 12  # test images that are compared with such a block at once: 1 GiB of scores


Metric = Literal["euclidean", "cosine"]


class Neighbours(NamedTuple):
    """The k nearest training images of each test image, nearest first. On the CPU."""

    scores: Tensor
    """(n_test, k) float32, larger is nearer. cosine: the similarity; euclidean: only the order in a row has a meaning."""
    labels: Tensor
    """(n_test, k) int64."""


def nearest_neighbours(train: Features, test: Features, k: int, metric: Metric, device: torch.device) -> Neighbours:
    """Find the k nearest training images of each test image, with their labels. k: at most n_train."""
    scores, numbers = nearest_images(train.x, test.x, k, metric, device)
    return Neighbours(scores, train.labels[numbers])


@torch.inference_mode()
def nearest_images(
    train_x: Tensor, test_x: Tensor, k: int, metric: Metric, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the scores (n_test, k) and the row numbers (n_test, k) in `train_x` of the k nearest images, nearest first.

    Both splits are cut into blocks, so the device holds about 2 GiB for 2,048 features, for any number of images.

    k: at most n_train."""
    # Euclidean distances come from a matrix product. Features far from 0 would lose the last digits of their distances in
    # float32, so the training mean is subtracted first.
    centre = train_x.mean(0) if metric == "euclidean" else None
    scores: list[Tensor] = []
    numbers: list[Tensor] = []
    parts = test_x.split(_TEST_BLOCK)
    for part in with_progress(parts, len(test_x), f"{k}-nn of images", size=len):
        query = _prepared(part, centre, device)
        best, nearest = _nearest_of_all_blocks(query, train_x, centre, k)
        scores.append(best.cpu())
        numbers.append(nearest.cpu())
    return torch.cat(scores), torch.cat(numbers)


def _nearest_of_all_blocks(query: Tensor, train_x: Tensor, centre: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best scores of each query (n, F), best first, and the numbers of their training images."""
    best = query.new_empty(len(query), 0)
    numbers = torch.empty(len(query), 0, dtype=torch.int64, device=query.device)
    for first in range(0, len(train_x), _TRAIN_BLOCK):
        block = train_x[first : first + _TRAIN_BLOCK]
        bank = _prepared(block, centre, query.device)
        scores = query @ bank.T
        if centre is not None:
            # Minus half of the squared distance, but for the square of the query: that does not change the order in a row.
            scores -= bank.square().sum(1) / 2
        block_best, block_numbers = scores.topk(min(k, len(bank)))
        # Merge with the best of the blocks before.
        candidates = torch.cat([best, block_best], 1)
        candidate_numbers = torch.cat([numbers, first + block_numbers], 1)
        best, places = candidates.topk(min(k, candidates.shape[1]))
        numbers = candidate_numbers.gather(1, places)
    return best, numbers


def _prepared(x: Tensor, centre: Tensor | None, device: torch.device) -> Tensor:
    """Move features to the device, centred if there is a centre, else scaled to length 1."""
    x = x.to(device)
    if centre is None:
        return functional.normalize(x, dim=1)
    return x - centre.to(device)


def majority_vote(labels: Tensor, num_classes: int) -> Tensor:
    """Return the class (n,) with the most votes of the neighbours' labels (n, k). Ties go to the smallest label."""
    votes = _add_votes(labels, torch.ones_like(labels), num_classes)
    # The class with the most votes has the highest score, and among equal ones the smallest label.
    score = votes * num_classes - torch.arange(num_classes)
    return score.argmax(1)


def weighted_vote(similarities: Tensor, labels: Tensor, num_classes: int, temperature: float) -> Tensor:
    """Return the class (n,) with the largest sum of exp(similarity / temperature). similarities, labels: (n, k)."""
    # In float64, and relative to the nearest neighbour, so that no exponential overflows.
    exponents = (similarities.double() - similarities[:, :1]) / temperature
    return _add_votes(labels, exponents.exp(), num_classes).argmax(1)


def _add_votes(labels: Tensor, weights: Tensor, num_classes: int) -> Tensor:
    """Add up the weights (n, k) of each class: (n, C)."""
    votes = weights.new_zeros(len(labels), num_classes)
    return votes.scatter_add_(1, labels, weights)


# --- protocols ---


def _check_neighbours(setting: str, k: int, num_train: int) -> None:
    """Raise InputError if there are fewer training images than neighbours."""
    if k > num_train:
        raise InputError(f"{setting} is {k}, but the training split has {num_train} images: use at most {num_train}")


def _measure_knn(subject: Subject) -> dict[str, Any]:
    """Measure k-NN as in the paper."""
    train = subject.train
    test = subject.test
    k = subject.place.config.knn.k
    # Images that could not be read are skipped, so fewer may remain than the split holds.
    _check_neighbours("knn.k", k, len(train.x))
    neighbours = nearest_neighbours(train, test, k, "euclidean", subject.place.device)
    predicted = majority_vote(neighbours.labels, len(train.class_names))
    return {
        "label": f"{k}-nn",
        "figures": ["top1"],
        **score(predicted[:, None], test),
        "k": k,
        "metric": "Euclidean, unscaled features",
        "vote": "majority, ties to the smallest label",
    }


def _measure_knn_cosine(subject: Subject) -> dict[str, Any]:
    """Measure k-NN with weighted votes by cosine similarity (Wu et al., CVPR 2018, section 3.4), for each k."""
    train = subject.train
    test = subject.test
    config = subject.place.config.knn_cosine
    most = max(config.k)
    _check_neighbours("knn_cosine.k", most, len(train.x))
    # One search serves all numbers of neighbours, because the neighbours are sorted.
    neighbours = nearest_neighbours(train, test, most, "cosine", subject.place.device)
    result: dict[str, Any] = {"label": "k-nn, cosine", "figures": [], "by_k": {}}
    for k in config.k:
        predicted = weighted_vote(
            neighbours.scores[:, :k],
            neighbours.labels[:, :k],
            len(train.class_names),
            config.temperature,
        )
        scores = score(predicted[:, None], test)
        result["by_k"][str(k)] = scores
        key = f"k{k}_top1"
        result[key] = scores["top1"]
        result["figures"].append(key)
    return {
        **result,
        "metric": "cosine similarity",
        "vote": f"weights exp(similarity / {config.temperature:g}), ties to the smallest label",
    }


def _check_knn(config: Config, train: Split, test: Split) -> None:
    """Check k before any image is encoded. Raises InputError."""
    _check_neighbours("knn.k", config.knn.k, len(train.labelled))


def _check_knn_cosine(config: Config, train: Split, test: Split) -> None:
    """Check each k before any image is encoded. Raises InputError."""
    _check_neighbours("knn_cosine.k", max(config.knn_cosine.k), len(train.labelled))


KNN = Protocol(
    _measure_knn,
    needs="features",
    settings=("knn.",),
    check=_check_knn,
)
KNN_COSINE = Protocol(
    _measure_knn_cosine,
    needs="features",
    settings=("knn_cosine.",),
    check=_check_knn_cosine,
)
