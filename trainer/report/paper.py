"""Compare a result with the paper's figure for the recipe of the run, and say what makes the two incomparable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from trainer.config.changes import changed_settings, plain_settings
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.files import shipped_folder
from trainer.report.collect import Result, Run

# The paper's top-1 in percent by recipe and protocol (README.md, "The recipes").
PAPER: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("paper.json").read_text())


class Comparison(NamedTuple):
    """Figure of the paper beside a result."""

    top1: float
    differences: list[str]
    """What differs from the recipe, its data or its protocol. Empty: the figures are comparable."""


def recipe_of(run: Run) -> str | None:
    """Return the name of the recipe of the paper that the run took its settings from; None if there is none, or several."""
    names = {Path(source).stem for source in run.sources.values()} & set(PAPER)
    return names.pop() if len(names) == 1 else None


def compare(run: Run, result: Result) -> Comparison | None:
    """Compare a result with the paper; None if the paper has no figure for this recipe and protocol."""
    name = recipe_of(run)
    if name is None or run.config is None or result.step is None or result.protocol not in PAPER[name]:
        return None
    recipe = load_config(shipped_folder("configs") / f"{name}.yaml", [])
    # Another seed repeats the same experiment.
    differences = [
        line for line in changed_settings(run.config, plain_settings(recipe)) if not line.startswith("seed:")
    ]
    differences += _other_measurement(result, recipe)
    if name.startswith("imagenet_"):
        differences.append("protocol: that of SimCLR-v2's code -> the one of this row")
    return Comparison(PAPER[name][result.protocol], differences)


def _other_measurement(result: Result, recipe: Config) -> list[str]:
    """List how the checkpoint, the images and the protocol of a result differ from those of the recipe."""
    found = []
    if result.epoch is None or result.epoch < recipe.optimizer.epochs - 0.5:
        shown = "unknown" if result.epoch is None else f"{result.epoch:.4g}"
        found.append(f"epoch: {recipe.optimizer.epochs} -> {shown}")
    data = recipe.data
    for key, wanted_split in (("train_split", data.probe_split or data.train_split), ("test_split", data.test_split)):
        if result.content.get(key) != wanted_split:
            found.append(f"{key}: {wanted_split} -> {result.content.get(key)}")
    # The recipe knows the number of images that the classifier learns from if these are those of the pre-training.
    images = result.content.get("train_images")
    if not data.probe_split and data.expected_images not in (0, images):
        found.append(f"training images: {data.expected_images} -> {images}")
    if result.content.get("checkpoint_of_this_run") is not True:
        found.append("checkpoint of another run")
    # A result lists the settings that shape its figures.
    settings = result.content.get("settings")
    wanted = plain_settings(recipe)
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key in wanted and value != wanted[key]:
            found.append(f"{key}: {wanted[key]} -> {value}")
    return found
