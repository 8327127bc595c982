"""Print results as a table on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

FIGURES = ("top1", "top5", "standardised_top1", "standardised_top5")  # the keys of a result that are percentages


def print_table(name: str, results: dict[str, dict[str, Any]]) -> None:
    """Print a table with a row for each figure to stderr. results: {measure: result}, as from `run_evaluation`."""
    any_result = next(iter(results.values()))
    title = f"encoder: {name}, {any_result['features']} features, {any_result['test_images']} test images"
    table = Table("measure", "percent", title=title)
    for measure, result in results.items():
        label = f"{result['k']}-nn" if measure == "knn" else "linear"
        for key in FIGURES:
            if key in result:
                words = key.replace("_", " ")
                table.add_row(f"{label} {words}", f"{result[key]:.2f}")
    Console(stderr=True).print(table)
