"""k-NN of the paper (section 4): Euclidean distance on unscaled features, majority vote, ties go to the smallest label.

Shapes: n images, F features, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.evaluate.features import Features
from trainer.progress import with_progress

_CHUNK_ELEMENTS = 1 << 28  # distances that are computed at once: 1 GiB in float32


def knn_top1(train: Features, test: Features, k: int, device: torch.device) -> float:
    """Return the percentage of test images whose k nearest training images vote for the right class."""
    predicted = knn_predict(train.x, train.labels, test.x, k, len(train.class_names), device)
    is_right = predicted == test.labels
    return is_right.double().mean().item() * 100


def check_neighbours(k: int, num_train: int) -> None:
    """Raise InputError if there are fewer training images than neighbours."""
    if k > num_train:
        raise InputError(
            f"evaluate.knn_k is {k}, but the training split has {num_train} images: set it to {num_train} or less"
        )


@torch.inference_mode()
def knn_predict(
    train_x: Tensor, train_labels: Tensor, test_x: Tensor, k: int, num_classes: int, device: torch.device
) -> Tensor:
    """Predict the labels of the test images, (n_test,) int64 on the CPU.

    Distances come from a matrix product. The training mean is subtracted first: otherwise features far from 0 would lose
    the last digits of their distances in float32.

    train_x: (n_train, F). train_labels: (n_train,) int64. test_x: (n_test, F). k: at most n_train.
    """
    centre = train_x.mean(0)
    bank = (train_x - centre).to(device)
    squares = bank.square().sum(1)
    labels = train_labels.to(device)
    classes = torch.arange(num_classes, device=device)
    rows = max(1, _CHUNK_ELEMENTS // len(bank))
    chunks = (test_x - centre).split(rows)
    predicted = []
    for chunk in with_progress(chunks, len(test_x), f"{k}-nn of images", size=len):
        # Squared distances without the square of the test image, which does not change the order within a row.
        products = chunk.to(device) @ bank.T
        distance = squares - 2 * products
        nearest = distance.topk(k, largest=False).indices
        votes = torch.zeros(len(nearest), num_classes, dtype=torch.int64, device=device)
        one_vote_each = torch.ones_like(nearest)
        votes.scatter_add_(1, labels[nearest], one_vote_each)
        # The class with the most votes has the highest score, and among equal ones the smallest label.
        score = votes * num_classes - classes
        predicted.append(score.argmax(1).cpu())
    return torch.cat(predicted)
