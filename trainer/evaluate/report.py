"""Print results as a table on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(name: str, results: dict[str, dict[str, Any]]) -> None:
    """Print a table with a row for each figure to stderr. results: {protocol: result}, as from `run_evaluation`."""
    # All results are of the same encoder and images.
    any_result = next(iter(results.values()))
    title = f"encoder: {name}, {any_result['features']} features, {any_result['test_images']} test images"
    table = Table("protocol", "figure", "95 % interval", title=title)
    for result in results.values():
        for key in result["figures"]:
            words = key.replace("_", " ")
            figure = f"{result['label']}, {words}"
            # Only top-1 has an interval, and only if the protocol gives one top-1.
            interval = ""
            if key == "top1" and "interval95" in result:
                low, high = result["interval95"]
                interval = f"{low:.2f} to {high:.2f}"
            table.add_row(figure, f"{result[key]:.2f}", interval)
    Console(stderr=True).print(table)
