"""Open and check the two splits of an evaluation before any image is encoded. Classes are compared by name."""

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

    Every rank calls this. Raises InputError if the splits cannot be used for an evaluation."""
    data = place.config.data
    # A test split is usually the smaller one, so its problems show sooner.
    test = open_split(data.test_split, place)
    train = open_split(data.probe_split or data.train_split, place)
    test = in_classes_of(train, test)
    learnt = classes_with_images(train)
    tested = classes_with_images(test)
    learnt_names = _some_names(train, learnt)
    if len(learnt) < 2:
        raise InputError(
            f"the split {train.name!r} in {data.root} has labelled images of one class only ({learnt_names}), on which "
            f"every encoder scores 100%: sort them into a folder for each class, {train.name}/CLASS/IMAGE"
        )
    # Every test image would count as wrong, whatever the encoder.
    if set(learnt).isdisjoint(tested):
        raise InputError(
            f"the splits {train.name!r} and {test.name!r} in {data.root} have no class in common: the first has images of "
            f"{learnt_names}, the second of {_some_names(test, tested)}; give both the same class names"
        )
    if place.ranks.is_first:
        for split in (train, test):
            _log.info("split %s: %d images, %s", split.name, len(split.labels), describe_labels(split.labels))
    differences = _class_differences(train, test)
    if differences and not place.config.evaluate.allow_differences:
        raise InputError(
            f"{differences[0]}. Every class must have images in both splits; to measure it nevertheless, set "
            "--evaluate.allow_differences true"
        )
    if place.ranks.is_first:
        for line in (*_unusable_files(train, test), *differences):
            _log.warning("%s", line)
    return train, test


def in_classes_of(train: Split, test: Split) -> Split:
    """Give the test split the class numbers of the training split, by class name.

    Classes that only the test split has get the numbers after those."""
    # A dict keeps the order of the names and drops the repetitions.
    names = list(dict.fromkeys([*train.class_names, *test.class_names]))
    number_of = {name: number for number, name in enumerate(names)}
    # Translate each label by a table: old number -> new number. -1 stays the label of an image without a class.
    new_numbers = np.array([number_of[name] for name in test.class_names], np.int64)
    labels = np.where(test.labels < 0, -1, new_numbers[test.labels])
    return replace(test, labels=labels, class_names=names)


def classes_with_images(split: Split) -> list[int]:
    """Return the numbers of the classes that have images, in increasing order."""
    labels = split.labels[split.labelled]
    return np.unique(labels).tolist()


def unusable_files(split: Split) -> int:
    """Count the files that were skipped when the split was indexed or prepared, by the list beside the index."""
    return split.index.count_unusable_files()


def _unusable_files(train: Split, test: Split) -> list[str]:
    """Describe the files of both splits that are not usable images."""
    lines = []
    for split in (train, test):
        count = unusable_files(split)
        if count:
            lines.append(
                f"the split {split.name!r} has {count} files that are not usable images and do not count; "
                f"{split.index.unusable_files} names them"
            )
    return lines


def _class_differences(train: Split, test: Split) -> list[str]:
    """Describe the classes of which only one of the splits has images."""
    lines = []
    learnt = classes_with_images(train)
    tested = classes_with_images(test)
    # The figures say nothing about these classes.
    untested = sorted(set(learnt) - set(tested))
    if untested:
        lines.append(
            f"the split {test.name!r} has no image of {len(untested)} of the {len(learnt)} classes, which are not measured: "
            f"{_some_names(test, untested)}"
        )
    # No classifier can guess these classes.
    unknown = sorted(set(tested) - set(learnt))
    if unknown:
        num_images = np.isin(test.labels, unknown).sum()
        lines.append(
            f"the split {train.name!r} has no image of {len(unknown)} classes of the split {test.name!r}, whose {num_images} "
            f"images count as wrong: {_some_names(test, unknown)}"
        )
    return lines


def _some_names(split: Split, numbers: Sequence[int]) -> str:
    """List the names of at most ten classes."""
    names = [printable(split.class_names[number]) for number in numbers[:10]]
    if len(numbers) > 10:
        names.append("...")
    return ", ".join(names)
