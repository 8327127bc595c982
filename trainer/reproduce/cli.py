"""Options of `wmse reproduce`, and the steps from a recipe to the verdict."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from trainer.config.changes import changed_settings, plain_settings
from trainer.config.loading import find_config, load_config
from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks, find_ranks
from trainer.errors import DONE, FAILED, InputError
from trainer.files import shipped_folder
from trainer.run.signals import stop_on_signals

# Settings that change a figure although they change nothing that a finished run has learnt from each image.
_OF_FIGURES = ("max_steps", "init_from", "data.probe_split", "data.test_split", "views.", "evaluate.precision")


def add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command. The recipe comes before them; all other options are settings."""
    # argparse would take the value of a setting for the recipe, so `run_reproduce` reads it.
    parser.usage = "wmse reproduce CONFIG --data.root DIR --run_dir DIR [--check] [--section.key value ...]"
    parser.add_argument(
        "--check",
        action="store_true",
        help="train and measure nothing: compare the newest measured checkpoint with the stored curve of the recipe",
    )


def run_reproduce(file: Path | None, own: argparse.Namespace, settings: Sequence[str]) -> int:
    """Train, evaluate and judge a recipe, or compare a running run with the curve. Returns the exit code."""
    if file is None:
        raise InputError("no recipe is given: name it before the options, such as `wmse reproduce demo_fashion_mnist`")
    # Import these late, so that a mistake in the options is reported at once.
    from trainer.reproduce.published import published_figures
    from trainer.run.folder import check_run_dir_is_set

    name = file.stem
    recipe = _recipe(file)
    # The two protocols of the paper, and those for which something else is published.
    protocols = tuple(dict.fromkeys(["linear", "knn", *published_figures(name)]))
    words = [*settings, f"--evaluate.protocols={','.join(protocols)}"]
    config = load_config(file, words)
    check_run_dir_is_set(config.run_dir)
    _check_seed(config)
    if own.check:
        from trainer.reproduce.curve import check_progress

        return check_progress(config, name)
    _refuse(config, _changes(config, recipe, protocols), "settings")
    # Outside of the training there is nothing to save: a signal ends the command at once with the code for a new start.
    with stop_on_signals():
        return _reproduce(config, name, recipe, ["--config", str(file), *words])


def _recipe(file: Path) -> Config:
    """Return the published settings: those of the shipped recipe of this name, or else of the file."""
    # A changed copy of a recipe is not the recipe.
    shipped = shipped_folder("configs") / f"{file.stem}.yaml"
    path = shipped if shipped.exists() else find_config(file)
    return load_config(path, [])


def _check_seed(config: Config) -> None:
    """Raise InputError if the run folder holds a run of another seed, whose results would be taken for those of this one."""
    file = Path(config.run_dir) / "config.yaml"
    if not file.exists():
        return
    seed = load_config(file, []).seed
    if seed != config.seed:
        raise InputError(f"{config.run_dir} holds a run of seed {seed}, not {config.seed}: add --seed {seed}")


def _changes(config: Config, recipe: Config, protocols: Sequence[str]) -> list[str]:
    """List the settings that change the figures and differ from the recipe, also those of a run that exists already."""
    file = Path(config.run_dir) / "config.yaml"
    configs = [config]
    if file.exists():
        configs.append(load_config(file, []))
    before = plain_settings(recipe)
    beginnings = (*_OF_FIGURES, *(f"{name}." for name in protocols))
    changed: list[str] = []
    for each in configs:
        changed += changed_settings(each, before)
        for key, value in plain_settings(each).items():
            if key.startswith(beginnings) and value != before[key]:
                changed.append(f"{key}: {before[key]} -> {value}")
    # Another seed repeats the same experiment. A setting that both configs change is listed once.
    return [line for line in dict.fromkeys(changed) if not line.startswith("seed:")]


def _refuse(config: Config, differences: Sequence[str], what: str) -> None:
    """Raise InputError that lists the differences, unless the user has accepted them."""
    if differences and not config.allow_changes:
        listed = "\n".join(f"  - {line}" for line in differences)
        raise InputError(
            f"this would not reproduce the published row, because the {what} differ (published -> yours):\n{listed}\n"
            "Use those of the recipe, or accept the differences with --allow_changes true; the verdict then names them"
        )


def _reproduce(config: Config, name: str, recipe: Config, words: Sequence[str]) -> int:
    """Check the data, and do what is left of training, evaluation and verdict. words: --config and settings."""
    from trainer.cli import main
    from trainer.reproduce.data import check_data
    from trainer.sweep.progress import is_trained, why_unfinished

    ranks = find_ranks()
    found: dict[str, dict[str, Any]] = {}
    differences: list[str] = []
    # One rank opens the splits: if all of them indexed a folder of images, the file system would do that work several times.
    if ranks.is_first:
        found, differences = check_data(config, name, recipe)
        _refuse(config, differences, "data")
    if not is_trained(config):
        code = main(["pretrain", *words])
        if code != DONE:
            return code
    if not ranks.is_first:
        return DONE
    # A run that `wmse stop` has ended is not trained, though its exit code is 0.
    if not is_trained(config):
        print(f"the run is not finished ({why_unfinished(config)}): give the same command again to continue")
        return FAILED
    code = _evaluate(config, found, ranks)
    if code != DONE:
        return code
    from trainer.reproduce.report import write_reproduction

    return write_reproduction(config, name, recipe, found, differences)


def _evaluate(config: Config, found: dict[str, dict[str, Any]], ranks: Ranks) -> int:
    """Measure the last checkpoint by the protocols that are missing. Returns the exit code."""
    from trainer.cli import main
    from trainer.reproduce.measured import measured
    from trainer.sweep.progress import last_checkpoint, protocols_of
    from trainer.sweep.task import changed_words

    results = measured(config, found)
    missing = [protocol for protocol in protocols_of(config) if protocol not in results]
    if not missing:
        return DONE
    words = ["--run_dir", config.run_dir, "--checkpoint", last_checkpoint(config), *changed_words(config)]
    # After a training on several ranks, rank 0 evaluates alone, because ranks meet only once in a process.
    if ranks.world_size > 1:
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK=str(ranks.local_rank),
            LOCAL_WORLD_SIZE="1",
        )
    with redirect_stdout(sys.stderr):
        return main(["evaluate", *words, f"--evaluate.protocols={','.join(missing)}"])
