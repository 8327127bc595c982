"""Describe the settings for people: `--help`, `--help_all`, `wmse settings` and docs/config.md.

The text of a setting is its docstring in the schema. Its type, range and default are read from the dataclass.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

from trainer.config.names import SHORT_NAMES, closest
from trainer.config.schema import Config
from trainer.config.setting import allowed_range
from trainer.errors import InputError

_WIDTH = 110
_GENERAL = "general"  # what `wmse settings` calls the settings that are in no section
_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text"}
_LISTS = {int: "integers", float: "numbers", str: "words"}


class Description(NamedTuple):
    """Setting in words. choices: its values if they are few. values: type and range. default: as YAML has it."""

    key: str
    choices: tuple[str, ...]
    values: str
    default: str
    text: str


def sections() -> dict[str, str]:
    """Return the names of the sections with a line about each, in the order of the schema."""
    names = {_GENERAL: "Settings of the whole run, which are in no section."}
    for declared in dataclasses.fields(Config):
        # A field of the config is a section or a plain setting.
        if dataclasses.is_dataclass(declared.default_factory):
            docstring = declared.default_factory.__doc__ or ""
            names[declared.name] = docstring.partition("\n")[0]
    return names


def describe(name: str = "") -> list[Description]:
    """Describe the settings of a section, one setting, or all of them. Raises InputError if there is no such name."""
    by_section = _all()
    # A name is that of a section, or of a setting in any section.
    if name in by_section:
        return by_section[name]
    every = [setting for settings in by_section.values() for setting in settings]
    if not name:
        return every
    for setting in every:
        if setting.key == name:
            return [setting]
    keys = [setting.key for setting in every]
    hint = closest(name, [*by_section, *keys]) or f": choose one of {', '.join(by_section)}"
    raise InputError(f"{name!r} is neither a setting nor a section of settings{hint}")


@cache
def _all() -> dict[str, list[Description]]:
    """Describe the settings of each section. Reading the docstrings from the source code takes a while."""
    return {name: list(_of_section(name)) for name in sections()}


def _of_section(name: str) -> Iterator[Description]:
    config = Config()
    is_general = name == _GENERAL
    owner = config if is_general else getattr(config, name)
    prefix = "" if is_general else f"{name}."
    types = get_type_hints(type(owner))
    # The docstring below a field is its text.
    texts = {each.arg_name: each.description for each in _docstrings(type(owner))}
    for declared in dataclasses.fields(owner):
        default = getattr(owner, declared.name)
        if dataclasses.is_dataclass(default):  # a section of its own
            continue
        hint = types[declared.name]
        choices = _choices(hint)
        # The values of a setting are its choices, or a type with a range.
        values = ", ".join(choices)
        if not choices:
            values = _type_name(hint) + _limits(*allowed_range(declared))
        # Docstrings are wrapped in the code.
        text = " ".join((texts[declared.name] or "").split())
        yield Description(prefix + declared.name, choices, values, _as_text(default), text)


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the values of a type that has few; empty for any other type."""
    if hint is bool:
        return ("true", "false")
    return get_args(hint) if get_origin(hint) is Literal else ()


def _docstrings(cls: type) -> Iterator[Any]:
    """Yield the docstrings of the fields of a dataclass and of those that it inherits from."""
    for each in reversed(cls.__mro__[:-1]):
        yield from parse_from_object(each).params


def _limits(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    # The largest seed has 63 bits, which says nothing to a reader.
    if high is None or high >= 2**53:
        return f", at least {low:g}"
    # The format g would write a large number in powers of ten.
    return f", {low:g} to {high:g}" if high < 1e6 else f", {low:g} to {high:,.0f}"


def _type_name(hint: Any) -> str:
    if hint in _TYPES:
        return _TYPES[hint]
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    parts = get_args(hint)
    if get_origin(hint) is tuple:
        count = "" if parts[-1] is ... else f"{len(parts)} "
        return f"list of {count}{_LISTS[parts[0]]}"
    # The only other type is a union, such as a number or a list of numbers.
    return " or ".join(_type_name(part) for part in parts)


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def settings_text(name: str = "") -> str:
    """Return a paragraph for each setting of `describe`: name, values, default, and what it means."""
    lines = []
    for each in describe(name):
        short_names = _short_names(each.key)
        also = f"  (also {', '.join(short_names)})" if short_names else ""
        default = f"; default {each.default}" if each.default else ""
        lines.append(f"--{each.key}{also}")
        lines.append(f"    {each.values}{default}")
        lines += textwrap.wrap(each.text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _short_names(key: str) -> list[str]:
    """Return the short options of a setting."""
    return [f"--{short}" for short, of in SHORT_NAMES.items() if of == key]


def settings_page() -> str:
    """Return docs/config.md: a table of all settings for each section."""
    lines = [
        "# Settings",
        "",
        "<!-- `wmse settings --markdown > docs/config.md` writes this page; a test compares the two. -->",
        "",
        "Give a setting in a YAML file, in its section, or on the command line as `--section.key value`. Hyphens equal",
        "underscores on the command line, and the common settings have short names there: "
        + ", ".join(f"`--{name}`" for name in SHORT_NAMES)
        + ".",
        "`wmse settings SECTION` prints one section. `config.yaml` in the run folder has the value of every setting of a",
        "run, and where it came from.",
    ]
    for name, summary in sections().items():
        lines += ["", f"## {name}", "", summary, "", "| setting | values | default | meaning |", "|---|---|---|---|"]
        for each in describe(name):
            default = f"`{each.default}`" if each.default else ""
            cells = (f"`{each.key}`", each.values, default, each.text)
            # A bar would end the cell.
            escaped = [cell.replace("|", "\\|") for cell in cells]
            lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"


def common_settings(keys: Sequence[str], *, short_names: bool) -> str:
    """Return a line for each of these settings: its name, default, and the beginning of its text.

    short_names: whether the command takes the short names as well."""
    found = {each.key: each for each in describe()}
    lines = []
    for key in keys:
        each = found[key]
        names = [f"--{key}"]
        if short_names:
            names += _short_names(key)
        # The beginning of the text, up to the first full stop, colon or parenthesis.
        meaning = re.split(r"[.:;(]", each.text, maxsplit=1)[0].strip()
        default = f" (default {each.default})" if each.default else ""
        lines.append(f"  {', '.join(names):<37} {meaning}{default}")
    return "\n".join(lines)
