"""The labels of samples in tar shards: a number in KEY.cls or, from other tools, a value in KEY.json or a number in KEY.txt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.printable import printable
from trainer.errors import InputError

JSON_KEYS = ("label", "cls", "class", "class_id", "target")  # the first of them that holds a number or a text counts
_MOST_DIGITS = 9  # so that a label fits into 32 bits
_NUMBER = re.compile(rf"\s*-?\d{{1,{_MOST_DIGITS}}}\s*", re.ASCII)


class TextLabel(NamedTuple):
    """The contents of KEY.txt: a label only if all of the split are numbers; otherwise they are captions."""

    number: int | None  # None: not a number


# What a sample holds: the number of a class, the name of a class, a KEY.txt, or None without any of them.
StoredLabel = int | str | TextLabel | None


def read_json_label(data: bytes, member: str) -> int | str | None:
    """Return the label in the object of a KEY.json, or None if it has none. Raises InputError naming the member."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{printable(member)}: cannot be read as JSON: {printable(str(error))[:200]}") from error
    if not isinstance(content, dict):
        return None
    for key in JSON_KEYS:
        value = content.get(key)
        if isinstance(value, str):
            return value
        # True and False are no class numbers, although they are integers in Python.
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if abs(value) >= 10**_MOST_DIGITS:
            raise InputError(f"{printable(member)}: the label {value} under {key!r} is too large")
        return value
    return None


def read_text_label(data: bytes) -> TextLabel:
    """Return the number that a KEY.txt holds, if it holds nothing else."""
    text = data.decode("utf-8", "replace")
    if not _NUMBER.fullmatch(text):
        return TextLabel(None)
    return TextLabel(int(text))


def number_labels(
    stored: Sequence[StoredLabel],
    class_names: list[str] | None,
    display_names: Sequence[str],
    max_classes: int,
    names_of_train: Callable[[], list[str] | None] = lambda: None,
) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Return the labels of a split as numbers, (n,) with -1 for none, and the name of each class.

    stored, display_names: one entry for each image, the latter for messages. class_names: None: the classes are named by their
    numbers or, if the labels are texts, those of `names_of_train` or the texts themselves, sorted; at most `max_classes`.
    Raises InputError naming an image whose label is not a class.
    """
    labels = _plain_labels(stored)
    names = {label for label in labels if isinstance(label, str)}
    # Some tools write numbers as texts in KEY.json.
    if names and all(map(_NUMBER.fullmatch, names)):
        labels = list(map(int, labels))
    elif names:
        if class_names is None:
            class_names = names_of_train() or sorted(names)
            _check_number_of_classes(len(class_names), max_classes)
        labels = _find_numbers(labels, class_names, display_names)
    numbers = np.array(labels, "<i4")
    return numbers, _name_classes(numbers, class_names, display_names, max_classes)


def _plain_labels(stored: Sequence[StoredLabel]) -> list[int | str]:
    """Return the number or the name of each label; -1 for none."""
    texts = [label for label in stored if isinstance(label, TextLabel)]
    # One text that is no number shows that all of them are captions.
    are_captions = any(text.number is None for text in texts)
    labels: list[int | str] = []
    for label in stored:
        if isinstance(label, TextLabel):
            label = None if are_captions else label.number
        labels.append(-1 if label is None else label)
    return labels


def _find_numbers(
    labels: Sequence[int | str],
    class_names: list[str],
    display_names: Sequence[str],
) -> list[int | str]:
    """Replace the name of a class by its number. Raises InputError naming an image for an unknown name or a number."""
    numbers: dict[int | str, int | str] = {name: number for number, name in enumerate(class_names)}
    numbers[-1] = -1
    # A set with numbers and names would not say which class a number means.
    for label, name in zip(labels, display_names, strict=True):
        if isinstance(label, int) and label != -1:
            raise InputError(f"{name}: the label {label} is a number, but other labels are names of classes")
        if label not in numbers:
            shown = printable(str(label))[:100]
            raise InputError(f"{name}: the label {shown!r} is not one of the {len(class_names)} classes of the set")
    return [numbers[label] for label in labels]


def _check_number_of_classes(number: int, max_classes: int) -> None:
    if number > max_classes:
        raise InputError(f"the labels name {number} classes, more than data.max_classes {max_classes}: raise it")


def _name_classes(
    labels: npt.NDArray[np.int32],
    class_names: list[str] | None,
    display_names: Sequence[str],
    max_classes: int,
) -> list[str]:
    """Return the class names; if they are None, return the numbers of the classes as text, at most `max_classes`.

    Raises InputError naming an image whose label is not a class.
    """
    if class_names is None:
        # A single wrong label must not create millions of classes.
        num_classes = min(max(labels, default=-1) + 1, max_classes)
        class_names = [str(label) for label in range(num_classes)]
    # Labels are the numbers of classes; -1 means no label.
    wrong = np.flatnonzero((labels < -1) | (labels >= len(class_names)))
    if wrong.size:
        first = wrong[0]
        raise InputError(
            f"{display_names[first]}: label {labels[first]} is not one of the {len(class_names)} classes (-1: no label; "
            "data.max_classes limits their number if no dataset.json names them)"
        )
    return class_names
