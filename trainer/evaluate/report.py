"""Results as a table on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

FIGURES = ("top1", "top5", "standardised_top1", "standardised_top5")  # of a result, in percent


def print_table(name: str, results: dict[str, dict[str, Any]]) -> None:
    """One row a figure of `results` ({measure: result of run_evaluation}), on stderr."""
    any_result = next(iter(results.values()))
    title = f"encoder: {name}, {any_result['features']} features, {any_result['test_images']} test images"
    table = Table("measure", "percent", title=title)
    for measure, result in results.items():
        for key in FIGURES:
            if key in result:
                label = f"{result['k']}-nn" if measure == "knn" else "linear"
                table.add_row(f"{label} {key.replace('_', ' ')}", f"{result[key]:.2f}")
    Console(stderr=True).print(table)
