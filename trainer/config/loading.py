"""Load a checked Config from YAML files and `--section.key value`, and save it as YAML.

A value is read as text from a file as from the command line, so that both give the same result; jsonargparse converts it to
the setting's type by the rules of YAML 1.2 (010 is ten; no, off and 1:30 are text) and writes the help. No environment
variable changes a setting.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from trainer.config.checks import check
from trainer.config.names import KEYS, closest, unknown_setting
from trainer.config.schema import Config, flatten
from trainer.config.yaml_values import read_value, read_yaml
from trainer.errors import InputError
from trainer.files import shipped_folder, write_text

COMMAND_LINE, DEFAULT = "command line", "default"
ALIASES = {"loss.slice_size": "wmse.slice_size"}  # a name of an earlier version, and the setting that it means now
PATHS = ("run_dir", "data.root", "init_from")  # settings in which ~ is the home folder


class _Word(NamedTuple):
    """A setting as text. source: the file that it is from, or COMMAND_LINE."""

    key: str
    text: str
    source: str


class Settings(NamedTuple):
    """A config and the source of each value by dotted name: a file, COMMAND_LINE or DEFAULT."""

    config: Config
    sources: dict[str, str]


def add_config_arguments(parser: ArgumentParser) -> None:
    """Add an option for each setting, with its docstring as help."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser.add_class_arguments(Config, fail_untyped=True)


def load_config(path: Path | Sequence[Path] | None, overrides: Iterable[str], *, check_method: bool = True) -> Config:
    """Load the settings of YAML files, a later file over those before it, and `overrides` (command-line words) over them all.
    Other settings keep their defaults. A file may be the name of a recipe in configs/.

    Raises InputError listing every problem at once, each with its file: unknown keys with the nearest known one, keys given
    twice, values of the wrong type, and what `config.checks` finds. check_method: False for a command that needs images but no
    loss: its sizes need not fit the method.
    """
    return load_settings(path, overrides, check_method=check_method).config


def load_settings(
    path: Path | Sequence[Path] | None, overrides: Iterable[str], *, check_method: bool = True
) -> Settings:
    """Load as `load_config` does, and return the source of each value as well."""
    problems: list[str] = []
    words: list[_Word] = []
    for file in [path] if isinstance(path, Path) else path or []:
        words += _file_words(find_config(file), problems)
    words += _override_words(overrides, problems)
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_config_arguments(parser)
    flat = _typed(parser, words, problems)
    if not problems:
        config = _build(flat)
        problems = check(config, method=check_method)
    if problems:
        raise InputError(f"{len(problems)} problem(s) with the settings:\n" + "\n".join(f"  - {p}" for p in problems))
    given = {word.key: word.source for word in words}  # in the order of the files
    return Settings(config, given | {key: DEFAULT for key in KEYS if key not in given})


def find_config(path: Path) -> Path:
    """Return the file, or the recipe of that name, such as `imagenet_rn50_wmse4_100ep`. Raises InputError if there is
    neither."""
    if path.exists() or path.suffix or len(path.parts) != 1:
        return path
    recipes = shipped_folder("configs")
    recipe = recipes / f"{path}.yaml"
    if not recipe.exists():
        names = sorted(file.stem for file in recipes.glob("*.yaml"))
        hint = closest(str(path), names) or f"; there are: {', '.join(names)}"
        raise InputError(f"no config file {path}, and no recipe of that name{hint}")
    return recipe


def save_config(config: Config, path: Path, sources: Mapping[str, str] | None = None) -> None:
    """Save the resolved settings as YAML that `load_config` reads. sources: written as a comment behind each value."""
    lines = []
    for key, value in flatten(config).items():
        section, _, name = key.rpartition(".")
        if section and f"{section}:" not in lines:
            lines.append(f"{section}:")
        indent = "  " if section else ""
        source = f"  # {sources[key]}" if sources else ""
        lines.append(f"{indent}{name}: {_as_yaml(list(value) if isinstance(value, tuple) else value)}{source}")
    write_text(path, "\n".join(lines) + "\n")


def _as_yaml(value: Any) -> str:
    """Write a plain value, or a list of them, without the marks that end a YAML document."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20)
    return text.removesuffix("\n").removesuffix("\n...")


def describe_sources(config: Config, sources: Mapping[str, str]) -> str:
    """Name the files that the settings come from, in order, and the settings of the command line, in one line."""
    files = dict.fromkeys(source for source in sources.values() if source not in (COMMAND_LINE, DEFAULT))
    changed = [f"{key}={value}" for key, value in flatten(config).items() if sources.get(key) == COMMAND_LINE]
    return f"settings from {', then '.join(files) or 'no file'}; on the command line: {', '.join(changed) or 'none'}"


def _file_words(path: Path, problems: list[str]) -> list[_Word]:
    """Read the settings of a file as words, so that they are converted as those of the command line."""
    own_problems: list[str] = []
    words = [_Word(key, text, str(path)) for key, text in _words_of(read_yaml(path), "", own_problems)]
    keys = [word.key for word in words]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    own_problems += [f"{key} is given twice: in its section and as a dotted key" for key in twice]
    problems += [f"{path}: {problem}" for problem in own_problems]
    return words


def _words_of(tree: dict[Any, Any], prefix: str, problems: list[str]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_section = any(known.startswith(f"{name}.") for known in (*KEYS, *ALIASES))
        if is_section and isinstance(value, dict):
            yield from _words_of(value, f"{name}.", problems)
        elif is_section and value is not None:
            problems.append(f"{name} is a section, not a setting: give {name}.KEY, not {value!r}")
        elif ALIASES.get(name, name) not in KEYS:
            problems.append(unknown_setting(name))
        elif value is None:
            problems.append(f"{name} has no value")
        else:
            yield ALIASES.get(name, name), _as_text(value)


def _as_text(value: Any) -> str:
    return f"[{', '.join(map(_as_text, value))}]" if isinstance(value, list) else str(value)


def _override_words(words: Iterable[str], problems: list[str]) -> Iterator[_Word]:
    """Yield the settings among `--key value` and `--key=value`; anything else becomes a problem."""
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
    def parse(some: list[_Word]) -> Namespace:
        return parser.parse_args([f"--{word.key}={_plain_value(word)}" for word in some], env=False)

    try:
        return _flat(parse(words), problems)
    except (ArgumentError, yaml.YAMLError):
        for word in words:  # one by one, to name every wrong one
            try:
                parse([word])
            except (ArgumentError, yaml.YAMLError) as error:
                problems.append(f"{word.source}: {_type_problem(word, str(error))}")
        return {}


def _plain_value(word: _Word) -> str:
    """Rewrite the value so that YAML 1.1 and 1.2 read it alike. Raises yaml.YAMLError for text instead of a number."""
    if isinstance(flatten(Config())[word.key], str):
        return word.text
    value = read_value(word.text)
    if any(isinstance(item, str) for item in (value if isinstance(value, list) else [value])):
        raise yaml.YAMLError(f"{word.text} is text")
    return _as_yaml(value)


def _type_problem(word: _Word, message: str) -> str:
    default = flatten(Config())[word.key]
    options = re.search(r"Literal\[(.*?)\]", message)
    if options:
        wanted = f"one of {options[1]}"
    elif isinstance(default, tuple):
        wanted = f"a list such as {list(default)}"
    else:
        wanted = "true or false" if isinstance(default, bool) else f"a value of type {type(default).__name__}"
    shown = word.text if len(word.text) < 80 else f"{word.text[:80]}..."
    return f"{word.key} is {shown!r}: give {wanted}"


def _flat(namespace: Namespace, problems: list[str]) -> dict[str, Any]:
    values = {key: namespace[key] for key in KEYS}
    for key in PATHS:
        try:
            values[key] = str(Path(values[key]).expanduser()) if values[key].startswith("~") else values[key]
        except RuntimeError as error:  # no such user
            problems.append(f"{key} is {values[key]!r}: {error}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _build(flat: dict[str, Any]) -> Config:
    """Build a Config from values by dotted name."""
    sections: dict[str, Any] = {}
    for f in dataclasses.fields(Config):
        if dataclasses.is_dataclass(f.default_factory):
            prefix = f"{f.name}."
            own = {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}
            sections[f.name] = f.default_factory(**own)
        else:
            sections[f.name] = flat[f.name]
    return Config(**sections)
