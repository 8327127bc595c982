"""Scores: top-1, top-5, the interval of chance, the accuracy of each class, and confused classes."""

import pytest
import torch

from trainer.evaluate.features import Features
from trainer.evaluate.scores import accuracy, score, top_guesses, wilson_interval


def of_labels(labels: list[int], names: str) -> Features:
    return Features(torch.zeros(len(labels), 1), torch.tensor(labels), list(names), 0)


def test_top1_and_top5_count_the_rank_of_the_label() -> None:
    """The label of image i of eight has the i-th largest logit."""
    logits = torch.stack([-torch.arange(8.0).roll(i) for i in range(8)])
    labels = (torch.arange(8) * 2) % 8  # the class at rank i of image i
    assert accuracy(top_guesses(logits), labels) == (100 / 8, 500 / 8)


def test_fewer_than_five_classes_have_a_top5_of_100() -> None:
    assert accuracy(top_guesses(torch.tensor([[3.0, 1.0], [0.0, 2.0]])), torch.tensor([1, 1])) == (50, 100)


@pytest.mark.parametrize(
    ("right", "count", "interval"),
    # values of scipy.stats.binomtest(right, count).proportion_ci(method="wilson")
    [
        (8, 10, (49.0162, 94.3318)),
        (0, 20, (0.0, 16.1125)),
        (20, 20, (83.8875, 100.0)),
        (7945, 10000, (78.6470, 80.2311)),
    ],
)
def test_the_interval_is_the_one_of_wilson(right: int, count: int, interval: tuple[float, float]) -> None:
    assert wilson_interval(right, count) == pytest.approx(interval, abs=1e-3)


def test_a_score_names_the_accuracy_of_each_class_and_the_confused_classes() -> None:
    """Class c has no images. b is taken for a twice, d for a and d for b once each."""
    test = of_labels([0, 0, 1, 1, 1, 3, 3], "abcd")
    found = score(torch.tensor([0, 0, 0, 0, 1, 0, 1])[:, None], test)
    assert found["top1"] == pytest.approx(300 / 7, abs=1e-4)
    assert "top5" not in found
    assert found["per_class_top1"] == {"a": 100, "b": pytest.approx(33.3333), "d": 0}
    assert found["confusions"] == [["b", "a", 2], ["d", "a", 1], ["d", "b", 1]]
    low, high = found["interval95"]
    assert low < found["top1"] < high
