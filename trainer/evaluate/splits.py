"""The two splits of an evaluation, opened and checked before anything is encoded. Classes are compared by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.data.index import describe_labels
from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.evaluate.features import Place, Split, open_split

_log = logging.getLogger(__name__)


def open_splits(place: Place) -> tuple[Split, Split]:
    """Open what the probe and k-NN learn from, and what they are tested on, the latter in the class numbers of the former.

    Every rank calls this. Raises InputError for splits that no figure can be had of."""
    data = place.config.data
    test = open_split(data.test_split, place)
    train = open_split(data.probe_split or data.train_split, place)
    test = in_classes_of(train, test)
    learnt, tested = classes_with_images(train), classes_with_images(test)
    if len(learnt) < 2:
        raise InputError(
            f"the split {train.name!r} in {data.root} has labelled images of one class only ({_some(train, learnt)}), of which "
            f"any encoder gets all right: sort them into a folder for each class, {train.name}/CLASS/IMAGE"
        )
    if not set(learnt) & set(tested):
        raise InputError(
            f"the splits {train.name!r} and {test.name!r} in {data.root} have no class in common: the one has images of "
            f"{_some(train, learnt)}, the other of {_some(test, tested)}; give both the same names"
        )
    if place.ranks.is_first:
        for split in (train, test):
            _log.info("split %s: %d images, %s", split.name, len(split.labels), describe_labels(split.labels))
        for line in _warnings(train, test):
            _log.warning("%s", line)
    return train, test


def in_classes_of(train: Split, test: Split) -> Split:
    """The test split with the training split's class numbers, found by name; classes that only it has follow behind them."""
    names = list(dict.fromkeys([*train.class_names, *test.class_names]))
    number = {name: i for i, name in enumerate(names)}
    numbers = np.array([number[name] for name in test.class_names], np.int64)
    return replace(test, labels=np.where(test.labels < 0, -1, numbers[test.labels]), class_names=names)


def classes_with_images(split: Split) -> list[int]:
    """Numbers of the classes that have a labelled image, rising."""
    return np.unique(split.labels[split.labelled]).tolist()


def unusable_files(split: Split) -> int:
    """Files that were left out when the split was indexed or prepared: they are named in a list beside the index."""
    listed = split.index.path.with_suffix(".bad.txt")
    return len(listed.read_bytes().splitlines()) if listed.exists() else 0


def _warnings(train: Split, test: Split) -> list[str]:
    learnt, tested = classes_with_images(train), classes_with_images(test)
    lines = [
        f"the split {split.name!r} has {count} files that are no usable pictures and do not count; "
        f"{split.index.path.with_suffix('.bad.txt')} names them"
        for split in (train, test)
        if (count := unusable_files(split))
    ]
    if untested := sorted(set(learnt) - set(tested)):
        lines.append(
            f"the split {test.name!r} has no image of {len(untested)} of the {len(learnt)} classes, which are not measured: "
            f"{_some(test, untested)}"
        )
    if unknown := sorted(set(tested) - set(learnt)):
        images = np.isin(test.labels, unknown).sum()
        lines.append(
            f"the split {train.name!r} has no image of {len(unknown)} classes of the split {test.name!r}, whose {images} "
            f"images count as wrong: {_some(test, unknown)}"
        )
    return lines


def _some(split: Split, numbers: Sequence[int]) -> str:
    names = ", ".join(printable(split.class_names[number]) for number in numbers[:10])
    return names + (", ..." if len(numbers) > 10 else "")
