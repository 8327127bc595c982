"""A list of classes as a text file, one a line, for a part of a set such as ImageNet-100."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.data.printable import printable
from trainer.errors import InputError


def read_class_list(path: Path, known: list[str]) -> list[str]:
    """The classes of a list, in the order of `known`, the set's own. The first word of a line is the class, unless the whole
    line is one; what follows a # is a comment. Raises InputError naming file and line."""
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
                f"{path}, line {number}: the class {printable(name)!r} is in line {first_line[name]} already"
            )
        first_line[name] = number
    if not first_line:
        raise InputError(f"{path}: lists no class: give one a line, as the folders of the set are named")
    return [name for name in known if name in first_line]
