"""Read the definition of a sweep, and list its runs with their checked settings (docs/sweep.md). Imports no torch."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config.loading import COMMAND_LINE, Settings, find_config, flat_settings, load_settings
from trainer.config.names import closest
from trainer.config.schema import Config
from trainer.config.yaml_values import read_yaml
from trainer.errors import InputError, problem_list

_KEYS = {
    "config": str,
    "seeds": list,
    "settings": dict,
    "protocols": list,
    "rows": dict,
    "vary": dict,
}
_WANTED = {
    str: "a text",
    list: "a list such as [a, b]",
    dict: "a mapping, with `key: value` on each line",
}
# Each run has its own value of these settings, which the definition gives in another way.
_OWN = {
    "run_dir": "--out DIR is the folder of all runs",
    "seed": "give `seeds`, or --seeds 0,1,2",
}


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: a row with a seed."""

    row: str
    seed: int
    file: Path
    """The row's config file."""
    words: tuple[str, ...]
    """Settings of the command line, which override those of the file."""
    config: Config
    """All settings, with the run's folder."""
    sources: dict[str, str]
    """The source of each setting by dotted name, as from `load_settings`."""

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.config.run_dir)

    @property
    def name(self) -> str:
        """Name of the run for people."""
        return f"{self.row}, seed {self.seed}"


@dataclass(frozen=True)
class _Row:
    """A row before its settings are checked."""

    name: str
    file: Path
    """The config file, or the name of a recipe."""
    words: list[str]
    """Settings as words of the command line; a later word overrides earlier ones."""


def read_sweep(
    file: Path | None, configs: Sequence[Path], seeds: str, settings: Sequence[str], out: Path
) -> list[SweepRun]:
    """List the runs of a sweep, row by row.

    file: the definition, or the name of one in configs/sweeps; None: each of `configs` is a row. seeds: as 0,1,2, which replace
    those of the file; empty: those of the file, or seed 0. settings: words of the command line, which override all others.

    Raises InputError that lists all problems of all rows."""
    # Collect all problems, so that the user can correct them together.
    tree = _read_tree(file, configs)
    problems: list[str] = []
    _check_keys(tree, problems)
    # Seeds of the command line replace those of the file.
    seed_texts = seeds.split(",") if seeds else tree.get("seeds", ["0"])
    numbers = _seeds(seed_texts, problems)
    rows = list(_rows(tree, problems))
    if not rows:
        problems.append("there are no rows: give `rows` in the file, or --config once for each row")
    for key, instead in _OWN.items():
        if _gives(settings, key):
            problems.append(f"command line: {instead}, not --{key}")
    _check_names(rows, problems)

    # Check the settings of all rows before any run starts. The seed does not matter for the checks.
    loaded: list[tuple[_Row, Settings]] = []
    if not problems:
        for row in rows:
            row.words.extend(settings)
            try:
                loaded.append((row, load_settings(row.file, row.words)))
            except InputError as error:
                problems.append(f"row {row.name}: {error}")
    problems += _equal_rows(loaded)
    if problems:
        sweep = file or "of these configs"
        raise problem_list(f"{len(problems)} problem(s) with the sweep {sweep}", problems)
    runs = []
    for row, found in loaded:
        runs += [_run(row, seed, found, out) for seed in numbers]
    return runs


def _read_tree(file: Path | None, configs: Sequence[Path]) -> dict[Any, Any]:
    """Return the definition as a tree of texts. Without a file, each config is a row with the name of the file."""
    if file is not None:
        # The definition and the configs would name different rows.
        if configs:
            raise InputError(
                f"--config does not apply to the sweep {file}, which names its configs: remove one of them"
            )
        return read_yaml(find_config(file, "sweep"))
    # The name of a config becomes that of its row, and of the folder of its runs.
    rows: dict[str, dict[str, str]] = {}
    for path in configs:
        if path.stem in rows:
            raise InputError(f"--config: {path.stem} is the name of two files, and of their rows: rename one of them")
        rows[path.stem] = {"config": str(path)}
    return {"rows": rows}


def _check_keys(tree: dict[Any, Any], problems: list[str]) -> None:
    """Add a problem for each key that is unknown or has a value of the wrong type, and remove the latter from the tree."""
    for key in tree:
        if key not in _KEYS:
            hint = closest(str(key), _KEYS) or f": a sweep has the keys {', '.join(_KEYS)}"
            problems.append(f"unknown key {key}{hint}")
    for key, kind in _KEYS.items():
        if key in tree and not isinstance(tree[key], kind):
            problems.append(f"{key} is {tree[key]!r}: give {_WANTED[kind]}")
            del tree[key]  # the rest of the definition is checked without it


def _seeds(texts: Sequence[Any], problems: list[str]) -> list[int]:
    """Return the seeds as numbers. Add a problem if a text is no whole number, or if two are equal."""
    numbers = [int(text) for text in texts if str(text).isdecimal()]
    is_complete = len(numbers) == len(texts)
    has_twice = len(set(numbers)) < len(numbers)
    if not is_complete or has_twice or not numbers:
        problems.append(f"seeds is {list(texts)}: give different whole numbers from 0 on, such as 0,1,2")
    return numbers


def _rows(tree: dict[Any, Any], problems: list[str]) -> Iterator[_Row]:
    """Yield each row once for each combination of the values of `vary`."""
    # Settings are turned into words of the command line, which are checked like those of a user.
    common = _words(tree.get("settings", {}), "settings", problems)
    if "protocols" in tree:
        common += _words({"evaluate.protocols": tree["protocols"]}, "protocols", problems)
    # For each varied setting a list of its values, each as (ending of the row's name, words).
    choices = []
    for key, values in tree.get("vary", {}).items():
        if not isinstance(values, list) or not values:
            problems.append(f"vary: {key} is {values!r}: give a list of values, such as [1, 4]")
            continue
        choice = []
        for value in values:
            words = _words({key: value}, "vary", problems)
            if words:
                # The row's name ends with the last part of the setting, such as "iterations=4".
                _, _, ending = words[0].rpartition(".")
                choice.append((f", {ending}", words))
        choices.append(choice)

    for name, content in tree.get("rows", {}).items():
        content = {} if content is None else content
        if not isinstance(content, dict):
            problems.append(f"row {name} is {content!r}: give the settings of the row as `key: value`, or {{}}")
            continue
        # A row may have a config of its own.
        file = content.get("config", tree.get("config"))
        if not isinstance(file, str):
            problems.append(
                f"row {name} has no config: give `config`, a file or the name of a recipe, for all rows or here"
            )
            continue
        settings = {key: value for key, value in content.items() if key != "config"}
        own = _words(settings, f"row {name}", problems)
        # Later words override earlier ones, so the row overrides the common settings, and `vary` both.
        for chosen in itertools.product(*choices):
            words = [*common, *own]
            title = str(name)
            for ending, varied in chosen:
                title += ending
                words += varied
            yield _Row(title, Path(file), words)


def _words(tree: dict[Any, Any], where: str, problems: list[str]) -> list[str]:
    """Return settings as words of the command line. where: names their place in the definition."""
    found: list[str] = []
    words = []
    for key, text in flat_settings(tree, found):
        if key in _OWN:
            found.append(f"{key} does not belong here: {_OWN[key]}")
        words.append(f"--{key}={text}")
    problems += [f"{where}: {problem}" for problem in found]
    return words


def _gives(words: Sequence[str], key: str) -> bool:
    """Return whether the words set `key`, as --key VALUE or --key=VALUE."""
    return any(word.partition("=")[0] == f"--{key}" for word in words)


def _check_names(rows: Sequence[_Row], problems: list[str]) -> None:
    """Add a problem for each name that gives no folder, or the folder of a row before it."""
    names: dict[str, str] = {}
    for row in rows:
        slug = _slug(row.name)
        if not slug:
            problems.append(f"row {row.name!r} gives no name for a folder: use letters or digits")
        elif slug in names:
            problems.append(f"rows {names[slug]!r} and {row.name!r} would share the folder {slug}: rename one of them")
        # A third row is compared with the first one as well.
        names.setdefault(slug, row.name)


def _slug(name: str) -> str:
    """Return the name of a row's folder: in small letters, without characters that shells and batch scripts interpret."""
    return re.sub(r"[^a-z0-9.=+-]+", "_", name.lower()).strip("._-")


def _equal_rows(loaded: Sequence[tuple[_Row, Settings]]) -> list[str]:
    """Describe rows that would repeat the experiment of a row before them."""
    names: dict[Config, str] = {}
    problems = []
    for row, found in loaded:
        # The folder is no part of the experiment.
        before = names.setdefault(replace(found.config, run_dir=""), row.name)
        if before != row.name:
            problems.append(f"rows {before!r} and {row.name!r} have the same settings: remove one, or change a setting")
    return problems


def _run(row: _Row, seed: int, found: Settings, out: Path) -> SweepRun:
    """Return the run of a row with a seed."""
    run_dir = os.path.join(os.path.abspath(out), _slug(row.name), f"seed_{seed}")
    return SweepRun(
        row=row.name,
        seed=seed,
        file=find_config(row.file),
        words=(*row.words, f"--seed={seed}", f"--run_dir={run_dir}"),
        config=replace(found.config, seed=seed, run_dir=run_dir),
        sources={**found.sources, "seed": COMMAND_LINE},
    )
