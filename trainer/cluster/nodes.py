"""Parsers of SLURM's notations: node lists, tasks per node, numbers of nodes, time limits. They need no scontrol."""

from __future__ import annotations

import itertools
import math
import re

from trainer.errors import InputError

_MOST_NODES = 10_000
_WIDEST_RANGE = 64  # each number of nodes in a range is checked
_GROUP = re.compile(r"\[([^\[\]]*)\]")


def expand_nodes(text: str) -> list[str]:
    """Expand a SLURM node list to the names in order: "a,b[01-03,7]" -> a, b01, b02, b03, b7.

    Raises InputError if the text is not a list of names."""
    names: list[str] = []
    for part in _split_outside_brackets(text):
        names += _expand_name(part, text)
    return names


def _split_outside_brackets(text: str) -> list[str]:
    """Split at the commas outside of brackets: "a,b[1,3]" -> a, b[1,3]."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not parts or ",".join(parts) != text:
        raise InputError(f"cannot read the node list {text!r}: give names such as n1,n[02-04]")
    return parts


def _expand_name(part: str, text: str) -> list[str]:
    """Expand one part, which may have several brackets, as in x[1-2]y[3-4]. text: the whole list, for error messages."""
    # The pieces at odd places are the insides of brackets.
    pieces = _GROUP.split(part)
    choices = []
    for place, piece in enumerate(pieces):
        is_inside = place % 2 == 1
        choices.append(_expand_numbers(piece, text) if is_inside else [piece])
    # Combine the choices in the order of SLURM: the last bracket changes fastest.
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_numbers(ranges: str, text: str) -> list[str]:
    """Expand the inside of brackets: "01-03,7" -> 01, 02, 03, 7. All numbers of a range are as wide as the first."""
    numbers: list[str] = []
    for span in ranges.split(","):
        limits = _parse_range(span)
        if limits is None or limits[1] < limits[0]:
            raise InputError(f"cannot read {span!r} in the node list {text!r}: give numbers such as 01-03")
        first, last = limits
        # The zeros at the front belong to the names.
        first_text, _, _ = span.partition("-")
        width = len(first_text)
        numbers += [str(number).zfill(width) for number in range(first, last + 1)]
    return numbers


def _parse_range(text: str) -> tuple[int, int] | None:
    """Read "4-8" as (4, 8) and "4" as (4, 4). None for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        return None
    return int(match[1]), int(match[2] or match[1])


def expand_tasks(text: str) -> list[int]:
    """Expand SLURM's list of tasks per node: "2(x3),1" -> 2, 2, 2, 1. Raises InputError if the text is not such a list."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise InputError(f"cannot read the tasks per node {text!r}: SLURM writes such a list as 2(x3),1")
        count = int(match[1])
        repeats = int(match[2] or 1)
        tasks += [count] * repeats
    return tasks


def parse_node_count(text: str) -> tuple[int, int]:
    """Return the smallest and largest number of nodes: "4" -> (4, 4), "4-8" -> (4, 8).

    Raises InputError for anything else."""
    least, most = _parse_range(text) or (0, 0)
    if not 1 <= least <= most:
        raise InputError(f"--nodes is {text!r}: give a number such as 4, or a range such as 4-8")
    if most > _MOST_NODES or most - least > _WIDEST_RANGE:
        raise InputError(f"--nodes is {text!r}: give at most {_MOST_NODES}, in a range of at most {_WIDEST_RANGE}")
    return least, most


def parse_minutes(text: str) -> int:
    """Return the minutes of a SLURM time limit, rounded up.

    Forms: "90", "30:00", "12:00:00", "2-0", "2-12:00", "2-12:00:00". Raises InputError for anything else, and for a
    limit of 0."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise InputError(f"the time limit is {text!r}: give minutes, HH:MM:SS or days-HH:MM:SS, as SLURM accepts them")
    days_text, *fields = match.groups()
    days = int(days_text or 0)
    numbers = [int(field) for field in fields if field is not None]
    # After days the first number is hours. Without days it is hours only if there are three numbers, else minutes.
    if days_text is None and len(numbers) < 3:
        numbers.insert(0, 0)
    # Missing numbers at the end are 0.
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    hours += 24 * days
    total = 60 * hours + minutes + math.ceil(seconds / 60)
    if total < 1:
        raise InputError(f"the time limit is {text!r}: give at least one minute")
    return total
