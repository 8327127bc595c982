"""Print checks: a table on a terminal, else plain lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.verify.check import Check

_COLOURS = {
    "passed": "green",
    "failed": "bold red",
    "skipped": "yellow",
}


def print_checks(checks: Sequence[Check]) -> None:
    """Print each check to stdout, with its error, bound and result."""
    if not sys.stdout.isatty():
        for check in checks:
            print(f"{check.result:<8} {check.group:<10} {check.name}: {_outcome(check)}")
        return
    # Names and reasons may contain brackets, which rich would take for markup.
    table = Table("group", "check", "error", "bound", "result")
    for check in checks:
        result = f"[{_COLOURS[check.result]}]{check.result}[/]"
        reason = f" ({escape(check.reason)})" if check.reason else ""
        table.add_row(check.group, escape(check.name), _number(check.error), _number(check.bound), result + reason)
    Console().print(table)


def _outcome(check: Check) -> str:
    if check.reason:
        return check.reason
    return f"error {_number(check.error)}, bound {_number(check.bound)}"


def _number(value: float | str | None) -> str:
    """Return an error or a bound as text; empty if there is none."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.1e}" if value else "0"
