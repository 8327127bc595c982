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
    return split.only(split.labelled[7 : 7 + 2 * _IMAGES : 2])


def _each_image_once(place: Place) -> Measured:
    """Count the images that are missing, repeated, in another order, or have other pixels or labels than their file."""
    evaluated = features.Place(_config(), place.ranks, place.device)
    split = _split(evaluated)
    found = extract(raw_pixels, split, evaluated)
    if found.ids.tolist() != split.labelled.tolist() or len(found.x) != _IMAGES:
        raise ValueError(f"{len(found.x)} images were encoded, not the {_IMAGES} of the split in their order")
    wrong = int((found.labels.numpy() != split.index.labels[split.labelled]).sum())
    for number, x in zip(split.labelled, found.x, strict=True):
        image = Image.open(io.BytesIO(split.index.read(int(number)))).convert("RGB")
        pixels = np.asarray(image, np.float64).transpose(2, 0, 1).reshape(-1) / 255
        # A decoder may differ by rounding, another image differs by far more.
        wrong += int(np.abs(pixels - x.numpy()).mean() > 0.005)
    # Every rank holds the whole split, so its accuracy has the right denominator.
    guesses = found.labels.clone()
    guesses[:10] = (guesses[:10] + 1) % len(found.class_names)
    top1 = scores.score(guesses[:, None], found)["top1"]
    return Measured(wrong + abs(top1 - round(100 * (_IMAGES - 10) / _IMAGES, 4)), EXACT)


def _frozen(place: Place) -> Measured:
    """Encode in two batch sizes: the features are those of one image at a time, and BatchNorm keeps its statistics."""
    config = tiny_config("wmse", images=16)
    model = build_encoder_network(config).to(place.device)
    # One batch in training mode moves the statistics from their initial values.
    generator = torch.Generator().manual_seed(0)
    model(torch.randint(0, 256, (16, 3, _SIZE, _SIZE), dtype=torch.uint8, generator=generator).to(place.device))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for batch in (_BATCH, 1):
        evaluated = features.Place(_config(batch), place.ranks, place.device)
        found.append(extract(trained_encoder(model), _split(evaluated), evaluated).x)
    changes = [(value - before[name]).abs().max().item() for name, value in model.state_dict().items()]
    return Measured(largest(relative_error(*found), *changes), 1e-4)


# --- k-NN ---


def _clusters(seed: int, count: int, classes: int = 7, size: int = 12) -> Features:
    """Draw features (n, F) around one centre for each class, which overlap, so that votes tie."""
    centres = np.random.default_rng(0).normal(0, 1, (classes, size))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    x = centres[labels] + rng.normal(0, 1.2, (count, size)) + 3
    return Features(
        x=torch.from_numpy(x).float(),
        labels=torch.from_numpy(labels),
        class_names=[f"class {number}" for number in range(classes)],
        skipped=0,
    )


def _sorted_neighbours(train: Features, test: Features, k: int, *, cosine: bool) -> tuple[NDArray, NDArray]:
    """Return similarities and numbers of the k nearest training rows of each test row, nearest first, (n, k) each."""
    similarities = []
    for row in test.x.numpy().astype(np.float64):
        bank = train.x.numpy().astype(np.float64)
        if cosine:
            lengths = np.linalg.norm(bank, axis=1) * np.linalg.norm(row)
            similarities.append(bank @ row / lengths)
        else:
            similarities.append(-((bank - row) ** 2).sum(1))
    table = np.stack(similarities)
    numbers = np.argsort(-table, axis=1)[:, :k]
    return np.take_along_axis(table, numbers, 1), numbers


def _neighbours(device: torch.device) -> Measured:
    """Count the neighbours that differ from a sorted list of all distances, when the training images fill three blocks."""
    train, test = _clusters(1, 300), _clusters(2, 50)
    blocks = knn._TRAIN_BLOCK
    different = 0
    try:
        for block in (128, blocks):
            knn._TRAIN_BLOCK = block
            for cosine in (False, True):
                metric: knn.Metric = "cosine" if cosine else "euclidean"
                _, found = knn.nearest_images(train.x, test.x, 5, metric, device)
                _, expected = _sorted_neighbours(train, test, 5, cosine=cosine)
                different += int((found.numpy() != expected).sum())
    finally:
        knn._TRAIN_BLOCK = blocks
    return Measured(different, EXACT)


def _knn(device: torch.device) -> Measured:
    """Compare the accuracy in percent with votes that are counted one by one; ties go to the smallest label."""
    train, test = _clusters(1, 300), _clusters(2, 151)
    found = knn.nearest_neighbours(train, test, 5, "euclidean", device)
    guesses = knn.majority_vote(found.labels, len(train.class_names))
    _, numbers = _sorted_neighbours(train, test, 5, cosine=False)
    right = 0
    for row, label in zip(numbers, test.labels.tolist(), strict=True):
        votes = np.bincount(train.labels.numpy()[row], minlength=len(train.class_names))
        right += int(votes.argmax()) == label
    return Measured(abs(scores.score(guesses[:, None], test)["top1"] - round(100 * right / 151, 4)), EXACT)


def _knn_cosine(device: torch.device) -> Measured:
    """Compare the accuracy in percent with weights that are added up one by one."""
    train, test = _clusters(1, 300), _clusters(2, 151)
    found = knn.nearest_neighbours(train, test, 20, "cosine", device)
    guesses = knn.weighted_vote(found.scores, found.labels, len(train.class_names), 0.07)
    similarities, numbers = _sorted_neighbours(train, test, 20, cosine=True)
    right = 0
    for weights, row, label in zip(np.exp(similarities / 0.07), numbers, test.labels.tolist(), strict=True):
        votes = np.zeros(len(train.class_names))
        for weight, number in zip(weights, row, strict=True):
            votes[train.labels[number]] += weight
        right += int(votes.argmax()) == label
    return Measured(abs(scores.score(guesses[:, None], test)["top1"] - round(100 * right / 151, 4)), EXACT)


# --- the linear probe ---


def _linear_probe(device: torch.device) -> Measured:
    """Compare the first guesses with those of softmax regression in numpy: the share of images that differ.

    The two compute in float32 and float64, so that a few guesses between two classes may differ."""
    train, test = _clusters(1, 300), _clusters(2, 151)
    config = LinearConfig(epochs=8, batch_size=64, rate_start=0.05, rate_end=0.005, weight_decay=1e-3)
    found = linear.linear_probe(train, test, config, device, seed=3)[:, 0].numpy()
    expected = _numpy_probe(train, test, config, seed=3)
    return Measured(float((found != expected).mean()), 0.02)


def _numpy_probe(train: Features, test: Features, config: LinearConfig, seed: int) -> NDArray:
    """Train softmax regression with Adam and coupled weight decay in float64, and return the best class of each test image."""
    x = train.x.numpy().astype(np.float64)
    y = np.eye(len(train.class_names))[train.labels.numpy()]
    # Only the random numbers are drawn as in the program: weights, bias, then the order of each epoch.
    generator = torch.Generator().manual_seed(seed)
    bound = x.shape[1] ** -0.5
    shapes = ((y.shape[1], x.shape[1]), (y.shape[1],))
    values = [torch.empty(shape).uniform_(-bound, bound, generator=generator).numpy() for shape in shapes]
    values = [value.astype(np.float64) for value in values]
    first = [np.zeros_like(value) for value in values]
    second = [np.zeros_like(value) for value in values]
    t = 0
    for epoch in range(config.epochs):
        rate = config.rate_start * (config.rate_end / config.rate_start) ** (epoch / (config.epochs - 1))
        order = torch.randperm(len(x), generator=generator).numpy()
        for start in range(0, len(x), config.batch_size):
            rows = order[start : start + config.batch_size]
            logits = x[rows] @ values[0].T + values[1]
            p = np.exp(logits - logits.max(1, keepdims=True))
            error = (p / p.sum(1, keepdims=True) - y[rows]) / len(rows)
            t += 1
            for number, gradient in enumerate((error.T @ x[rows], error.sum(0))):
                g = gradient + config.weight_decay * values[number]
                first[number] = 0.9 * first[number] + 0.1 * g
                second[number] = 0.999 * second[number] + 0.001 * g**2
                root = np.sqrt(second[number] / (1 - 0.999**t)) + 1e-8
                values[number] = values[number] - rate * first[number] / (1 - 0.9**t) / root
    return (test.x.numpy().astype(np.float64) @ values[0].T + values[1]).argmax(1)


def _standardised() -> Measured:
    """Compare with numpy; a constant feature becomes 0, and the test images are scaled as the training images."""
    train, test = _clusters(1, 300), _clusters(2, 50)
    train.x[:, 4] = test.x[:, 4] = 2.5
    found = linear.standardise(train, test)
    x = train.x.numpy().astype(np.float64)
    deviation = x.std(0, ddof=1)
    deviation[4] = np.inf
    errors = []
    for ours, split in zip(found, (train, test), strict=True):
        expected = (split.x.numpy() - x.mean(0)) / deviation
        errors.append(relative_error(ours.x, torch.from_numpy(expected)))
    return Measured(largest(*errors), 1e-5)


def _scores() -> Measured:
    """Compare the figures of a result with counts, in percent. One class has no image."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (_IMAGES, 8))
    test = replace(_clusters(4, _IMAGES), class_names=[f"class {number}" for number in range(8)])
    labels = test.labels.numpy()
    guesses = scores.top_guesses(torch.from_numpy(logits))
    found: dict[str, Any] = scores.score(guesses, test)
    ranked = np.argsort(-logits, axis=1)
    right = ranked[:, 0] == labels
    expected = {"top1": 100 * right.mean(), "top5": 100 * (ranked[:, :5] == labels[:, None]).any(1).mean()}
    errors = [abs(found[name] - value) for name, value in expected.items()]
    by_class = found["per_class_top1"]
    errors += [abs(by_class[f"class {c}"] - 100 * right[labels == c].mean()) for c in range(7)]
    errors.append(float("class 7" in by_class))
    return Measured(max(errors), 1e-4)
