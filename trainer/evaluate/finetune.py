"""Fine-tune the whole encoder on a share of the labels, as SimCLR (section 4.3) and BYOL (section 4.2) report."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.evaluation import FinetuneConfig
from trainer.config.schema import Config
from trainer.errors import InputError
from trainer.evaluate.classifiers import Classifiers, augmented_batches, plan_training, train_classifiers
from trainer.evaluate.features import NotFiniteError, Split, extract
from trainer.evaluate.linear import add_share, share_name
from trainer.evaluate.protocol import Protocol, Subject
from trainer.evaluate.scores import score, top_guesses
from trainer.evaluate.subsets import stratified_share
from trainer.export.classifier import Classifier, save_classifier
from trainer.export.encoder import Encoder, Preprocess

_log = logging.getLogger(__name__)


def _measure(subject: Subject) -> dict[str, Any]:
    """Fine-tune a copy of the encoder on each share of the labels."""
    place = subject.place
    config = place.config.finetune
    result: dict[str, Any] = {"label": "fine-tuned", "figures": [], "shares": {}}
    for share, epochs in zip(config.shares, config.epochs, strict=True):
        name = share_name(share)
        ids = stratified_share(subject.train_split, share, place.config.seed)
        split = subject.train_split.only(ids)
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
        # Each share begins with the encoder as it was pre-trained.
        encoder = _trainable_copy(subject.encode)
        num_features = subject.test.x.shape[1]
        classifier = Classifiers(num_features, len(split.class_names), 1).to(place.device)
        batches = augmented_batches(split, training, config.crop_area, place)
        train_classifiers(
            classifier,
            training,
            batches,
            place,
            encoder=encoder,
            title=f"fine-tune, {name}",
        )
        # The encoder has changed, so the test images have other features than `subject.test`.
        try:
            test = extract(encoder.eval(), subject.test_split, place)
        except NotFiniteError as error:
            raise InputError(
                f"fine-tuning on {name} of the labels diverged with learning rate {config.learning_rate:g}: set a smaller "
                "finetune.learning_rate"
            ) from error
        with torch.inference_mode():
            logits = classifier(test.x.to(place.device))
        # The only one of the classifiers.
        guesses = top_guesses(logits[0])
        scores = {**score(guesses, test), "epochs": epochs}
        if config.save_to and place.ranks.is_first:
            _save(encoder, classifier, split.class_names, subject, _folder(config, share))
        add_share(result, name, len(split.labelled), scores)
    return {**result, "protocol": _describe(config)}


def _folder(config: FinetuneConfig, share: float) -> Path:
    return Path(config.save_to) / share_name(share)


def _save(network: nn.Module, classifier: Classifiers, class_names: list[str], subject: Subject, folder: Path) -> None:
    """Write the fine-tuned encoder and its classifier to a new folder."""
    config = subject.place.config
    # An encoder of another program names its model itself, if it has one.
    model = subject.encode.model if isinstance(subject.encode, Encoder) else config.model
    views = config.views
    preprocess = Preprocess(views.size, views.eval_resize, views.interpolation, views.mean, views.std)
    _, backbone = network.children()
    name = f"{config.model.backbone}, fine-tuned"
    encoder = Encoder(backbone, preprocess, name, model=model, class_names=class_names).freeze()
    head = nn.Linear(encoder.num_features, len(class_names), device=subject.place.device)
    head.load_state_dict({"weight": classifier.weights[0], "bias": classifier.biases[0]})
    save_classifier(Classifier(encoder, head, class_names), folder)
    _log.info("wrote the fine-tuned classifier to %s", folder)


def _describe(config: FinetuneConfig) -> str:
    """Describe the training for a result."""
    smallest, largest = config.crop_area
    return (
        f"SGD, Nesterov momentum {config.momentum:g}, at most {config.images_per_step} images a step, cosine from "
        f"{config.learning_rate:g} x images/256, weight decay {config.weight_decay:g}, random crops of {smallest:g} to "
        f"{largest:g} of the area, flips, zero initial classifier, last epoch"
    )


def _trainable_copy(encode: Any) -> nn.Module:
    """Copy the encoder, because other measurements need it as it was, with all parameters trainable."""
    normalize = copy.deepcopy(encode.normalize)
    encoder = copy.deepcopy(encode.encoder)
    network = nn.Sequential(normalize, encoder)
    # An encoder of another program comes with frozen weights.
    return network.requires_grad_(True).train()


def _check(config: Config, train: Split, test: Split) -> None:
    """Raise InputError if BatchNorm would learn from single images, or if gradients would underflow."""
    if config.evaluate.images_per_batch < 2 or config.finetune.images_per_step < 2:
        raise InputError(
            "finetune needs two images at a time for BatchNorm: set evaluate.images_per_batch and finetune.images_per_step to "
            "2 or more"
        )
    if config.finetune.save_to:
        # Before a training of hours.
        for share in config.finetune.shares:
            if (folder := _folder(config.finetune, share)).exists():
                raise InputError(f"{folder} exists: set finetune.save_to to another folder, or move it away")
    if config.evaluate.precision == "fp16":
        raise InputError("finetune does not scale the loss: set evaluate.precision to fp32 or bf16 instead of fp16")


FINETUNE = Protocol(
    _measure,
    check=_check,
    needs="loader",
    settings=("seed", "finetune.", "evaluate.images_per_batch"),
    trains_encoder=True,
)
