"""Read a class list: a text file with one class on each line that selects a subset such as ImageNet-100."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.data.printable import printable
from trainer.errors import InputError

# A # begins a comment at the beginning of a line and after white space.
_COMMENT = re.compile(r"(?:^|\s)#")


def read_class_list(path: Path, known: list[str]) -> list[str]:
    """Read the classes of a list and return them in the order of `known`, the classes of the data set.

    If a whole line is the name of a class, it selects that class; otherwise its first word must be one. # begins a comment.
    Raises InputError naming file and line for an unknown or repeated class, and for a file that cannot be read or is empty.
    """
    first_line: dict[str, int] = {}  # class -> number of the line that names it
    for number, line in enumerate(_read_lines(path), 1):
        # The part before the comment may be empty.
        text = _COMMENT.split(line)[0].strip()
        if not text:
            continue
        # The name of a class folder may contain spaces, so the whole line is tried first.
        name = text if text in known else text.split()[0]
        if name not in known:
            examples = ", ".join(map(printable, known[:3]))
            raise InputError(
                f"{path}, line {number}: the set has no class {printable(name)!r}; its {len(known)} classes begin with "
                f"{examples}"
            )
        if name in first_line:
            raise InputError(
                f"{path}, line {number}: the class {printable(name)!r} is already in line {first_line[name]}"
            )
        first_line[name] = number
    if not first_line:
        raise InputError(f"{path}: lists no class: give the name of a class folder on each line")
    # The order of the list does not matter: labels follow the order of the data set.
    return [name for name in known if name in first_line]


def _read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 text file, with or without a byte order mark. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        # A UnicodeDecodeError has no strerror.
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file in UTF-8"
        raise InputError(f"{path}: cannot be read as a list of classes: {reason}") from error
