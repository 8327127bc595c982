"""Linear classifier on a frozen encoder, as is usual for ImageNet, with many learning rates and weight decays in one pass."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch

from trainer.evaluate.classifiers import (
    Classifiers,
    augmented_batches,
    plan_training,
    stored_batches,
    train_classifiers,
)
from trainer.evaluate.features import extract
from trainer.evaluate.protocol import Protocol, Subject
from trainer.evaluate.scores import Accuracy, accuracy, score, top_guesses
from trainer.evaluate.subsets import stratified_share


def _measure(subject: Subject) -> dict[str, Any]:
    """Train the classifiers, choose one on images that none has seen, and measure all on the test images."""
    place = subject.place
    config = place.config.linear_sgd
    rates = list(product(config.learning_rates, config.weight_decays))
    # With one classifier there is nothing to choose, so it learns from all images.
    split = subject.train_split
    held_back = np.empty(0, np.int64)
    if len(rates) > 1:
        held_back = stratified_share(split, config.held_back_share, place.config.seed)
        split = split.only(np.setdiff1d(split.labelled, held_back))

    train = None if config.augment else extract(subject.encode, split, place)
    count = len(split.labelled) if train is None else len(train.x)
    training = plan_training(
        count,
        place,
        epochs=config.epochs,
        images_per_step=config.images_per_step,
        rates=rates,
        momentum=config.momentum,
    )
    if train is None:
        batches = augmented_batches(split, training, config.crop_area, place)
    else:
        batches = stored_batches(train, training, place)
    classifiers = Classifiers(subject.test.x.shape[1], len(split.class_names), len(rates)).to(place.device)
    train_classifiers(
        classifiers,
        training,
        batches,
        place,
        encode=subject.encode if train is None else None,
        state_path=subject.state_path,
        identity=f"{subject.identity} {training}",
        title="linear, SGD",
    )
    guesses = _guesses(classifiers, subject.test.x, place.device)
    found = [accuracy(g, subject.test.labels) for g in guesses]
    result: dict[str, Any] = {"label": "linear, SGD", "figures": ["top1", "top5"]}
    chosen = 0
    held: list[Accuracy] = []
    if len(rates) > 1:
        held_features = extract(subject.encode, subject.train_split.only(held_back), place)
        held_guesses = _guesses(classifiers, held_features.x, place.device)
        held = [accuracy(g, held_features.labels) for g in held_guesses]
        # `index` returns the first of equal ones.
        top1 = [a.top1 for a in held]
        chosen = top1.index(max(top1))
        result["choice"] = (
            f"the highest top-1 on {len(held_features.x)} training images that no classifier was trained on "
            f"({100 * config.held_back_share:g}% of each class); the first of equal ones"
        )
    views = f"random crops of {config.crop_area[0]:g} to {config.crop_area[1]:g} of the area, flips"
    return {
        **result,
        **score(guesses[chosen], subject.test),
        "classifiers": [
            {
                "learning_rate": rate,
                "weight_decay": decay,
                "top1": round(found[number].top1, 4),
                "top5": round(found[number].top5, 4),
                **({"held_back_top1": round(held[number].top1, 4), "chosen": number == chosen} if held else {}),
            }
            for number, (rate, decay) in enumerate(rates)
        ],
        "trained_on": count,
        "protocol": f"SGD, Nesterov momentum {config.momentum:g}, {config.epochs} epochs of {training.steps_per_epoch} steps "
        f"of {training.images_per_step} images, cosine from learning_rate x {training.images_per_step}/256, "
        f"{views if config.augment else 'no augmentation'}, zero initial weights, last epoch",
    }


def _guesses(classifiers: Classifiers, x: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Return the five best guesses (n, 5) of each classifier."""
    with torch.inference_mode():
        # In parts, because many classifiers have many logits.
        parts = [[top_guesses(logits) for logits in classifiers(part.to(device))] for part in x.split(4096)]
    return [torch.cat(of_classifier) for of_classifier in zip(*parts, strict=True)]


LINEAR_SGD = Protocol(_measure, needs="loader", settings=("seed", "linear_sgd.", "evaluate.images_per_batch"))
