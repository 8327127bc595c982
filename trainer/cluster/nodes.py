"""SLURM's short forms, expanded without asking scontrol: node lists, tasks per node, time limits."""

from __future__ import annotations

import itertools
import re

from trainer.errors import InputError

_MOST_NODES = 10_000
_WIDEST_RANGE = 64  # each number in it is checked
_GROUP = re.compile(r"\[([^\[\]]*)\]")


def expand_nodes(text: str) -> list[str]:
    """The names in a SLURM node list, in order: "a,b[01-03,7]" -> a, b01, b02, b03, b7.

    Raises InputError if it is no list of names."""
    return [name for part in _split_outside_brackets(text) for name in _expand_name(part, text)]


def _split_outside_brackets(text: str) -> list[str]:
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not parts or ",".join(parts) != text:
        raise InputError(f"can't read the node list {text!r}: give names such as n1,n[02-04]")
    return parts


def _expand_name(part: str, text: str) -> list[str]:
    """One part may hold several brackets, as in x[1-2]y[3-4]."""
    pieces = _GROUP.split(part)  # text and the inside of brackets, alternating
    choices = [_expand_numbers(piece, text) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _expand_numbers(ranges: str, text: str) -> list[str]:
    """ "01-03,7" -> 01, 02, 03, 7: the first number's zeros are kept."""
    numbers: list[str] = []
    for span in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"can't read {span!r} in the node list {text!r}: give numbers such as 01-03")
        first = int(match[1])
        last = int(match[2] or match[1])
        numbers += [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """Tasks of each node from SLURM's "2(x3),1" -> 2, 2, 2, 1. Raises InputError for what is no such list."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise InputError(f"can't read the tasks per node {text!r}")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def parse_node_count(text: str) -> tuple[int, int]:
    """ "4" -> (4, 4) and "4-8" -> (4, 8): the smallest and largest number of nodes. Raises InputError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    least = int(match[1]) if match else 0
    most = int(match[2] or match[1]) if match else 0
    if not 1 <= least <= most:
        raise InputError(f"--nodes is {text!r}: give a number such as 4, or a range such as 4-8")
    if most > _MOST_NODES or most - least > _WIDEST_RANGE:
        raise InputError(f"--nodes is {text!r}: give at most {_MOST_NODES}, in a range of at most {_WIDEST_RANGE}")
    return least, most


def parse_minutes(text: str) -> int:
    """Minutes of a SLURM time limit, rounded up: "90", "30:00", "12:00:00", "2-0", "2-12:00", "2-12:00:00".

    Raises InputError for anything else, and for no time at all."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise InputError(f"the time limit is {text!r}: give minutes, or HH:MM:SS, or days-HH:MM:SS as SLURM takes it")
    days, *fields = match.groups()
    numbers = [int(field) for field in fields if field is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours = 0
        minutes, seconds = [*numbers, 0][:2]
    total = (int(days or 0) * 24 + hours) * 60 + minutes + -(-seconds // 60)
    if total < 1:
        raise InputError(f"the time limit is {text!r}: give at least a minute")
    return total
