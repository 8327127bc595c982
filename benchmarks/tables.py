"""Tables of Markdown, and the places in a document that hold them:

<!-- table NAME -->
...
<!-- /table -->
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of one table."""
    return [_line(head), "|" + "---|" * len(head), *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_tables(document: Path, tables: dict[str, list[str]]) -> None:
    """Put each table in the place of its name. Raises SystemExit naming a table that has no place, and writes nothing then."""
    text = document.read_text()
    for name, lines in tables.items():
        place = re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- /table -->)", re.DOTALL)
        if len(place.findall(text)) != 1:
            raise SystemExit(f"{document}: needs one <!-- table {name} --> with <!-- /table --> on a line below it")
        body = "\n".join(lines) + "\n"
        text = place.sub(lambda found, body=body: found[1] + body + found[2], text)
    document.write_text(text)
