"""Group `evaluation`: every image counts once, and the accuracies are those of plain numpy.

Shapes: n images, F features, C classes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from trainer.config.evaluation import EvaluateConfig, LinearConfig
from trainer.config.schema import Config, DataConfig, ViewsConfig
from trainer.evaluate import features, knn, linear, scores
from trainer.evaluate.features import Features, Split, extract, open_split, raw_pixels, trained_encoder
from trainer.models.networks import build_encoder_network
from trainer.verify.check import EXACT, Item, Measured, Place, largest, relative_error
from trainer.verify.pictures import demo_root
from trainer.verify.training import tiny_config

_IMAGES = 101  # a prime, so that neither batches nor ranks divide it
_BATCH = 16
_SIZE = 28  # pixels of the demo's photographs, which are then not resized


def evaluation_items(place: Place) -> Iterator[Item]:
    """Yield the checks of a single process."""
    device = place.device
    yield "each image of a split counts once, in batches that do not divide it", partial(_each_image_once, place)
    yield "the batch size changes no feature, and encoding no statistics", partial(_frozen, place)
    yield "k nearest neighbours, also in several blocks", partial(_neighbours, device)
    yield "k-NN, majority vote", partial(_knn, device)
    yield "k-NN, weighted vote by cosine", partial(_knn_cosine, device)
    yield "linear probe, Adam on softmax regression", partial(_linear_probe, device)
    yield "features standardised for the linear probe", _standardised
    yield "top-1, top-5 and accuracy of each class", _scores


def evaluation_of_ranks(place: Place) -> Iterator[Item]:
    """Yield the checks that all ranks make together."""
    yield "each image of a split counts once over the ranks", partial(_each_image_once, place)


# --- features ---


def _config(batch: int = _BATCH) -> Config:
    return Config(
        precision="fp32",
        timeout_minutes=1.0,
        data=DataConfig(root=str(demo_root()), test_split="test"),
        views=ViewsConfig(num_views=2, size=_SIZE, eval_resize=_SIZE),
        evaluate=EvaluateConfig(images_per_batch=batch),
    )


def _split(place: features.Place) -> Split:
    """Open the demo's test split, in which only some images have labels, so that only they count."""
    split = open_split("test", place)
    every_second = slice(7, 7 + 2 * _IMAGES, 2)
    return split.only(split.labelled[every_second])


def _each_image_once(place: Place) -> Measured:
    """Count the images that are missing, repeated, in another order, or have other pixels or labels than their file."""
    evaluated = features.Place(_config(), place.ranks, place.device)
    split = _split(evaluated)
    found = extract(raw_pixels, split, evaluated)
    if found.ids.tolist() != split.labelled.tolist() or len(found.x) != _IMAGES:
        raise ValueError(f"{len(found.x)} images were encoded, not the {_IMAGES} of the split in their order")
    labels = split.index.labels[split.labelled]
    wrong = int((found.labels.numpy() != labels).sum())
    for number, x in zip(split.labelled, found.x, strict=True):
        encoded = split.index.read(int(number))
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        # The features of `raw_pixels` are planes of values in 0..1, one channel after the other.
        planes = np.asarray(image, np.float64).transpose(2, 0, 1)
        pixels = planes.reshape(-1) / 255
        difference = np.abs(pixels - x.numpy()).mean()
        # A decoder may differ by rounding, another image differs by far more.
        wrong += int(difference > 0.005)
    # Every rank holds the whole split, so its accuracy has the right denominator. Ten guesses are made wrong.
    guesses = found.labels.clone()
    guesses[:10] = (guesses[:10] + 1) % len(found.class_names)
    error = _error_of_top1(guesses, found, _IMAGES - 10)
    return Measured(wrong + error, EXACT)


def _error_of_top1(guesses: torch.Tensor, test: Features, right: int) -> float:
    """Return the difference, in percent, of the program's top-1 accuracy from a count of right guesses."""
    found = scores.score(guesses[:, None], test)["top1"]
    # The program rounds accuracies to four digits.
    expected = round(100 * right / len(test.labels), 4)
    return abs(found - expected)


def _frozen(place: Place) -> Measured:
    """Encode in two batch sizes: the features are those of one image at a time, and BatchNorm keeps its statistics."""
    config = tiny_config("wmse", images=16)
    # The encoder of a training, as an evaluation builds it.
    model = build_encoder_network(config).to(place.device)
    # One batch in training mode moves the statistics from their initial values.
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (16, 3, _SIZE, _SIZE), dtype=torch.uint8, generator=generator)
    model(pixels.to(place.device))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for batch in (_BATCH, 1):
        evaluated = features.Place(_config(batch), place.ranks, place.device)
        split = _split(evaluated)
        encoded = extract(trained_encoder(model), split, evaluated)
        found.append(encoded.x)
    errors = [relative_error(*found)]
    for name, value in model.state_dict().items():
        change = (value - before[name]).abs().max()
        errors.append(change.item())
    return Measured(largest(*errors), 1e-4)


# --- k-NN ---


def _clusters(seed: int, count: int, classes: int = 7, size: int = 12) -> Features:
    """Draw features (n, F) around one centre for each class, which overlap, so that votes tie."""
    # Both sets of images share the centres, so these have a seed of their own.
    centres = np.random.default_rng(0).normal(0, 1, (classes, size))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    noise = rng.normal(0, 1.2, (count, size))
    x = centres[labels] + noise + 3
    return Features(
        x=torch.from_numpy(x).float(),
        labels=torch.from_numpy(labels),
        class_names=[f"class {number}" for number in range(classes)],
        skipped=0,
    )


def _float64(images: Features) -> NDArray[np.float64]:
    """Return features (n, F) in float64, in which all expected values are computed."""
    return images.x.numpy().astype(np.float64)


def _sorted_neighbours(train: Features, test: Features, k: int, *, cosine: bool) -> tuple[NDArray, NDArray]:
    """Return similarities and numbers of the k nearest training rows of each test row, nearest first, (n, k) each."""
    # A list of all distances needs no selection that could be wrong.
    bank = _float64(train)
    similarities = []
    for row in _float64(test):
        if cosine:
            lengths = np.linalg.norm(bank, axis=1) * np.linalg.norm(row)
            similarities.append(bank @ row / lengths)
        else:
            distances = ((bank - row) ** 2).sum(1)
            similarities.append(-distances)
    table = np.stack(similarities)
    numbers = np.argsort(-table, axis=1)[:, :k]
    return np.take_along_axis(table, numbers, 1), numbers


def _neighbours(device: torch.device) -> Measured:
    """Count the neighbours that differ from a sorted list of all distances, when the training images fill three blocks."""
    train = _clusters(1, 300)
    test = _clusters(2, 50)
    blocks = knn._TRAIN_BLOCK
    metrics: tuple[knn.Metric, ...] = ("euclidean", "cosine")
    different = 0
    try:
        for block in (128, blocks):
            knn._TRAIN_BLOCK = block
            for metric in metrics:
                _, found = knn.nearest_images(train.x, test.x, 5, metric, device)
                _, expected = _sorted_neighbours(train, test, 5, cosine=metric == "cosine")
                different += int((found.numpy() != expected).sum())
    finally:
        knn._TRAIN_BLOCK = blocks
    return Measured(different, EXACT)


def _knn(device: torch.device) -> Measured:
    """Compare the accuracy in percent with votes that are counted one by one; ties go to the smallest label."""
    train = _clusters(1, 300)
    test = _clusters(2, 151)
    num_classes = len(train.class_names)
    found = knn.nearest_neighbours(train, test, 5, "euclidean", device)
    guesses = knn.majority_vote(found.labels, num_classes)

    _, numbers = _sorted_neighbours(train, test, 5, cosine=False)
    train_labels = train.labels.numpy()
    right = 0
    for row, label in zip(numbers, test.labels.tolist(), strict=True):
        votes = np.bincount(train_labels[row], minlength=num_classes)
        # argmax returns the first of equal numbers, thus the smallest label.
        right += int(votes.argmax()) == label
    return Measured(_error_of_top1(guesses, test, right), EXACT)


def _knn_cosine(device: torch.device) -> Measured:
    """Compare the accuracy in percent with weights that are added up one by one."""
    train = _clusters(1, 300)
    test = _clusters(2, 151)
    num_classes = len(train.class_names)
    temperature = 0.07
    found = knn.nearest_neighbours(train, test, 20, "cosine", device)
    guesses = knn.weighted_vote(found.scores, found.labels, num_classes, temperature)

    similarities, numbers = _sorted_neighbours(train, test, 20, cosine=True)
    all_weights = np.exp(similarities / temperature)
    right = 0
    for weights, row, label in zip(all_weights, numbers, test.labels.tolist(), strict=True):
        votes = np.zeros(num_classes)
        for weight, number in zip(weights, row, strict=True):
            votes[train.labels[number]] += weight
        right += int(votes.argmax()) == label
    return Measured(_error_of_top1(guesses, test, right), EXACT)


# --- the linear probe ---


def _linear_probe(device: torch.device) -> Measured:
    """Compare the first guesses with those of softmax regression in numpy: the share of images that differ.

    The two compute in float32 and float64, so that a few guesses between two classes may differ."""
    train = _clusters(1, 300)
    test = _clusters(2, 151)
    config = LinearConfig(
        epochs=8,
        batch_size=64,
        rate_start=0.05,
        rate_end=0.005,
        weight_decay=1e-3,
    )
    guesses = linear.linear_probe(train, test, config, device, seed=3)
    expected = _numpy_probe(train, test, config, seed=3)
    different = guesses[:, 0].numpy() != expected
    return Measured(float(different.mean()), 0.02)


def _numpy_probe(train: Features, test: Features, config: LinearConfig, seed: int) -> NDArray:
    """Train softmax regression with Adam and coupled weight decay in float64, and return the best class of each test image."""
    x = _float64(train)  # (n, F)
    num_classes = len(train.class_names)
    y = np.eye(num_classes)[train.labels.numpy()]  # (n, C), one-hot
    # Only the random numbers are drawn as in the program: weights, bias, then the order of each epoch.
    generator = torch.Generator().manual_seed(seed)
    bound = x.shape[1] ** -0.5
    values: list[NDArray[np.float64]] = []
    for shape in ((num_classes, x.shape[1]), (num_classes,)):
        drawn = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        values.append(drawn.numpy().astype(np.float64))
    # Moments of Adam, of the weights and of the bias.
    first = [np.zeros_like(value) for value in values]
    second = [np.zeros_like(value) for value in values]
    t = 0
    decline = config.rate_end / config.rate_start
    for epoch in range(config.epochs):
        progress = epoch / (config.epochs - 1)
        rate = config.rate_start * decline**progress
        order = torch.randperm(len(x), generator=generator).numpy()
        for start in range(0, len(x), config.batch_size):
            rows = order[start : start + config.batch_size]
            # Softmax, with the largest logit subtracted so that exp cannot overflow.
            logits = x[rows] @ values[0].T + values[1]
            exponentials = np.exp(logits - logits.max(1, keepdims=True))
            p = exponentials / exponentials.sum(1, keepdims=True)
            # Gradient of the mean cross-entropy with respect to the logits.
            error = (p - y[rows]) / len(rows)
            gradients = (error.T @ x[rows], error.sum(0))
            t += 1
            for number, gradient in enumerate(gradients):
                g = gradient + config.weight_decay * values[number]
                first[number] = 0.9 * first[number] + 0.1 * g
                second[number] = 0.999 * second[number] + 0.001 * g**2
                mean = first[number] / (1 - 0.9**t)
                root = np.sqrt(second[number] / (1 - 0.999**t)) + 1e-8
                values[number] = values[number] - rate * mean / root
    logits = _float64(test) @ values[0].T + values[1]
    return logits.argmax(1)


def _standardised() -> Measured:
    """Compare with numpy; a constant feature becomes 0, and the test images are scaled as the training images."""
    train = _clusters(1, 300)
    test = _clusters(2, 50)
    constant = 4
    for split in (train, test):
        split.x[:, constant] = 2.5
    found = linear.standardise(train, test)

    x = _float64(train)
    mean = x.mean(0)
    deviation = x.std(0, ddof=1)
    deviation[constant] = np.inf
    errors = []
    for ours, split in zip(found, (train, test), strict=True):
        expected = (split.x.numpy() - mean) / deviation
        errors.append(relative_error(ours.x, torch.from_numpy(expected)))
    return Measured(largest(*errors), 1e-5)


def _scores() -> Measured:
    """Compare the figures of a result with counts, in percent. One class has no image."""
    logits = np.random.default_rng(0).normal(0, 1, (_IMAGES, 8))
    # The clusters have seven classes, so no image has the eighth.
    names = [f"class {number}" for number in range(8)]
    test = replace(_clusters(4, _IMAGES), class_names=names)
    guesses = scores.top_guesses(torch.from_numpy(logits))
    found: dict[str, Any] = scores.score(guesses, test)

    labels = test.labels.numpy()
    ranked = np.argsort(-logits, axis=1)
    right = ranked[:, 0] == labels
    in_first_five = (ranked[:, :5] == labels[:, None]).any(1)
    by_class = found["per_class_top1"]
    errors = [
        abs(found["top1"] - 100 * right.mean()),
        abs(found["top5"] - 100 * in_first_five.mean()),
        float(names[7] in by_class),
    ]
    for number in range(7):
        expected = 100 * right[labels == number].mean()
        errors.append(abs(by_class[names[number]] - expected))
    return Measured(max(errors), 1e-4)
