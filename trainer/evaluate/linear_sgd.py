"""Linear classifier on a frozen encoder, as is usual for ImageNet, with many learning rates and weight decays in one pass."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config.evaluation import LinearSGDConfig
from trainer.errors import InputError
from trainer.evaluate.classifiers import (
    Classifiers,
    Training,
    augmented_batches,
    plan_training,
    stored_batches,
    train_classifiers,
)
from trainer.evaluate.features import Features, Place, Split, extract
from trainer.evaluate.protocol import Protocol, Subject
from trainer.evaluate.scores import accuracy, score, top_guesses
from trainer.evaluate.subsets import stratified_share

_PART = 4096  # test images whose logits are computed at once


def _measure(subject: Subject) -> dict[str, Any]:
    """Train the classifiers, choose one on images that none has seen, and measure all on the test images."""
    place = subject.place
    config = place.config.linear_sgd
    rates = list(product(config.learning_rates, config.weight_decays))
    # With one classifier there is nothing to choose, so it learns from all images.
    learnt = subject.train_split
    held_back = np.empty(0, np.int64)
    if len(rates) > 1:
        held_back = stratified_share(learnt, config.held_back_share, place.config.seed, at_least=0)
        learnt = learnt.only(np.setdiff1d(learnt.labelled, held_back))
    classifiers, training, count = _train(subject, learnt, rates)

    # The test images measure every classifier, but choose none.
    guesses, is_lost = _guesses(classifiers, subject.test, place)
    if all(is_lost):
        raise InputError(
            f"linear_sgd diverged with learning rate {min(config.learning_rates):g}: set smaller linear_sgd.learning_rates"
        )
    rows: list[dict[str, Any]] = []
    for (rate, decay), lost, of_classifier in zip(rates, is_lost, guesses, strict=True):
        found = accuracy(of_classifier, subject.test.labels)
        row = {
            "learning_rate": rate,
            "weight_decay": decay,
            "diverged": lost,
            "top1": round(found.top1, 4),
            "top5": round(found.top5, 4),
        }
        rows.append(row)
    chosen = 0
    choice = "there is one classifier"
    if len(held_back):
        held = extract(subject.encode, subject.train_split.only(held_back), place)
        held_guesses, _ = _guesses(classifiers, held, place)
        for row, of_classifier in zip(rows, held_guesses, strict=True):
            found = accuracy(of_classifier, held.labels)
            row["held_back_top1"] = round(found.top1, 4)
        # max returns the first of equal ones.
        usable = [number for number, lost in enumerate(is_lost) if not lost]
        chosen = max(usable, key=lambda number: rows[number]["held_back_top1"])
        choice = (
            f"the highest top-1 on {len(held.x)} training images that no classifier was trained on "
            f"({100 * config.held_back_share:g}% of each class); the first of equal ones"
        )
    return {
        "label": "linear, SGD",
        "figures": ["top1", "top5"],
        **score(guesses[chosen], subject.test),
        "classifiers": rows,
        "chosen": chosen,
        "choice": choice,
        "trained_on": count,
        "protocol": _describe(config, training),
    }


def _describe(config: LinearSGDConfig, training: Training) -> str:
    """Describe the training for a result."""
    views = "no augmentation"
    if config.augment:
        smallest, largest = config.crop_area
        views = f"random crops of {smallest:g} to {largest:g} of the area, flips"
    return (
        f"SGD, Nesterov momentum {config.momentum:g}, {config.epochs} epochs of {training.steps_per_epoch} steps of "
        f"{training.images_per_step} images, cosine from learning_rate x {training.images_per_step}/256, {views}, "
        "zero initial weights, last epoch"
    )


def _train(subject: Subject, split: Split, rates: list[tuple[float, float]]) -> tuple[Classifiers, Training, int]:
    """Train a classifier for each (learning rate, weight decay). Also returns the training and its number of images."""
    place = subject.place
    config = place.config.linear_sgd
    # Without augmentation an image has the same features in each epoch.
    stored = None
    count = len(split.labelled)
    if not config.augment:
        stored = extract(subject.encode, split, place)
        count = len(stored.x)
    training = plan_training(
        count,
        place,
        epochs=config.epochs,
        images_per_step=config.images_per_step,
        rates=rates,
        momentum=config.momentum,
    )
    if stored is None:
        batches = augmented_batches(split, training, config.crop_area, place)
    else:
        batches = stored_batches(stored, training, place)
    num_features = subject.test.x.shape[1]
    classifiers = Classifiers(num_features, len(split.class_names), len(rates)).to(place.device)
    # The training is part of the identity, so that no progress of other settings is continued.
    train_classifiers(
        classifiers,
        training,
        batches,
        place,
        encode=subject.encode if stored is None else None,
        state_path=subject.state_path,
        identity=f"{subject.identity} {training}",
        title="linear, SGD",
    )
    return classifiers, training, count


def _guesses(classifiers: Classifiers, features: Features, place: Place) -> tuple[list[Tensor], list[bool]]:
    """Return the five best guesses (n, 5) of each classifier, and whether its logits are not all finite."""
    guesses: list[list[Tensor]] = [[] for _ in classifiers.weights]
    has_diverged = [False] * len(guesses)
    with torch.inference_mode():
        # In parts, because many classifiers have many logits.
        for part in features.x.split(_PART):
            for number, logits in enumerate(classifiers(part.to(place.device))):
                guesses[number].append(top_guesses(logits))
                has_diverged[number] |= not bool(logits.isfinite().all())
    return [torch.cat(parts) for parts in guesses], has_diverged


LINEAR_SGD = Protocol(_measure, needs="loader", settings=("seed", "linear_sgd.", "evaluate.images_per_batch"))
