"""Load a checked Config from YAML files and `--section.key value`, and save it as YAML.

Values are read as text from files and from the command line, so that both give the same result. jsonargparse converts them
to the types of the settings by the rules of YAML 1.2 (010 is ten; no, off and 1:30 are text), and writes the help. No
environment variable changes a setting.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from trainer.config.checks import check
from trainer.config.names import KEYS, closest, unknown_setting
from trainer.config.schema import Config, flatten
from trainer.config.yaml_values import read_value, read_yaml
from trainer.errors import InputError, problem_list
from trainer.files import shipped_folder, write_text

# Sources of values that are not files.
COMMAND_LINE = "command line"
DEFAULT = "default"
# Names of earlier versions, and the settings that they mean now.
ALIASES = {
    "loss.slice_size": "wmse.slice_size",
    "evaluate.probe_epochs": "linear.epochs",
    "evaluate.probe_batch_size": "linear.batch_size",
    "evaluate.probe_rate_start": "linear.rate_start",
    "evaluate.probe_rate_end": "linear.rate_end",
    "evaluate.probe_weight_decay": "linear.weight_decay",
    "evaluate.knn_k": "knn.k",
}
PATHS = ("run_dir", "data.root", "init_from", "finetune.save_to")  # settings in which ~ means the home folder


class _Word(NamedTuple):
    """Setting as text. source: its file, or COMMAND_LINE."""

    key: str
    text: str
    source: str


class Settings(NamedTuple):
    """Config, and the source of each value by dotted name: a file, COMMAND_LINE or DEFAULT."""

    config: Config
    sources: dict[str, str]


def add_config_arguments(parser: ArgumentParser) -> None:
    """Add an option for each setting, with its docstring as help."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser.add_class_arguments(Config, fail_untyped=True)


def load_config(path: Path | Sequence[Path] | None, overrides: Iterable[str], *, check_method: bool = True) -> Config:
    """Load the settings of YAML files and of `overrides` (command-line words).

    A later file overrides earlier ones, and the command line overrides all files. Other settings keep their defaults.

    path: files, or names of recipes in configs/. check_method: False for a command that needs images but no loss, so that
    sizes need not fit the method.

    Raises InputError that lists all problems, each with its file: unknown keys with the nearest known one, keys given twice,
    values of the wrong type, and problems that `config.checks` finds.
    """
    return load_settings(path, overrides, check_method=check_method).config


def load_settings(
    path: Path | Sequence[Path] | None, overrides: Iterable[str], *, check_method: bool = True
) -> Settings:
    """Load as `load_config` does, and also return the source of each value."""
    # Collect the settings as text; a later word overrides earlier ones.
    problems: list[str] = []
    words: list[_Word] = []
    files = [path] if isinstance(path, Path) else path or []
    for file in files:
        words += _file_words(find_config(file), problems)
    words += _override_words(overrides, problems)

    # Convert them to their types, and check them together.
    flat = _typed(_parser(), words, problems)
    if not problems:
        config = _build(flat)
        problems = check(config, method=check_method)
    if problems:
        raise problem_list(f"{len(problems)} problem(s) with the settings", problems)
    given = {word.key: word.source for word in words}  # in the order of the files
    others = {key: DEFAULT for key in KEYS if key not in given}
    return Settings(config, given | others)


@cache
def _parser() -> ArgumentParser:
    """Return the parser of all settings. It takes longer to build than to use, and a sweep loads many configs."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_config_arguments(parser)
    return parser


def find_config(path: Path, kind: str = "recipe") -> Path:
    """Return the file, the settings of a run folder, or the recipe of that name, such as `imagenet_rn50_wmse4_100ep`.

    kind: "recipe", or "sweep" for a file in configs/sweeps. Raises InputError if neither exists."""
    # A run folder stands for the settings of the run.
    if (path / "config.yaml").is_file():
        return path / "config.yaml"
    # Such a name has neither suffix nor folder. Anything else is a file, and reading reports it if it is missing.
    if path.exists() or path.suffix or len(path.parts) != 1:
        return path
    recipes = shipped_folder("configs")
    if kind == "sweep":
        recipes = recipes / "sweeps"
    recipe = recipes / f"{path}.yaml"
    if not recipe.exists():
        # Propose the nearest name, or else all of them.
        names = sorted(file.stem for file in recipes.glob("*.yaml"))
        hint = closest(str(path), names) or f": choose one of {', '.join(names)}"
        raise InputError(f"{path} is neither a file nor the name of a {kind}{hint}")
    return recipe


def save_config(config: Config, path: Path, sources: Mapping[str, str] | None = None) -> None:
    """Save all settings as YAML that `load_config` reads. sources: comment for each value."""
    lines = []
    for key, value in flatten(config).items():
        # Start a section at its first setting, and indent its settings.
        section, _, name = key.rpartition(".")
        if section and f"{section}:" not in lines:
            lines.append(f"{section}:")
        indent = "  " if section else ""
        source = f"  # {sources[key]}" if sources else ""
        plain_value = list(value) if isinstance(value, tuple) else value
        text = _as_yaml(plain_value)
        lines.append(f"{indent}{name}: {text}{source}")
    write_text(path, "\n".join(lines) + "\n")


def _as_yaml(value: Any) -> str:
    """Format a plain value, or a list of them, without the marks that end a YAML document."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20)
    return text.removesuffix("\n").removesuffix("\n...")


def describe_sources(config: Config, sources: Mapping[str, str]) -> str:
    """Name in one line the files of the settings, in order, and the settings of the command line."""
    # A dict drops repetitions and keeps the order in which the files override each other.
    files = dict.fromkeys(source for source in sources.values() if source not in (COMMAND_LINE, DEFAULT))
    overrides = []
    for key, value in flatten(config).items():
        if sources.get(key) == COMMAND_LINE:
            overrides.append(f"{key}={value}")
    from_files = ", then ".join(files) or "no file"
    from_command = ", ".join(overrides) or "none"
    return f"settings from {from_files}; on the command line: {from_command}"


def _file_words(path: Path, problems: list[str]) -> list[_Word]:
    """Read the settings of a file as words, so that they are converted like those of the command line."""
    own_problems: list[str] = []
    tree = read_yaml(path)
    words = [_Word(key, text, str(path)) for key, text in flat_settings(tree, own_problems)]
    # YAML refuses two equal keys, but not a setting in its section and once more as a dotted key.
    keys = [word.key for word in words]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    own_problems += [f"{key} is given twice: in its section and as a dotted key" for key in twice]
    problems += [f"{path}: {problem}" for problem in own_problems]
    return words


def flat_settings(tree: dict[Any, Any], problems: list[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the text of each setting in a tree of sections. Anything else becomes a problem."""
    # Each value is a section, a setting, or a problem.
    for key, value in tree.items():
        name = f"{prefix}{key}"
        beginning = f"{name}."
        is_section = any(known.startswith(beginning) for known in (*KEYS, *ALIASES))
        if is_section and isinstance(value, dict):
            yield from flat_settings(value, problems, f"{name}.")
        elif is_section and value is None:
            problems.append(f"{name} is an empty section: give settings below it, or remove the line")
        elif is_section:
            problems.append(f"{name} is a section, not a setting: give {name}.KEY, not {value!r}")
        elif ALIASES.get(name, name) not in KEYS:
            problems.append(unknown_setting(name))
        elif value is None:
            problems.append(f"{name} has no value: give one, or remove the line")
        else:
            yield ALIASES.get(name, name), _as_text(value)


def _as_text(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    items = ", ".join(map(_as_text, value))
    return f"[{items}]"


def _override_words(words: Iterable[str], problems: list[str]) -> Iterator[_Word]:
    """Yield the settings of `--key value` and `--key=value`; any other word becomes a problem."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            problems.append(
                f"{COMMAND_LINE}: {word!r} does not belong to a setting: give settings as --section.key value"
            )
            continue
        name = ALIASES.get(name[2:], name[2:])
        # Without an equals sign, the value is the next word.
        if not equals:
            if not rest or rest[0].startswith("--"):
                problem = f"--{name} has no value" if name in KEYS else unknown_setting(name)
                problems.append(f"{COMMAND_LINE}: {problem}")
                continue
            value = rest.pop(0)
        if name in KEYS:
            yield _Word(name, value, COMMAND_LINE)
        else:
            problems.append(f"{COMMAND_LINE}: {unknown_setting(name)}")


def _typed(parser: ArgumentParser, words: list[_Word], problems: list[str]) -> dict[str, Any]:
    """Convert the words to the types of their settings. Returns all settings by dotted name, empty if a value is wrong."""

    def parse(some: list[_Word]) -> Namespace:
        arguments = [f"--{word.key}={_plain_value(word)}" for word in some]
        return parser.parse_args(arguments, env=False)

    try:
        return _flat(parse(words), problems)
    except (ArgumentError, yaml.YAMLError):
        # The parser stops at the first wrong word. Parse the words one by one, to name every wrong one.
        for word in words:
            try:
                parse([word])
            except (ArgumentError, yaml.YAMLError) as error:
                problems.append(f"{word.source}: {_type_problem(word, str(error))}")
        return {}


def _plain_value(word: _Word) -> str:
    """Rewrite the value so that YAML 1.1 and 1.2 read it alike. Raises yaml.YAMLError if it is text instead of a number."""
    # A text may look like a number: a run folder can have the name 010.
    default = flatten(Config())[word.key]
    if isinstance(default, str):
        return word.text
    value = read_value(word.text)
    is_names = isinstance(default, tuple) and all(isinstance(item, str) for item in default) and default != ()
    if isinstance(default, tuple) and isinstance(value, str) and "," in value:
        value = read_value(f"[{value}]")  # a,b is easier to type in a shell than [a,b]
    elif is_names and isinstance(value, str):
        value = [value]
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, str) for item in items) and not is_names:
        raise yaml.YAMLError(f"{word.text} is text")
    return _as_yaml(value)


def _type_problem(word: _Word, message: str) -> str:
    """Say which values a setting takes. message: the error of jsonargparse."""
    default = flatten(Config())[word.key]
    # The type of a setting with fixed choices is only part of the parser's message.
    options = re.search(r"Literal\[(.*?)\]", message)
    if options:
        wanted = f"one of {options[1]}"
        if "<class 'int'>" in message:  # as model.batch_norm_ranks, which is one of two words or a number
            wanted += ", or a whole number"
    elif isinstance(default, tuple):
        wanted = f"a list such as {list(default)}" if default else "a list such as [1, 2]"
    elif isinstance(default, bool):
        wanted = "true or false"
    elif isinstance(default, float):
        wanted = "a finite number"
    else:
        wanted = f"a value of type {type(default).__name__}"
    shown = word.text if len(word.text) < 80 else f"{word.text[:80]}..."
    return f"{word.key} is {shown!r}: give {wanted}"


def _flat(namespace: Namespace, problems: list[str]) -> dict[str, Any]:
    """Return all settings by dotted name, with ~ expanded and tuples instead of lists."""
    values = {key: namespace[key] for key in KEYS}
    for key in PATHS:
        if not values[key].startswith("~"):
            continue
        try:
            values[key] = str(Path(values[key]).expanduser())
        except RuntimeError as error:  # no such user
            problems.append(f"{key} is {values[key]!r}: {error}")
    # Settings are read-only, so they hold tuples.
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _build(flat: dict[str, Any]) -> Config:
    """Build a Config from values by dotted name."""
    sections: dict[str, Any] = {}
    for f in dataclasses.fields(Config):
        # A field is a section or a plain setting.
        if dataclasses.is_dataclass(f.default_factory):
            prefix = f"{f.name}."
            values = {}
            for key, value in flat.items():
                if key.startswith(prefix):
                    values[key.removeprefix(prefix)] = value
            sections[f.name] = f.default_factory(**values)
        else:
            sections[f.name] = flat[f.name]
    return Config(**sections)
