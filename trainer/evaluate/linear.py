"""Linear probe of the paper (section 4): softmax regression on frozen features with Adam.

Shapes: n images, F features, C classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.schema import EvaluateConfig
from trainer.evaluate.features import Features
from trainer.progress import with_progress


class Accuracy(NamedTuple):
    """Accuracy on the test images after the last epoch, in percent."""

    top1: float
    top5: float


def linear_probe(
    train: Features,
    test: Features,
    config: EvaluateConfig,
    device: torch.device,
    seed: int,
    title: str = "linear probe",
) -> Accuracy:
    """Train a linear classifier on the training features, and return its accuracy on the test features.

    Adam runs for `probe_epochs` epochs without augmentation. Its learning rate falls exponentially from `probe_rate_start`
    in the first epoch to `probe_rate_end` in the last.

    title: shown with the progress."""
    x = train.x.to(device)
    y = train.labels.to(device)
    # Draw on the CPU, so that weights and orders are the same on every device.
    generator = torch.Generator().manual_seed(seed)
    weight, bias = _initial(x.shape[1], len(train.class_names), generator, device)
    optimizer = torch.optim.Adam([weight, bias], weight_decay=config.probe_weight_decay)
    (group,) = optimizer.param_groups

    epochs = range(config.probe_epochs)
    for epoch in with_progress(epochs, len(epochs), f"{title}, epochs"):
        group["lr"] = probe_rate(config, epoch)
        order = torch.randperm(len(x), generator=generator).to(device)
        for rows in order.split(config.probe_batch_size):
            logits = F.linear(x[rows], weight, bias)
            loss = F.cross_entropy(logits, y[rows])
            weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            optimizer.step()
    return _accuracy(test, weight, bias)


def probe_rate(config: EvaluateConfig, epoch: int) -> float:
    """Return Adam's learning rate in an epoch, counted from 0."""
    # The share of the decay that is done: 0 in the first epoch, 1 in the last.
    done = epoch / max(config.probe_epochs - 1, 1)
    total_decay = config.probe_rate_end / config.probe_rate_start
    return config.probe_rate_start * total_decay**done


def standardise(train: Features, test: Features) -> tuple[Features, Features]:
    """Scale both splits so that each training feature has mean 0 and standard deviation 1; constant features become 0."""
    mean = train.x.mean(0)
    std = train.x.std(0)
    # A smaller standard deviation is the float32 rounding of a constant feature.
    is_varying = std > 1e-6 * mean.abs()
    scale = torch.where(is_varying, 1 / std, 0.0)
    scaled_train = replace(train, x=(train.x - mean) * scale)
    scaled_test = replace(test, x=(test.x - mean) * scale)
    return scaled_train, scaled_test


def _initial(
    num_features: int, num_classes: int, generator: torch.Generator, device: torch.device
) -> tuple[nn.Parameter, nn.Parameter]:
    """Draw weight (C, F) and bias (C,) as torch does for a Linear layer, but from `generator`."""
    bound = num_features**-0.5
    weight = torch.empty(num_classes, num_features).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(num_classes).uniform_(-bound, bound, generator=generator)
    return nn.Parameter(weight.to(device)), nn.Parameter(bias.to(device))


@torch.inference_mode()
def _accuracy(test: Features, weight: Tensor, bias: Tensor) -> Accuracy:
    """Compute the accuracy of a linear classifier."""
    logits = F.linear(test.x.to(weight.device), weight, bias)
    # A set of fewer than five classes has no fifth guess; its top-5 is 100 %.
    num_guesses = min(5, logits.shape[1])
    guesses = logits.topk(num_guesses).indices.cpu()
    is_right = guesses == test.labels[:, None]
    # Entry n is the share of images whose label is among the first n + 1 guesses.
    percent = is_right.double().mean(0).cumsum(0) * 100
    return Accuracy(percent[0].item(), percent[-1].item())
