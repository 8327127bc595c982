"""Compare a data set on the disk with what the recipe was published for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import Config
from trainer.data.class_list import read_class_list
from trainer.data.index import Index, open_images
from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.files import shipped_folder

# Facts about the data sets by the beginning of the names of their recipes. The numbers of training images are in the recipes.
SETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("sets.json").read_text())


def facts_of(name: str) -> dict[str, Any]:
    """Return the facts about the data set of a recipe; empty if none are known."""
    return next((facts for start, facts in SETS.items() if name.startswith(start)), {})


def check_data(config: Config, name: str, recipe: Config) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Open all splits, which indexes a folder of images. Returns {split: facts found}, and the differences from the recipe.

    Raises InputError if a split is missing."""
    facts = facts_of(name)
    data = config.data
    wanted_images = {
        data.train_split: facts.get("train_images", recipe.data.expected_images),
        data.probe_split: facts.get("probe_images", 0),
        data.test_split: facts.get("test_images", 0),
    }
    found: dict[str, dict[str, Any]] = {}
    differences: list[str] = []
    for split, images in wanted_images.items():
        # Without a probe split, the evaluation learns from the training split.
        if not split:
            continue
        index = open_images(data, split, progress=True)
        names = _names_with_images(index)
        found[split] = {
            "images": len(index),
            "classes": len(names),
            "fingerprint": index.fingerprint,
        }
        # Each comparison is left out where nothing is published about the set.
        if images not in (0, len(index)):
            differences.append(f"images of {split}: {images} -> {len(index)}")
        if facts.get("classes", len(names)) != len(names):
            differences.append(f"classes of {split}: {facts['classes']} -> {len(names)}")
        if "class_list" in facts:
            differences += _other_names(split, names, shipped_folder("configs") / facts["class_list"])
        stored = facts.get("digests", {}).get(split)
        if stored not in (None, index.fingerprint):
            differences.append(f"digest of {split}: {stored} -> {index.fingerprint}")
    return found, differences


def _names_with_images(index: Index) -> list[str]:
    """Return the names of the classes that have images."""
    is_labelled = index.labels >= 0
    numbers = np.unique(index.labels[is_labelled])
    return [index.class_names[number] for number in numbers]


def _other_names(split: str, names: list[str], class_list: Path) -> list[str]:
    """Compare the names of classes with a list in configs/."""
    # The list names classes that the set must have, so a missing one is an error of reading it.
    try:
        listed = read_class_list(class_list, names)
    except InputError as error:
        reason = str(error).replace(str(class_list), class_list.name)  # reproduction.json names no folders
        return [f"names of the classes of {split}: {reason}"]
    others = sorted(set(names) - set(listed))
    if not others:
        return []
    shown = ", ".join(map(printable, others[:3]))
    return [f"names of the classes of {split}: {len(others)} are not in {class_list.name}, such as {shown}"]
