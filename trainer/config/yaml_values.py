"""Read YAML: files as text, values by the core schema of YAML 1.2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import InputError

_MAX_NESTING = 8  # levels of brackets or sections; settings need 2
_NUMBER = list("-+.0123456789")
_FLOAT = (
    r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read the mapping in a YAML file. Each value is the text in the file, or None.

    Raises InputError if the file cannot be read or is not a mapping, and for duplicate keys, aliases and deep nesting."""
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_aliases_and_nesting(text)
        tree = yaml.load(text, _TextLoader)  # noqa: S506 (a SafeLoader)
    except FileNotFoundError:
        raise InputError(f"the file {path} does not exist: give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"cannot read {path}: {reason}") from error
    if tree is None:
        raise InputError(f"{path} is empty: write `key: value` on at least one line")
    if not isinstance(tree, dict):
        raise InputError(f"{path} is a {type(tree).__name__}: write a mapping, with `key: value` on each line")
    return tree


def read_value(text: str) -> Any:
    """Parse a number, true, false, null, a list of them, or text. Raises yaml.YAMLError."""
    _refuse_aliases_and_nesting(text)
    return yaml.load(text, _CoreLoader)  # noqa: S506 (a SafeLoader)


class _TextLoader(yaml.SafeLoader):
    """Loader that returns each value as the text in the file, and refuses duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (as the base class has it)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {twice[0]!r} is given twice{node.start_mark}", node.start_mark
            )
        return super().construct_mapping(node, deep)


class _CoreLoader(yaml.SafeLoader):
    """Loader for the core schema of YAML 1.2. PyYAML's rules (1.1) read 010 as eight, 1:30 as ninety and no as false."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value)
        try:
            is_prefixed = text[:2] in ("0o", "0x")
            return int(text, 0) if is_prefixed else int(text)
        except ValueError as error:  # Python limits the digits of a decimal number
            raise yaml.constructor.ConstructorError(None, None, "the number has too many digits") from error


# Both loaders know null; only the core loader knows numbers and booleans.
for _loader in (_TextLoader, _CoreLoader):
    _loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", _NUMBER),
    ("float", _FLOAT, _NUMBER),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
_CoreLoader.add_constructor("tag:yaml.org,2002:int", _CoreLoader.construct_yaml_int)


def _refuse_aliases_and_nesting(text: str) -> None:
    """Raise yaml.YAMLError for aliases and deep nesting, because such a file could take forever to read."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases are not allowed in settings: write the value instead of *{event.anchor}")
        if depth > _MAX_NESTING:
            raise yaml.YAMLError(f"more than {_MAX_NESTING} levels of brackets or sections: settings need two")
