"""Print results as a table on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(name: str, results: dict[str, dict[str, Any]]) -> None:
    """Print a table with a row for each figure to stderr. results: {protocol: result}, as from `run_evaluation`."""
    any_result = next(iter(results.values()))
    title = f"encoder: {name}, {any_result['features']} features, {any_result['test_images']} test images"
    table = Table("protocol", "figure", "95 % interval", title=title)
    for result in results.values():
        for key in result["figures"]:
            words = key.replace("_", " ")
            interval = result.get("interval95") if key == "top1" else None
            chance = f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else ""
            table.add_row(f"{result['label']}, {words}", f"{result[key]:.2f}", chance)
    Console(stderr=True).print(table)
