"""Fine-tune the whole encoder on a share of the labels, as SimCLR (section 4.3) and BYOL (section 4.2) report."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from trainer.errors import InputError
from trainer.evaluate.classifiers import Classifiers, augmented_batches, plan_training, train_classifiers
from trainer.evaluate.features import NotFiniteError, extract
from trainer.evaluate.linear import add_share, share_name
from trainer.evaluate.protocol import Protocol, Subject
from trainer.evaluate.scores import score, top_guesses
from trainer.evaluate.subsets import stratified_share


def _measure(subject: Subject) -> dict[str, Any]:
    """Fine-tune a copy of the encoder on each share of the labels."""
    place = subject.place
    config = place.config.finetune
    result: dict[str, Any] = {"label": "fine-tuned", "figures": [], "shares": {}}
    for share, epochs in zip(config.shares, config.epochs, strict=True):
        name = share_name(share)
        split = subject.train_split.only(stratified_share(subject.train_split, share, place.config.seed))
        training = plan_training(
            len(split.labelled),
            place,
            epochs=epochs,
            images_per_step=config.images_per_step,
            rates=[(config.learning_rate, config.weight_decay)],
            momentum=config.momentum,
        )
        if training.images_per_step < 2 * place.ranks.world_size:
            raise InputError(
                f"fine-tuning on {name} of the labels has {len(split.labelled)} images for {place.ranks.world_size} ranks, but "
                "BatchNorm needs two images on each: set larger finetune.shares, or start fewer ranks"
            )
        encoder = _trainable_copy(subject.encode)
        classifier = Classifiers(subject.test.x.shape[1], len(split.class_names), 1).to(place.device)
        batches = augmented_batches(split, training, config.crop_area, place)
        train_classifiers(classifier, training, batches, place, encoder=encoder, title=f"fine-tune, {name}")
        try:
            test = extract(encoder.eval(), subject.test_split, place)
        except NotFiniteError as error:
            raise InputError(
                f"fine-tuning on {name} of the labels diverged with learning rate {config.learning_rate:g}: set a smaller "
                "finetune.learning_rate"
            ) from error
        with torch.inference_mode():
            guesses = top_guesses(classifier(test.x.to(place.device))[0])
        add_share(result, name, len(split.labelled), {**score(guesses, test), "epochs": epochs})
    return {
        **result,
        "protocol": f"SGD, Nesterov momentum {config.momentum:g}, at most {config.images_per_step} images a step, cosine from "
        f"{config.learning_rate:g} x images/256, weight decay {config.weight_decay:g}, random crops of "
        f"{config.crop_area[0]:g} to {config.crop_area[1]:g} of the area, flips, zero initial classifier, last epoch",
    }


def _trainable_copy(encode: Any) -> nn.Module:
    """Copy the encoder, because other measurements need it as it was, with all parameters trainable."""
    network = nn.Sequential(copy.deepcopy(encode.normalize), copy.deepcopy(encode.encoder))
    return network.requires_grad_(True).train()


FINETUNE = Protocol(
    _measure,
    needs="loader",
    settings=("seed", "finetune.", "evaluate.images_per_batch"),
    trains_encoder=True,
)
