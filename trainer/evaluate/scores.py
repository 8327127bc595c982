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
    is_right = guesses == labels[:, None]
    # Entry i is the share of images whose label is among the first i + 1 guesses.
    percent = is_right.double().mean(0).cumsum(0) * 100
    return Accuracy(percent[0].item(), percent[-1].item())


def wilson_interval(num_right: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval (Wilson score) of a share in percent, from `num_right` of `count` independent images."""
    share = num_right / count
    centre = share + _Z95**2 / (2 * count)
    half = _Z95 * math.sqrt(share * (1 - share) / count + _Z95**2 / (4 * count**2))
    scale = 1 + _Z95**2 / count
    return 100 * (centre - half) / scale, 100 * (centre + half) / scale


def score(guesses: Tensor, test: Features) -> dict[str, Any]:
    """Return the part of a result that describes guesses (n, g) for the test images. Without five guesses: no top-5."""
    found = accuracy(guesses, test.labels)
    top5 = {"top5": round(found.top5, 4)} if guesses.shape[1] > 1 else {}
    first = guesses[:, 0]
    low, high = wilson_interval(int((first == test.labels).sum()), len(first))
    return {
        "top1": round(found.top1, 4),
        **top5,
        "interval95": [round(low, 4), round(high, 4)],
        "per_class_top1": _per_class(first, test),
        "confusions": _confusions(first, test),
    }


def _per_class(predicted: Tensor, test: Features) -> dict[str, float]:
    """Return the percentage of the images of each class that are classified correctly. Classes without images are absent."""
    num_classes = len(test.class_names)
    images = torch.bincount(test.labels, minlength=num_classes).tolist()
    right = torch.bincount(test.labels[predicted == test.labels], minlength=num_classes).tolist()
    return {
        name: round(100 * right[number] / images[number], 4)
        for number, name in enumerate(test.class_names)
        if images[number]
    }


def _confusions(predicted: Tensor, test: Features) -> list[list[Any]]:
    """List [class, class that was predicted instead, number of images], the most frequent first."""
    is_wrong = predicted != test.labels
    pairs = Counter(zip(test.labels[is_wrong].tolist(), predicted[is_wrong].tolist(), strict=True))
    # Pairs of equal number come in the order of their classes, so that a repetition gives the same list.
    ordered = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    names = test.class_names
    return [[names[true], names[guess], count] for (true, guess), count in ordered[:_CONFUSIONS]]
