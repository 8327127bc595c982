"""Declare a setting: its default, its range, and whether another value changes what a run learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, field, fields, is_dataclass
from typing import Any

Range = tuple[float | None, float | None]


def setting(default: Any, *, between: Range = (None, None), shapes_result: bool = True) -> Any:
    """Return the dataclass field of a setting.

    between: smallest and largest value, both allowed; None: no limit. It applies to each item of a tuple.
    shapes_result: whether another value changes what is learnt. A run refuses to resume with another value if it does.
    """
    return field(default=default, metadata={"between": between, "shapes_result": shapes_result})


def allowed_range(declared: Field[Any]) -> Range:
    """Return the smallest and largest value of a setting; None: no limit."""
    return declared.metadata.get("between", (None, None))


def shapes_result(declared: Field[Any]) -> bool:
    """Return whether another value of a setting changes what a run learns."""
    return declared.metadata.get("shapes_result", True)


def all_settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield the dotted name, the declaration and the value of each setting of a (section of a) config."""
    for declared in fields(section):
        value = getattr(section, declared.name)
        if is_dataclass(value):
            yield from all_settings(value, f"{prefix}{declared.name}.")
        else:
            yield prefix + declared.name, declared, value
