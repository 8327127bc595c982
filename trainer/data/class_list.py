"""Read a list of classes, a text file with one a line, that selects a subset such as ImageNet-100."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.data.printable import printable
from trainer.errors import InputError


def read_class_list(path: Path, known: list[str]) -> list[str]:
    """Read the classes of a list; return them in the order of `known`, the classes of the set.

    The first word of a line is the class, unless the whole line is one; # begins a comment. Raises InputError naming file and
    line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file in UTF-8"
        raise InputError(f"{path}: can't be read as a list of classes: {reason}") from error
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = re.split(r"(?:^|\s)#", line)[0].strip()
        if not text:
            continue
        name = text if text in known else text.split()[0]
        if name not in known:
            raise InputError(
                f"{path}, line {number}: the set has no class {printable(name)!r}; its {len(known)} classes begin with "
                f"{', '.join(map(printable, known[:3]))}"
            )
        if name in first_line:
            raise InputError(
                f"{path}, line {number}: the class {printable(name)!r} is already in line {first_line[name]}"
            )
        first_line[name] = number
    if not first_line:
        raise InputError(f"{path}: lists no class: give the name of a class folder on each line")
    return [name for name in known if name in first_line]
