"""k-NN equals the rules written as loops."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.evaluate import knn
from trainer.evaluate.features import Features
from trainer.evaluate.knn import majority_vote, nearest_neighbours, weighted_vote

CPU = torch.device("cpu")
CLASSES = 7


def features(x: Tensor, labels: Tensor | list[int], num_classes: int = CLASSES) -> Features:
    return Features(x, torch.as_tensor(labels), [str(number) for number in range(num_classes)], 0)


def random_splits(offset: float) -> tuple[Features, Features]:
    """Return 60 training images and 37 test images."""
    generator = torch.Generator().manual_seed(0)
    splits = []
    for count in (60, 37):
        x = offset + torch.randn(count, 6, generator=generator)
        splits.append(features(x, torch.randint(0, CLASSES, (count,), generator=generator)))
    return splits[0], splits[1]


def majority_loop(train: Features, test: Features, k: int) -> list[int]:
    """Return predictions by the paper's rule: Euclidean distance, plain majority, ties go to the smallest label."""
    predicted = []
    for x in test.x.double().numpy():
        distance = np.sqrt(((train.x.double().numpy() - x) ** 2).sum(1))
        votes = train.labels.numpy()[np.argsort(distance)[:k]].tolist()
        predicted.append(min(set(votes), key=lambda label: (-votes.count(label), label)))
    return predicted


def weighted_loop(train: Features, test: Features, k: int, temperature: float) -> list[int]:
    """Return predictions by the sum of exp(cosine similarity / temperature)."""
    predicted = []
    for x in test.x.double():
        similarity = torch.cosine_similarity(train.x.double(), x[None])
        votes = dict.fromkeys(range(CLASSES), 0.0)
        for number in similarity.argsort(descending=True)[:k].tolist():
            votes[int(train.labels[number])] += math.exp(similarity[number] / temperature)
        predicted.append(max(votes, key=lambda label: votes[label]))
    return predicted


@pytest.fixture(params=[None, 7], ids=["one block", "blocks of 7"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(knn, "_TRAIN_BLOCK", request.param)
        monkeypatch.setattr(knn, "_TEST_BLOCK", request.param)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("k", [1, 2, 5, 40, 60])
@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_predictions_equal_those_of_the_loop(k: int, offset: float) -> None:
    """k goes up to all training images; features may be far from 0; both splits come in blocks."""
    train, test = random_splits(offset)
    labels = nearest_neighbours(train, test, k, "euclidean", CPU).labels
    assert majority_vote(labels, CLASSES).tolist() == majority_loop(train, test, k)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("k", [1, 10, 60])
def test_weighted_votes_equal_those_of_the_loop(k: int) -> None:
    """The k nearest of a search for more neighbours are those of a search for k."""
    train, test = random_splits(0.0)
    found = nearest_neighbours(train, test, 60, "cosine", CPU)
    predicted = weighted_vote(found.scores[:, :k], found.labels[:, :k], CLASSES, temperature=0.07)
    assert predicted.tolist() == weighted_loop(train, test, k, temperature=0.07)


def test_at_a_small_temperature_the_nearest_neighbour_decides() -> None:
    """exp(1 / 0.001) would overflow, even in float64."""
    train, test = random_splits(0.0)
    found = nearest_neighbours(train, test, 60, "cosine", CPU)
    predicted = weighted_vote(*found, CLASSES, temperature=1e-3)
    assert predicted.tolist() == found.labels[:, 0].tolist()


def test_a_tie_goes_to_the_smallest_label_and_not_to_the_nearest():
    train = torch.tensor([[0.0], [0.1], [0.2], [0.3], [9.0]])
    labels = torch.tensor([3, 1, 3, 1, 0])
    neighbours = nearest_neighbours(features(train, labels), features(torch.zeros(1, 1), [0]), 4, "euclidean", CPU)
    assert majority_vote(neighbours.labels, 4).tolist() == [1]
    assert majority_vote(neighbours.labels[:, :3], 4).tolist() == [3]
