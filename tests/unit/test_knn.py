"""k-NN equals the rule written as a loop."""

import numpy as np
import pytest
import torch

from trainer.evaluate import knn
from trainer.evaluate.features import Features
from trainer.evaluate.knn import knn_predict, knn_top1

CPU = torch.device("cpu")


def loop(train_x, train_labels, test_x, k: int) -> list[int]:
    """Return predictions by the paper's rule: Euclidean distance, plain majority, ties go to the smallest label."""
    predicted = []
    for x in np.asarray(test_x, np.float64):
        distance = np.sqrt(((np.asarray(train_x, np.float64) - x) ** 2).sum(1))
        votes = np.asarray(train_labels)[np.argsort(distance)[:k]].tolist()
        predicted.append(min(set(votes), key=lambda label: (-votes.count(label), label)))
    return predicted


@pytest.mark.parametrize("k", [1, 2, 5, 40, 60])
@pytest.mark.parametrize("offset", [0.0, 3000.0])
@pytest.mark.parametrize("chunk", [1 << 28, 100])
def test_predictions_equal_those_of_the_loop(k, offset, chunk, monkeypatch):
    """k goes up to all training images; features may be far from 0; queries come in chunks."""
    monkeypatch.setattr(knn, "_CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    train, test = (offset + torch.randn(n, 6, generator=generator) for n in (60, 37))
    labels = torch.randint(0, 7, (60,), generator=generator)
    assert knn_predict(train, labels, test, k, 7, CPU).tolist() == loop(train, labels, test, k)


def test_a_tie_goes_to_the_smallest_label_and_not_to_the_nearest():
    train = torch.tensor([[0.0], [0.1], [0.2], [0.3], [9.0]])
    labels = torch.tensor([3, 1, 3, 1, 0])
    assert knn_predict(train, labels, torch.zeros(1, 1), 4, 4, CPU).tolist() == [1]
    assert knn_predict(train, labels, torch.zeros(1, 1), 3, 4, CPU).tolist() == [3]


def test_top1_is_a_percentage():
    names = ["a", "b"]
    train = Features(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]), names, 0)
    test = Features(torch.tensor([[0.1], [0.9], [0.2], [0.8]]), torch.tensor([0, 1, 0, 0]), names, 0)
    assert knn_top1(train, test, 1, CPU) == 75.0
