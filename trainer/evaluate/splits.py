"""Open and check the two splits of an evaluation before anything is encoded. Classes are compared by name."""

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
    """Open the split that the probe and k-NN learn from, and the test split with the class numbers of the first.

    Every rank calls this. Raises InputError for splits that can't be evaluated on."""
    data = place.config.data
    test = open_split(data.test_split, place)
    train = open_split(data.probe_split or data.train_split, place)
    test = in_classes_of(train, test)
    learnt, tested = classes_with_images(train), classes_with_images(test)
    if len(learnt) < 2:
        raise InputError(
            f"the split {train.name!r} in {data.root} has labelled images of one class only ({_some(train, learnt)}), on which "
            f"every encoder scores 100%: sort them into a folder for each class, {train.name}/CLASS/IMAGE"
        )
    if not set(learnt) & set(tested):
        raise InputError(
            f"the splits {train.name!r} and {test.name!r} in {data.root} have no class in common: the first has images of "
            f"{_some(train, learnt)}, the second of {_some(test, tested)}; give both the same class names"
        )
    if place.ranks.is_first:
        for split in (train, test):
            _log.info("split %s: %d images, %s", split.name, len(split.labels), describe_labels(split.labels))
        for line in _warnings(train, test):
            _log.warning("%s", line)
    return train, test


def in_classes_of(train: Split, test: Split) -> Split:
    """Give the test split the training split's class numbers, by class name; classes that only it has follow after those."""
    names = list(dict.fromkeys([*train.class_names, *test.class_names]))
    number = {name: i for i, name in enumerate(names)}
    numbers = np.array([number[name] for name in test.class_names], np.int64)
    return replace(test, labels=np.where(test.labels < 0, -1, numbers[test.labels]), class_names=names)


def classes_with_images(split: Split) -> list[int]:
    """Return the numbers of the classes that have images, ascending."""
    return np.unique(split.labels[split.labelled]).tolist()


def unusable_files(split: Split) -> int:
    """Count the files that were skipped when the split was indexed or prepared, from the list beside the index."""
    listed = split.index.path.with_suffix(".skipped.txt")
    return len(listed.read_bytes().splitlines()) if listed.exists() else 0


def _warnings(train: Split, test: Split) -> list[str]:
    learnt, tested = classes_with_images(train), classes_with_images(test)
    lines = [
        f"the split {split.name!r} has {count} files that are not usable images and do not count; "
        f"{split.index.path.with_suffix('.skipped.txt')} names them"
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
