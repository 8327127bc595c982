"""Train linear classifiers with SGD on all ranks: on a frozen encoder, together with the encoder, or on stored features.

Shapes: n images of a rank in a step, F features, C classes, H classifiers that are trained side by side.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from trainer.config.schema import ViewsConfig
from trainer.data.loader import ViewLoader, train_requests
from trainer.data.plan import Planner
from trainer.distributed.process_group import sum_over_ranks
from trainer.distributed.ranks import ImageRange
from trainer.errors import InputError
from trainer.evaluate.features import Encode, Features, Place, Split, in_precision
from trainer.files import atomic_write
from trainer.progress import with_progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """Plan of a training of classifiers. The learning rates are final: they are not scaled by the batch size any more."""

    epochs: int
    images_per_step: int
    """Global batch size, a multiple of the number of ranks."""
    steps_per_epoch: int
    rates: tuple[tuple[float, float], ...]
    """(learning rate, weight decay) of each classifier."""
    momentum: float


class Classifiers(nn.Module):
    """H linear classifiers of the same features. They start at zero, so that no random choice is involved."""

    def __init__(self, num_features: int, num_classes: int, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(num_classes, num_features) for _ in range(count))
        self.biases = nn.ParameterList(torch.zeros(num_classes) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (H, n, C) of features (n, F)."""
        # One product serves all classifiers.
        weight = torch.cat(list(self.weights))
        bias = torch.cat(list(self.biases))
        logits = functional.linear(x, weight, bias)
        return logits.unflatten(1, (len(self.weights), -1)).transpose(0, 1)


def plan_training(
    num_images: int,
    place: Place,
    *,
    epochs: int,
    images_per_step: int,
    rates: list[tuple[float, float]],
    momentum: float,
) -> Training:
    """Fit the batch size to the number of images and ranks, and scale the learning rates by images_per_step/256.

    rates: (learning rate for 256 images a step, weight decay) of each classifier."""
    world_size = place.ranks.world_size
    # A small training set is one batch. Every rank gets the same number of images.
    batch = min(images_per_step, num_images) // world_size * world_size
    if batch == 0:
        raise InputError(f"{num_images} training images are too few for {world_size} ranks: start at most {num_images}")
    scaled = tuple((rate * batch / 256, decay) for rate, decay in rates)
    return Training(epochs, batch, num_images // batch, scaled, momentum)


Batches = Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]
"""Function from the first and the end step to the batches: (pixels or features, labels (n,) with -1 for none) of this rank."""


def augmented_batches(split: Split, training: Training, crop_area: tuple[float, float], place: Place) -> Batches:
    """Return the batches of random crops and flips, uint8 (n, 3, S, S), by the plan and the loader of the pre-training."""
    # Same size, interpolation and probability of a flip as in the pre-training, but no other augmentation.
    recipe = replace(
        place.config.views,
        num_views=1,
        crop_area=crop_area,
        color_probability=0.0,
        gray_probability=0.0,
        blur_probability=0.0,
        solarize_probability=0.0,
    )
    ids = split.labelled
    planner = _planner(recipe, len(ids), training, place)

    def batches(first_step: int, end_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        loader = ViewLoader(
            split.index,
            recipe,
            place.config.data,
            train_requests(planner, image_ids=ids),
            batch_size=planner.images.count,
            device=place.device,
            first_step=first_step,
            end_step=end_step,
        )
        for batch in loader:
            # An image that replaces an unusable one may have no label here; then it does not count.
            yield batch.views, torch.from_numpy(split.labels[batch.image_ids])

    return batches


def stored_batches(features: Features, training: Training, place: Place) -> Batches:
    """Return the batches of features (n, F) that are computed already, in the random order of each epoch."""
    planner = _planner(place.config.views, len(features.x), training, place)

    def batches(first_step: int, end_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(first_step, end_step):
            rows = torch.from_numpy(planner.image_ids(step))
            yield features.x[rows], features.labels[rows]

    return batches


def _planner(recipe: ViewsConfig, num_images: int, training: Training, place: Place) -> Planner:
    """Return the plan of this rank, which trains on an equal part of each batch."""
    count = training.images_per_step // place.ranks.world_size
    return Planner(
        recipe,
        seed=place.config.seed,
        num_images=num_images,
        images_per_step=training.images_per_step,
        images=ImageRange(place.ranks.rank * count, count),
    )


def train_classifiers(
    classifiers: Classifiers,
    training: Training,
    batches: Batches,
    place: Place,
    *,
    encode: Encode | None = None,
    encoder: nn.Module | None = None,
    state_path: Path | None = None,
    identity: str = "",
    title: str = "",
) -> None:
    """Train the classifiers with SGD (Nesterov momentum) and a cosine schedule without warm-up. Every rank calls this.

    encode: computes features of pixels, without a gradient. encoder: is trained as well, with the rate of the only
    classifier. Without both, the batches are features.
    state_path: the progress is kept there after each epoch, and an interrupted training of the same `identity` continues
    from it bit for bit. title: shown with the progress."""
    optimizer = _build_optimizer(classifiers, training, encoder)
    total = training.epochs * training.steps_per_epoch
    first_epoch = 0
    if state_path:
        first_epoch = _restore(state_path, identity, classifiers, optimizer, place)
    first_step = first_epoch * training.steps_per_epoch
    found = with_progress(
        batches(first_step, total),
        total - first_step,
        f"{title}, steps",
        place.ranks.is_first,
    )
    for step, (inputs, labels) in enumerate(found, first_step):
        # From 1 at the start to 0 after the last step.
        factor = (1 + math.cos(math.pi * step / total)) / 2
        for group, (rate, _) in zip(optimizer.param_groups, training.rates, strict=True):
            group["lr"] = rate * factor
        _add_gradients(classifiers, training, inputs, labels, place, encode=encode, encoder=encoder)
        _add_over_ranks(optimizer, place)
        optimizer.step()
        optimizer.zero_grad()
        epochs_done, rest = divmod(step + 1, training.steps_per_epoch)
        if state_path and rest == 0 and place.ranks.is_first:
            _keep(state_path, identity, epochs_done, classifiers, optimizer)
    if encoder is not None:
        _average_statistics(encoder, place)


def _build_optimizer(classifiers: Classifiers, training: Training, encoder: nn.Module | None) -> torch.optim.SGD:
    """Return the optimizer with a group of parameters for each classifier."""
    groups: list[dict[str, Any]] = []
    for weight, bias, (rate, decay) in zip(classifiers.weights, classifiers.biases, training.rates, strict=True):
        groups.append({"params": [weight, bias], "lr": rate, "weight_decay": decay})
    # An encoder is only trained with a single classifier.
    if encoder is not None:
        groups[0]["params"] += list(encoder.parameters())
    return torch.optim.SGD(
        groups,
        lr=0.0,
        momentum=training.momentum,
        nesterov=training.momentum > 0,
    )


def _add_gradients(
    classifiers: Classifiers,
    training: Training,
    inputs: Tensor,
    labels: Tensor,
    place: Place,
    *,
    encode: Encode | None,
    encoder: nn.Module | None,
) -> None:
    """Add this rank's gradients of one batch. encode, encoder: as for `train_classifiers`."""
    labels = labels.to(place.device)
    # Large batches go through the encoder in parts of nearly equal size, of two images or more, as BatchNorm needs.
    num_parts = math.ceil(len(inputs) / place.config.evaluate.images_per_batch)
    num_parts = max(1, min(num_parts, len(inputs) // 2))
    for part, part_labels in zip(inputs.tensor_split(num_parts), labels.tensor_split(num_parts), strict=True):
        features = _features(part.to(place.device), place, encode=encode, encoder=encoder)
        logits = classifiers(features).flatten(0, 1)
        # The sum over the classifiers gives each the gradient that it would have alone.
        repeated = part_labels.repeat(len(training.rates))
        loss = functional.cross_entropy(logits, repeated, ignore_index=-1, reduction="sum")
        (loss / training.images_per_step).backward()


def _features(inputs: Tensor, place: Place, *, encode: Encode | None, encoder: nn.Module | None) -> Tensor:
    """Return the features (n, F) of inputs, with a gradient if the encoder is trained."""
    if encoder is not None:
        with in_precision(place):
            return encoder(inputs).float()
    if encode is not None:
        with torch.no_grad(), in_precision(place):
            return encode(inputs).float()
    # The inputs are stored features.
    return inputs


def _add_over_ranks(optimizer: torch.optim.Optimizer, place: Place) -> None:
    """Add up the gradients of all ranks."""
    gradients = []
    for group in optimizer.param_groups:
        # A part of the encoder that the features do not depend on has no gradient.
        gradients += [parameter.grad for parameter in group["params"] if parameter.grad is not None]
    sum_over_ranks(gradients, place.ranks)


def _average_statistics(encoder: nn.Module, place: Place) -> None:
    """Give all ranks the mean of their BatchNorm statistics, so that they compute the same features."""
    # The counters of batches are integers and already equal.
    statistics = [buffer for buffer in encoder.buffers() if buffer.is_floating_point()]
    sum_over_ranks(statistics, place.ranks)
    for buffer in statistics:
        buffer /= place.ranks.world_size


# --- progress on the disk ---


def _keep(path: Path, identity: str, epoch: int, classifiers: Classifiers, optimizer: torch.optim.Optimizer) -> None:
    """Write the progress after `epoch` epochs. A failure only means that an interruption costs more: log it."""
    # The identity tells whether progress that is found later belongs to the same experiment.
    content = {
        "identity": identity,
        "epoch": epoch,
        "classifiers": classifiers.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
    }
    try:
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as file:
            torch.save(content, file)
    except OSError as error:
        _log.warning("cannot keep the progress in %s: %s", path, error.strerror)


def _restore(
    path: Path, identity: str, classifiers: Classifiers, optimizer: torch.optim.Optimizer, place: Place
) -> int:
    """Load the progress of an interrupted training, the same on all ranks. Returns the number of epochs that are done."""
    found: list[dict[str, Any] | None] = [_read(path, identity) if place.ranks.is_first else None]
    if place.ranks.world_size > 1:
        # Rank 0 reads the file for all, because a network file system may show it late to other nodes.
        dist.broadcast_object_list(found, src=0, device=place.device)
    content = found[0]
    if content is None:
        return 0
    classifiers.load_state_dict(content["classifiers"])
    # The options follow from the settings, so only the momentum is restored.
    options = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": content["optimizer"], "param_groups": options})
    if place.ranks.is_first:
        _log.info("continuing after epoch %d, from %s", content["epoch"], path)
    return int(content["epoch"])


def _read(path: Path, identity: str) -> dict[str, Any] | None:
    """Read the progress; None if there is none, or if it is damaged or of another measurement."""
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        is_same = content["identity"] == identity
    except Exception as error:  # torch.load raises many types for damaged files
        _log.warning("cannot read the progress in %s (%s): starting from the first epoch", path, type(error).__name__)
        return None
    if not is_same:
        _log.info("%s is the progress of another measurement: starting from the first epoch", path)
        return None
    return content
