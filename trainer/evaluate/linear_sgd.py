"""Linear classifier on a frozen encoder, as is usual for ImageNet, with many learning rates and weight decays in one pass."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.evaluate.classifiers import (
    Classifiers,
    Training,
    augmented_batches,
    diverged,
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
    is_lost = diverged(classifiers)
    if all(is_lost):
        raise InputError(
            f"linear_sgd diverged with learning rate {min(config.learning_rates):g}: set smaller linear_sgd.learning_rates"
        )

    guesses = _guesses(classifiers, subject.test, place)
    rows: list[dict[str, Any]] = []
    for (rate, decay), lost, of_classifier in zip(rates, is_lost, guesses, strict=True):
        found = accuracy(of_classifier, subject.test.labels)
        row = {"learning_rate": rate, "weight_decay": decay, "diverged": lost}
        rows.append({**row, "top1": round(found.top1, 4), "top5": round(found.top5, 4)})
    chosen, choice = 0, "there is one classifier"
    if len(held_back):
        held = extract(subject.encode, subject.train_split.only(held_back), place)
        for row, of_classifier in zip(rows, _guesses(classifiers, held, place), strict=True):
            row["held_back_top1"] = round(accuracy(of_classifier, held.labels).top1, 4)
        # max returns the first of equal ones.
        usable = [number for number, lost in enumerate(is_lost) if not lost]
        chosen = max(usable, key=lambda number: rows[number]["held_back_top1"])
        choice = (
            f"the highest top-1 on {len(held.x)} training images that no classifier was trained on "
            f"({100 * config.held_back_share:g}% of each class); the first of equal ones"
        )
    views = f"random crops of {config.crop_area[0]:g} to {config.crop_area[1]:g} of the area, flips"
    return {
        "label": "linear, SGD",
        "figures": ["top1", "top5"],
        **score(guesses[chosen], subject.test),
        "classifiers": rows,
        "chosen": chosen,
        "choice": choice,
        "trained_on": count,
        "protocol": f"SGD, Nesterov momentum {config.momentum:g}, {config.epochs} epochs of {training.steps_per_epoch} steps "
        f"of {training.images_per_step} images, cosine from learning_rate x {training.images_per_step}/256, "
        f"{views if config.augment else 'no augmentation'}, zero initial weights, last epoch",
    }


def _train(subject: Subject, split: Split, rates: list[tuple[float, float]]) -> tuple[Classifiers, Training, int]:
    """Train a classifier for each (learning rate, weight decay). Also returns the training and its number of images."""
    place = subject.place
    config = place.config.linear_sgd
    stored = None if config.augment else extract(subject.encode, split, place)
    count = len(split.labelled) if stored is None else len(stored.x)
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
    classifiers = Classifiers(subject.test.x.shape[1], len(split.class_names), len(rates)).to(place.device)
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


def _guesses(classifiers: Classifiers, features: Features, place: Place) -> list[Tensor]:
    """Return the five best guesses (n, 5) of each classifier."""
    with torch.inference_mode():
        # In parts, because many classifiers have many logits.
        parts = [
            [top_guesses(logits) for logits in classifiers(part.to(place.device))] for part in features.x.split(_PART)
        ]
    return [torch.cat(of_classifier) for of_classifier in zip(*parts, strict=True)]


LINEAR_SGD = Protocol(_measure, needs="loader", settings=("seed", "linear_sgd.", "evaluate.images_per_batch"))
