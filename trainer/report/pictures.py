"""Pictures of what an encoder has learnt: nearest neighbours of test images, and a map of their features.

Shapes: n images, F features.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer.data.decoding import decode
from trainer.data.index import Index, open_images
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.evaluate.encoders import RunEvaluator
from trainer.evaluate.features import Features, Split, evenly_spread, extract
from trainer.evaluate.knn import nearest_images
from trainer.export.plot import principal_axes
from trainer.report.plots import COLORS, OTHER, Curve, draw_map

_SHOWN = 8  # test images with neighbours
_NEIGHBOURS = 5
_MAPPED = 1000  # test images on the map
_THUMBNAIL = 96  # pixels
_PNG_BYTES = 1 << 19  # a larger picture of photographs becomes a JPEG
_OTHER_CLASSES = "other classes"


@dataclass(frozen=True)
class Thumbnail:
    """Image and its class. is_right: whether the class is that of the test image; None: the images have no classes."""

    uri: str
    name: str
    label: str
    is_right: bool | None = None


@dataclass(frozen=True)
class Pictures:
    """Neighbours and map of the features of one checkpoint."""

    checkpoint: str
    train: str
    """Images that the neighbours come from, as text."""
    mapped: str
    """Test images on the map, as text."""
    rows: list[tuple[Thumbnail, list[Thumbnail]]]
    """Test images, each with its nearest training images, the nearest first."""
    map: bytes
    legend: list[tuple[str, str]]
    """Colours and names of the classes on the map; empty: the images have no classes."""
    explained: float
    """Share of the variance that the two axes of the map explain."""


def draw_pictures(run_dir: Path, num_images: int) -> Pictures:
    """Encode at most `num_images` images of each split by the newest checkpoint, and draw.

    Raises InputError or OSError if the checkpoint or the images are missing."""
    evaluator = RunEvaluator(run_dir, [], Ranks())
    train_split, test_split, has_classes = _open_splits(evaluator)
    encode, source = evaluator.encoder("last")
    # A sample of the images is enough for pictures.
    train = extract(encode, _spread(train_split, num_images), evaluator.place)
    test = extract(encode, _spread(test_split, num_images), evaluator.place)

    nearest = find_neighbours(train, test, evaluator.place.device)
    rows = []
    for number in evenly_spread(len(test.ids), _SHOWN):
        shown = _thumbnail(test_split, int(test.ids[number]), has_classes)
        ids = [int(train.ids[train_number]) for train_number in nearest[number]]
        found = [_thumbnail(train_split, image_id, has_classes) for image_id in ids]
        # Without classes, no neighbour is right or wrong.
        if has_classes:
            found = [replace(each, is_right=each.label == shown.label) for each in found]
        rows.append((shown, found))

    # More points than these would cover each other.
    kept = torch.from_numpy(evenly_spread(len(test.ids), _MAPPED))
    positions, shares = principal_axes(test.x[kept].double().numpy())
    labels = None
    if has_classes:
        labels = [test.class_names[label] for label in test.labels[kept].tolist()]
    groups, legend = _groups(torch.from_numpy(positions), labels)
    return Pictures(
        checkpoint=source.name,
        train=_describe_images(len(train.ids), train_split),
        mapped=_describe_images(len(kept), test_split),
        rows=rows,
        map=draw_map(groups),
        legend=legend,
        explained=float(shares.sum()) / 100,
    )


def _describe_images(count: int, split: Split) -> str:
    """Say how many images of a split are shown."""
    return f"{count:,} of {len(split.labelled):,} images of the split {split.name!r}"


def _open_splits(evaluator: RunEvaluator) -> tuple[Split, Split, bool]:
    """Return the training split, the test split, and whether they have classes."""
    has_classes = True
    try:
        train_split, test_split = evaluator.splits
    except InputError:
        # Without labelled splits, every second training image stands for a test image.
        train_split, test_split = _halves(evaluator)
        evaluator.splits = (train_split, test_split)
        has_classes = False
    return train_split, test_split, has_classes


def data_uri(image: Image.Image) -> str:
    """Return a picture as a data URI: PNG, or JPEG if the PNG is large."""
    file = io.BytesIO()
    image.save(file, "png", optimize=True)
    kind = "png"
    if file.tell() > _PNG_BYTES:
        file = io.BytesIO()
        image.convert("RGB").save(file, "jpeg", quality=88)
        kind = "jpeg"
    encoded = base64.b64encode(file.getvalue()).decode()
    return f"data:image/{kind};base64,{encoded}"


def _halves(evaluator: RunEvaluator) -> tuple[Split, Split]:
    """Return the even and the odd images of the training split, all with the label 0."""
    data = evaluator.config.data
    index = open_images(data, data.train_split)
    # An evaluation only encodes images with a label, so each image gets one.
    labels = np.zeros(len(index), np.int64)
    class_names = index.class_names or [""]
    everything = Split(data.train_split, index, labels, class_names)
    ids = np.arange(len(index))
    return everything.only(ids[::2]), everything.only(ids[1::2])


def _spread(split: Split, most: int) -> Split:
    """Return the split with at most `most` of its labelled images."""
    ids = split.labelled
    # A split is often sorted by class, so its first images would show few classes.
    kept = evenly_spread(len(ids), most)
    return split.only(ids[kept])


def find_neighbours(train: Features, test: Features, device: torch.device) -> list[list[int]]:
    """Return for each test image the numbers of its nearest training images, the nearest first."""
    k = min(_NEIGHBOURS, len(train.x))
    _, numbers = nearest_images(train.x, test.x, k, "euclidean", device)
    return numbers.tolist()


def _thumbnail(split: Split, image_id: int, has_classes: bool) -> Thumbnail:
    label = ""
    if has_classes:
        label = split.class_names[split.labels[image_id]]
    image = _small(split.index, image_id)
    name = split.index.name(image_id)
    return Thumbnail(data_uri(image), name, label)


def _small(index: Index, image_id: int) -> Image.Image:
    """Return an image, at most 96 pixels wide and high."""
    # The decoder of the training gives the pixels that the encoder learnt from.
    image = Image.fromarray(decode(index.read(image_id)))
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return image


def _groups(positions: Tensor, labels: list[str] | None) -> tuple[list[Curve], list[tuple[str, str]]]:
    """Colour the most frequent classes; the others share one colour. Returns the points and the legend."""
    if labels is None:
        return [_points(positions, COLORS[0])], []
    counts = Counter(labels)
    most_frequent = counts.most_common(len(COLORS))
    colored = sorted(name for name, _ in most_frequent)
    groups: list[Curve] = []
    legend: list[tuple[str, str]] = []
    # The other classes come first, so that the coloured points are drawn over theirs.
    if len(counts) > len(colored):
        is_other = torch.tensor([label not in colored for label in labels])
        groups.append(_points(positions[is_other], OTHER))
        legend.append((OTHER, _OTHER_CLASSES))
    for color, name in zip(COLORS, colored, strict=False):
        is_own = torch.tensor([label == name for label in labels])
        groups.append(_points(positions[is_own], color))
        legend.append((color, name))
    return groups, legend


def _points(positions: Tensor, color: str) -> Curve:
    """Return positions (n, 2) as points of one colour."""
    x, y = positions.T.tolist()
    return Curve(x, y, color)
