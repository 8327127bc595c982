"""The command line of `wmse tune`: options, table and the file of the settings that were taken."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import DONE, FAILED, InputError

if TYPE_CHECKING:
    from trainer.tune.run import Tuning


HEADER = "# Written by wmse tune"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="experiment: a YAML file or the name of a recipe in configs/; later files override earlier ones",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("tuned.yaml"), metavar="FILE", help="file to write (default tuned.yaml)"
    )
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="time to use at most (default 5)")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="R", help="number of ranks that divide a step (default 1)"
    )


def run_tune(own: argparse.Namespace, words: Sequence[str]) -> int:
    """Try the choices, print the table, and write the file. Returns the exit code."""
    if not own.minutes > 0 or math.isinf(own.minutes):
        raise InputError(f"--minutes is {own.minutes:g}: give a number above 0")
    if own.ranks < 1:
        raise InputError(f"--ranks is {own.ranks}: give at least 1")
    _check_out(own.out)

    from trainer.config.loading import load_config
    from trainer.config.schema import Config
    from trainer.data.index import open_images
    from trainer.distributed.device import choose_device
    from trainer.distributed.ranks import Ranks, find_ranks
    from trainer.setup import check_device
    from trainer.tune.run import Tuning, tune

    if find_ranks().world_size > 1:
        raise InputError("wmse tune measures on one device: start it without torchrun, with --ranks R")
    recipe = load_config(own.config, words)
    device = choose_device(recipe, Ranks())
    share = _images_of_a_rank(recipe, own.ranks)

    def make(settings: Mapping[str, str]) -> Config:
        # One rank alone has nobody to share statistics with.
        of_one_rank = {"data.images_per_step": str(share), "model.batch_norm_ranks": "local"}
        over: list[str] = []
        for key, value in {**of_one_rank, **settings}.items():
            over.append(f"--{key}")
            over.append(value)
        config = load_config(own.config, [*words, *over])
        check_device(config, device)
        return config

    # Refuse a recipe that this device cannot run, and images that cannot be opened.
    make({})
    if recipe.data.root:
        open_images(recipe.data, recipe.data.train_split, progress=True)
    tuning = Tuning()
    try:
        for choice in tune(make, device, own.minutes, tuning):
            # The file has the choices so far, whatever ends this process.
            _write(own.out, tuning, device, own)
            print(f"trying {choice.name}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: the choices so far are kept", file=sys.stderr)
    _show(tuning)
    _write(own.out, tuning, device, own)
    if not any(outcome.milliseconds for _, outcome in tuning.tried):
        print("nothing was timed: the table says why", file=sys.stderr)
        return FAILED
    if tuning.settings:
        print(f"{len(tuning.settings)} setting(s) in {own.out}: use them by a further --config {own.out}")
    else:
        print(f"no choice is faster than the recipe: {own.out} changes nothing")
    return DONE


def _check_out(path: Path) -> None:
    """Raise InputError unless the path is free, or holds a file that this command wrote."""
    if not path.resolve().parent.is_dir():
        raise InputError(f"--out is {path}: its folder does not exist, create it first")
    if not path.exists():
        return
    if not path.is_file() or not path.read_text(encoding="utf-8", errors="replace").startswith(HEADER):
        raise InputError(f"--out is {path}, which wmse tune did not write: give the name of a new file")


def _images_of_a_rank(config: Any, ranks: int) -> int:
    """Return the images of one of `ranks` ranks, at least as many as the loss needs together."""
    from trainer.distributed.geometry import check_ranks, indivisible_images

    check_ranks(config, ranks)
    return max(config.data.images_per_step // ranks, indivisible_images(config))


def _show(tuning: Tuning) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("choice", "what is timed", "before, ms", "after, ms", "ratio", "taken", "why")
    for choice, outcome in tuning.tried:
        # A choice that was not timed has no figures.
        figures = ["", "", ""]
        times = outcome.milliseconds
        if times:
            figures = [f"{times['before']:.4g}", f"{times['after']:.4g}", f"{outcome.ratio:.3f}"]
        taken = "yes" if outcome.taken else "no"
        table.add_row(choice.name, choice.part, *figures, taken, outcome.why)
    Console(width=160).print(table)


def _write(path: Path, tuning: Tuning, device: Any, own: argparse.Namespace) -> None:
    from datetime import date

    import yaml

    from trainer.config.yaml_values import read_value
    from trainer.files import write_text
    from trainer.run.machine import provenance, tuned_for

    found = provenance(device)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"{HEADER} on {date.today()} for {' '.join(map(str, own.config))} on {own.ranks} rank(s).",
        f"# {found['device']}; {versions}; commit {found['commit']}",
    ]
    # The comments say what was measured for the settings below them.
    for choice, outcome in tuning.tried:
        times = outcome.milliseconds
        if outcome.taken and times:
            before = f"{times['before']:.4g}"
            after = f"{times['after']:.4g}"
            lines.append(f"# {choice.name}: {choice.part} {before} -> {after} ms; {outcome.why}")
    content: dict[str, Any] = {"tuned_for": tuned_for(device)}
    for key, value in tuning.settings.items():
        section, _, name = key.rpartition(".")
        # A setting without a section stands at the top.
        place = content.setdefault(section, {}) if section else content
        place[name] = read_value(value)
    write_text(path, "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False))
