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

_FIGURES_FILE = Path(__file__).with_name("paper.json")
# The paper's top-1 in percent by recipe and protocol (README.md, "The recipes").
PAPER: dict[str, dict[str, float]] = json.loads(_FIGURES_FILE.read_text())


class Comparison(NamedTuple):
    """Figure of the paper beside a result."""

    top1: float
    differences: list[str]
    """Differences from the recipe, its data or its protocol. Empty: the figures are comparable."""


def recipe_of(run: Run) -> str | None:
    """Return the name of the recipe of the paper that the run took its settings from; None if there is none, or several."""
    # A recipe is known by the name of its file, wherever the file lies.
    files = {Path(source).stem for source in run.sources.values()}
    recipes = files & PAPER.keys()
    if len(recipes) != 1:
        return None
    return recipes.pop()


def compare(run: Run, result: Result) -> Comparison | None:
    """Compare a result with the paper; None if the paper has no figure for this recipe and protocol."""
    name = recipe_of(run)
    # The paper has no figures of untrained encoders and raw pixels, which have no step.
    if name is None or run.config is None or result.step is None:
        return None
    if result.protocol not in PAPER[name]:
        return None
    recipe = load_config(shipped_folder("configs") / f"{name}.yaml", [])
    return Comparison(PAPER[name][result.protocol], differences_from(recipe, name, run.config, result))


def differences_from(recipe: Config, name: str, config: Config, result: Result) -> list[str]:
    """List how a run with these settings, and its result, differ from the experiment of a recipe of this name."""
    changed = changed_settings(config, plain_settings(recipe))
    changed += _other_measurement(result, recipe)
    # Another seed repeats the same experiment.
    differences = [line for line in changed if not line.startswith("seed:")]
    if name.startswith("imagenet_"):
        differences.append("protocol: that of SimCLR-v2's code -> the one of this row")
    return differences


def _other_measurement(result: Result, recipe: Config) -> list[str]:
    """List how the checkpoint, the images and the protocol of a result differ from those of the recipe."""
    found = []
    content = result.content
    epochs = recipe.optimizer.epochs
    # The epoch follows from rounded figures, so half an epoch does not count.
    if result.epoch is None:
        found.append(f"epoch: {epochs} -> unknown")
    elif result.epoch < epochs - 0.5:
        found.append(f"epoch: {epochs} -> {result.epoch:.4g}")

    data = recipe.data
    wanted_splits = {
        "train_split": data.probe_split or data.train_split,
        "test_split": data.test_split,
    }
    for key, wanted_split in wanted_splits.items():
        split = content.get(key)
        if split != wanted_split:
            found.append(f"{key}: {wanted_split} -> {split}")
    # The recipe knows the number of images that the classifier learns from if these are those of the pre-training.
    images = content.get("train_images")
    if not data.probe_split and data.expected_images not in (0, images):
        found.append(f"training images: {data.expected_images} -> {images}")
    if content.get("checkpoint_of_this_run") is not True:
        found.append("checkpoint of another run")

    # A result lists the settings that shape its figures.
    settings = content.get("settings")
    if not isinstance(settings, dict):
        return found
    wanted = plain_settings(recipe)
    for key, value in settings.items():
        if key in wanted and value != wanted[key]:
            found.append(f"{key}: {wanted[key]} -> {value}")
    return found
