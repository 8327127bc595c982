"""From YAML and `--section.key value` to a checked Config, and back to YAML.

jsonargparse converts and types the values and writes the help. Ahead of it goes a pass of ours: it would stop at the first
problem, let a key that stands twice in the YAML win silently, and not say which key was meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from trainer.config import Config, flatten
from trainer.config_check import check
from trainer.errors import InputError
from trainer.files import write_text

KEYS = tuple(flatten(Config()))


def add_config_arguments(parser: ArgumentParser) -> None:
    """One option for each setting, with its docstring as help."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser.add_class_arguments(Config, fail_untyped=True)


def load_config(path: Path | None, overrides: Iterable[str]) -> Config:
    """The settings of a YAML file, then `overrides` (command-line words) over them; what neither names keeps its default.

    Raises InputError listing every problem at once: unknown keys with the nearest known one, keys given twice, values of
    the wrong type, and what `config_check` finds.
    """
    problems: list[str] = []
    words = [*(_yaml_words(path, problems) if path else []), *_override_words(overrides, problems)]
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_config_arguments(parser)
    flat = _typed(parser, words, problems)
    if not problems:
        config = _build(flat)
        problems = check(config)
    if problems:
        where = f" in {path}" if path else ""
        raise InputError(
            f"{len(problems)} problem(s) with the settings{where}:\n" + "\n".join(f"  - {p}" for p in problems)
        )
    return config


def save_config(config: Config, path: Path) -> None:
    """The resolved settings as YAML that `load_config` reads."""
    write_text(path, yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True))


def _yaml_words(path: Path, problems: list[str]) -> list[str]:
    """The file as command-line words, so that both go through one conversion."""
    return list(_words_of(read_yaml(path), "", problems))


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file. Raises InputError if there is none, or if a key stands in it twice."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 # a SafeLoader
    except FileNotFoundError:
        raise InputError(f"no config file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"can't read config {path}: {' '.join(str(error).split())}") from error
    if tree is None:
        raise InputError(f"config {path} is empty: it must hold settings; configs/ has one for each recipe")
    if not isinstance(tree, dict):
        raise InputError(f"config {path} must be a mapping of settings, it is a {type(tree).__name__}")
    return tree


def _words_of(tree: dict[Any, Any], prefix: str, problems: list[str]) -> Iterable[str]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_section = any(known.startswith(f"{name}.") for known in KEYS)
        if is_section and isinstance(value, dict):
            yield from _words_of(value, f"{name}.", problems)
        elif is_section and value is not None:
            problems.append(f"{name} is a section, not a setting: give {name}.KEY, not {value!r}")
        elif name not in KEYS:
            problems.append(_unknown(name))
        elif value is None:
            problems.append(f"{name} has no value")
        else:
            yield f"--{name}={value if isinstance(value, str) else _as_word(value)}"


def _as_word(value: Any) -> str:
    """A value from YAML as one line of YAML, which is what the command line takes."""
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("\n").removesuffix("\n...")


def _override_words(words: Iterable[str], problems: list[str]) -> Iterable[str]:
    """`--key value` and `--key=value` as `--key=value`; what is neither is a problem."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            problems.append(f"{word!r} stands alone: settings are given as --section.key value")
            continue
        name = name[2:]
        if not equals:
            if not rest or rest[0].startswith("--"):
                problems.append(f"--{name} has no value" if name in KEYS else _unknown(name))
                continue
            value = rest.pop(0)
        if name in KEYS:
            yield f"--{name}={value}"
        else:
            problems.append(_unknown(name))


def _unknown(name: str) -> str:
    """The nearest key by the whole name, else one with the same last part."""
    last = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(name, KEYS, 1, 0.6) or [key for key in KEYS if key.rsplit(".", 1)[-1] == last]
    return f"unknown setting {name}" + (f": did you mean {near[0]}?" if near else "; `wmse pretrain --help` lists all")


def _typed(parser: ArgumentParser, words: list[str], problems: list[str]) -> dict[str, Any]:
    try:
        return _flat(parser.parse_args(words))
    except ArgumentError:
        for word in words:  # which one it was, and whether there are more
            try:
                parser.parse_args([word])
            except ArgumentError as error:
                problems.append(_type_problem(word, str(error)))
        return {}


def _type_problem(word: str, message: str) -> str:
    name, _, value = word[2:].partition("=")
    default = flatten(Config())[name]
    options = re.search(r"Literal\[(.*?)\]", message)
    if options:
        wanted = f"one of {options[1]}"
    elif isinstance(default, tuple):
        wanted = f"a list such as {list(default)}"
    else:
        wanted = "true or false" if isinstance(default, bool) else f"a value of type {type(default).__name__}"
    return f"{name} is {value!r}: give {wanted}"


def _flat(namespace: Namespace) -> dict[str, Any]:
    values = {key: namespace[key] for key in KEYS}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _build(flat: dict[str, Any]) -> Config:
    """A Config from values by dotted name."""
    sections: dict[str, Any] = {}
    for f in dataclasses.fields(Config):
        if dataclasses.is_dataclass(f.default_factory):
            prefix = f"{f.name}."
            own = {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}
            sections[f.name] = f.default_factory(**own)
        else:
            sections[f.name] = flat[f.name]
    return Config(**sections)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as people mean it: 1e-3 is a number, and a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {twice[0]!r} stands twice{node.start_mark}", node.start_mark
            )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$|^[-+]?\.\d+[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _construct_number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """A number as written; YAML 1.1 would read 24:00:00 as a number in base 60."""
    if ":" in node.value:
        return node.value
    return loader.construct_yaml_float(node) if node.tag.endswith("float") else loader.construct_yaml_int(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct_number)
