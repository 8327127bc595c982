"""k-NN of the paper (section 4): Euclidean distance on the features as they are, plain majority, ties to the smallest label."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.evaluate.features import Features
from trainer.progress import with_progress

_CHUNK_ELEMENTS = 1 << 28  # of one block of distances: 1 GiB in float32


def knn_top1(train: Features, test: Features, k: int, device: torch.device) -> float:
    """Return the percentage of test images whose k nearest training images vote for the right class."""
    predicted = knn_predict(train.x, train.labels, test.x, k, len(train.class_names), device)
    return (predicted == test.labels).double().mean().item() * 100


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
    """(n_test,) int64 labels, on the CPU. train_x (n_train, F), test_x (n_test, F), k at most n_train.

    Distances come from a matrix product; the training mean is subtracted first, which keeps them exact to float32's last
    digits where features sit far from 0.
    """
    centre = train_x.mean(0)
    bank = (train_x - centre).to(device)
    squares = bank.square().sum(1)
    labels = train_labels.to(device)
    rows = max(1, _CHUNK_ELEMENTS // len(bank))
    predicted = []
    for chunk in with_progress((test_x - centre).split(rows), len(test_x), f"{k}-nn of images", size=len):
        distance = squares - 2 * chunk.to(device) @ bank.T  # less the chunk's own square, the same for a whole row
        nearest = distance.topk(k, largest=False).indices
        votes = torch.zeros(len(nearest), num_classes, dtype=torch.int64, device=device)
        votes.scatter_add_(1, labels[nearest], torch.ones_like(nearest))
        score = votes * num_classes - torch.arange(num_classes, device=device)  # more votes, then the smaller label
        predicted.append(score.argmax(1).cpu())
    return torch.cat(predicted)
