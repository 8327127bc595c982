"""The linear probe of the paper (section 4): softmax regression on frozen features by Adam.

Shapes: n images, F features, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.schema import EvaluateConfig
from trainer.evaluate.features import Features
from trainer.progress import with_progress


class Accuracy(NamedTuple):
    """In percent of the test images, after the last epoch."""

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
    """Adam for probe_epochs epochs over the training features as they are, no augmentation; the rate falls exponentially
    from probe_rate_start in the first epoch to probe_rate_end in the last."""
    x, y = train.x.to(device), train.labels.to(device)
    generator = torch.Generator().manual_seed(seed)
    weight, bias = _initial(x.shape[1], len(train.class_names), generator, device)
    optimizer = torch.optim.Adam([weight, bias], weight_decay=config.probe_weight_decay)
    for epoch in with_progress(range(config.probe_epochs), config.probe_epochs, f"{title}, epochs"):
        for group in optimizer.param_groups:
            group["lr"] = probe_rate(config, epoch)
        order = torch.randperm(len(x), generator=generator).to(device)
        for rows in order.split(config.probe_batch_size):
            loss = F.cross_entropy(F.linear(x[rows], weight, bias), y[rows])
            weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            optimizer.step()
    return _accuracy(test, weight, bias)


def probe_rate(config: EvaluateConfig, epoch: int) -> float:
    """Adam's rate in an epoch, counted from 0."""
    done = epoch / max(config.probe_epochs - 1, 1)
    return config.probe_rate_start * (config.probe_rate_end / config.probe_rate_start) ** done


def standardise(train: Features, test: Features) -> tuple[Features, Features]:
    """Both with mean 0 and standard deviation 1 of the training features; constant ones become 0."""
    mean, std = train.x.mean(0), train.x.std(0)
    scale = torch.where(std > 1e-6 * mean.abs(), 1 / std, 0.0)  # below that it is float32's rounding of a constant
    scaled = [Features((f.x - mean) * scale, f.labels, f.class_names, f.left_out) for f in (train, test)]
    return scaled[0], scaled[1]


def _initial(
    num_features: int, num_classes: int, generator: torch.Generator, device: torch.device
) -> tuple[nn.Parameter, nn.Parameter]:
    """torch's default for a Linear layer, from a generator of its own."""
    bound = num_features**-0.5
    weight = torch.empty(num_classes, num_features).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(num_classes).uniform_(-bound, bound, generator=generator)
    return nn.Parameter(weight.to(device)), nn.Parameter(bias.to(device))


@torch.inference_mode()
def _accuracy(test: Features, weight: Tensor, bias: Tensor) -> Accuracy:
    logits = F.linear(test.x.to(weight.device), weight, bias)
    ranked = logits.topk(min(5, logits.shape[1])).indices.cpu() == test.labels[:, None]
    percent = ranked.double().mean(0).cumsum(0) * 100
    return Accuracy(percent[0].item(), percent[-1].item())
