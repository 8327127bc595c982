"""Scores of guesses: top-1 and top-5, the interval of chance, the accuracy of each class, and the classes that are confused.

Shapes: n test images, g guesses of each, best first.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.evaluate.features import Features

_Z95 = 1.959964  # standard deviations of a normal distribution on each side that hold 95 %
_CONFUSIONS = 10  # number of pairs of classes that a result lists


class Accuracy(NamedTuple):
    """Percentage of the test images whose label is the first guess, or among the first five."""

    top1: float
    top5: float


def top_guesses(logits: Tensor) -> Tensor:
    """Return the five best classes of each image (n, g), best first; all classes if there are fewer than five."""
    return logits.topk(min(5, logits.shape[1])).indices.cpu()


def accuracy(guesses: Tensor, labels: Tensor) -> Accuracy:
    """Compute the accuracy of guesses (n, g). With fewer than five classes top-5 is 100, if every class can be guessed."""
    # At most one of the guesses of an image is right.
    is_right = guesses == labels[:, None]
    # Entry i is the share of images whose label is among the first i + 1 guesses.
    percent = is_right.double().mean(0).cumsum(0) * 100
    return Accuracy(percent[0].item(), percent[-1].item())


def wilson_interval(num_right: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval (Wilson score) of a share in percent, from `num_right` of `count` independent images."""
    share = num_right / count
    # Unlike share ± z sqrt(variance), this interval stays in 0..100 and is right for small counts too.
    variance = share * (1 - share) / count
    correction = _Z95**2 / count
    centre = share + correction / 2
    half = _Z95 * math.sqrt(variance + correction / (4 * count))
    scale = 1 + correction
    low = 100 * (centre - half) / scale
    high = 100 * (centre + half) / scale
    return low, high


def score(guesses: Tensor, test: Features) -> dict[str, Any]:
    """Return the part of a result that describes guesses (n, g) for the test images. Without five guesses: no top-5."""
    found = accuracy(guesses, test.labels)
    first = guesses[:, 0]
    num_right = int((first == test.labels).sum())
    low, high = wilson_interval(num_right, len(first))
    figures = {"top1": round(found.top1, 4)}
    # k-NN gives one guess only.
    if guesses.shape[1] > 1:
        figures["top5"] = round(found.top5, 4)
    return {
        **figures,
        "interval95": [round(low, 4), round(high, 4)],
        "per_class_top1": _per_class(first, test),
        "confusions": _confusions(first, test),
    }


def _per_class(predicted: Tensor, test: Features) -> dict[str, float]:
    """Return the percentage of the images of each class that are classified correctly. Classes without images are absent."""
    num_classes = len(test.class_names)
    right_labels = test.labels[predicted == test.labels]
    # Numbers of images of each class, (C,).
    images = torch.bincount(test.labels, minlength=num_classes).tolist()
    right = torch.bincount(right_labels, minlength=num_classes).tolist()
    percentages = {}
    for number, name in enumerate(test.class_names):
        if images[number]:
            percentages[name] = round(100 * right[number] / images[number], 4)
    return percentages


def _confusions(predicted: Tensor, test: Features) -> list[list[Any]]:
    """List [class, class that was predicted instead, number of images], the most frequent first."""
    is_wrong = predicted != test.labels
    true_classes = test.labels[is_wrong].tolist()
    wrong_guesses = predicted[is_wrong].tolist()
    pairs = Counter(zip(true_classes, wrong_guesses, strict=True))
    # Pairs of equal number come in the order of their classes, so that a repetition gives the same list.
    ordered = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    names = test.class_names
    rows = []
    for (true_class, guess), count in ordered[:_CONFUSIONS]:
        rows.append([names[true_class], names[guess], count])
    return rows
