"""Linear probe of the paper (section 4): softmax regression on frozen features with Adam, on all labels or on a few.

Shapes: n images, F features, C classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.evaluation import LinearConfig
from trainer.errors import InputError
from trainer.evaluate.features import Features
from trainer.evaluate.protocol import Protocol, Subject
from trainer.evaluate.scores import accuracy, score, top_guesses
from trainer.evaluate.subsets import stratified_share
from trainer.progress import with_progress


def linear_probe(
    train: Features,
    test: Features,
    config: LinearConfig,
    device: torch.device,
    seed: int,
    title: str = "linear probe",
) -> Tensor:
    """Train a linear classifier on the training features. Returns its five best guesses for each test image (n, 5).

    Adam runs for `epochs` epochs without augmentation. Its learning rate falls exponentially from `rate_start` in the first
    epoch to `rate_end` in the last. The classifier after the last epoch counts.

    title: shown with the progress."""
    # The features are on the device as a whole, so a step need not copy them.
    x = train.x.to(device)
    y = train.labels.to(device)
    # Draw on the CPU, so that weights and orders are the same on every device.
    generator = torch.Generator().manual_seed(seed)
    weight, bias = _initial(x.shape[1], len(train.class_names), generator, device)
    optimizer = torch.optim.Adam([weight, bias], weight_decay=config.weight_decay)
    (group,) = optimizer.param_groups

    epochs = range(config.epochs)
    for epoch in with_progress(epochs, len(epochs), f"{title}, epochs"):
        group["lr"] = probe_rate(config, epoch)
        order = torch.randperm(len(x), generator=generator).to(device)
        for rows in order.split(config.batch_size):
            logits = F.linear(x[rows], weight, bias)
            loss = F.cross_entropy(logits, y[rows])
            weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            optimizer.step()
    with torch.inference_mode():
        logits = F.linear(test.x.to(device), weight, bias)
    if not bool(logits.isfinite().all()):
        raise InputError(
            f"the linear probe diverged with learning rate {config.rate_start:g}: set a smaller linear.rate_start"
        )
    return top_guesses(logits)


def probe_rate(config: LinearConfig, epoch: int) -> float:
    """Return Adam's learning rate in an epoch, counted from 0."""
    # The share of the decay that is done: 0 in the first epoch, 1 in the last.
    done = epoch / max(config.epochs - 1, 1)
    total_decay = config.rate_end / config.rate_start
    return config.rate_start * total_decay**done


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


# --- protocols ---


def _measure_linear(subject: Subject) -> dict[str, Any]:
    """Measure the linear probe on raw and on standardised features."""
    train = subject.train
    test = subject.test
    place = subject.place
    config = place.config.linear
    seed = place.config.seed
    raw = linear_probe(train, test, config, place.device, seed)
    # The second classifier shows how much of a low figure is due to badly scaled features.
    scaled_train, scaled_test = standardise(train, test)
    guesses = linear_probe(
        scaled_train,
        scaled_test,
        config,
        place.device,
        seed,
        "linear probe, standardised",
    )
    standardised = accuracy(guesses, test.labels)
    return {
        "label": "linear",
        "figures": ["top1", "top5", "standardised_top1", "standardised_top5"],
        **score(raw, test),
        "standardised_top1": round(standardised.top1, 4),
        "standardised_top5": round(standardised.top5, 4),
        "protocol": describe_probe(config),
    }


def describe_probe(config: LinearConfig) -> str:
    """Describe the linear probe for a result."""
    return (
        f"Adam, {config.epochs} epochs, batch size {config.batch_size}, learning rate {config.rate_start:g} to "
        f"{config.rate_end:g}, weight decay {config.weight_decay:g}, no augmentation, last epoch"
    )


def _measure_few_labels(subject: Subject) -> dict[str, Any]:
    """Measure the linear probe on the features of a share of the training images."""
    place = subject.place
    config = place.config
    all_features = subject.train
    result: dict[str, Any] = {"label": "linear, few labels", "figures": [], "shares": {}}
    for share in config.few_labels.shares:
        name = share_name(share)
        ids = stratified_share(subject.train_split, share, config.seed)
        # The features of images that could not be read are missing, so images are found by their ids.
        is_kept = torch.isin(all_features.ids, torch.from_numpy(ids))
        train = replace(
            all_features,
            x=all_features.x[is_kept],
            labels=all_features.labels[is_kept],
        )
        if len(train.x) == 0:
            raise InputError(f"none of the images of {name} of the labels can be read: set larger few_labels.shares")
        guesses = linear_probe(
            train,
            subject.test,
            config.linear,
            place.device,
            config.seed,
            f"linear, {name}",
        )
        add_share(result, name, len(train.x), score(guesses, subject.test))
    how = describe_probe(config.linear)
    return {**result, "protocol": f"{how}; raw features of the centre crops"}


def share_name(share: float) -> str:
    """Return the name of a share of the labels in the keys of a result, such as 1pct for 0.01."""
    return f"{100 * share:g}pct"


def add_share(result: dict[str, Any], name: str, num_images: int, scores: dict[str, Any]) -> None:
    """Add the scores for one share of the labels to a result."""
    result["shares"][name] = {"images": num_images, **scores}
    # Tables and curves only show figures at the top level of a result.
    for figure in ("top1", "top5"):
        key = f"{name}_{figure}"
        result[key] = scores[figure]
        result["figures"].append(key)


LINEAR = Protocol(_measure_linear, needs="features", settings=("seed", "linear."))
FEW_LABELS = Protocol(_measure_few_labels, needs="features", settings=("seed", "linear.", "few_labels."))
