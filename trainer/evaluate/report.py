"""Print results as a table on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(name: str, results: dict[str, dict[str, Any]]) -> None:
    """Print a table with a row for each figure to stderr. results: {protocol: result}, as from `run_evaluation`."""
    # All results are of the same encoder and images.
    any_result = next(iter(results.values()))
    encoder = f"step {name}" if name.isdigit() else name
    title = f"encoder: {encoder}, {any_result['features']} features, {any_result['test_images']} test images"
    table = Table("protocol", "figure", "95 % interval", title=title)
    for result in results.values():
        for key in result["figures"]:
            words = key.replace("_", " ")
            figure = f"{result['label']}, {words}"
            table.add_row(figure, f"{result[key]:.2f}", _interval(result, key))
    Console(stderr=True).print(table)


def _interval(result: dict[str, Any], key: str) -> str:
    """Return the 95 % interval of a figure as text; empty if it has none."""
    # The scores of the protocol, of each k, and of each share of the labels.
    scores = {"top1": result}
    scores |= {f"k{k}_top1": found for k, found in result.get("by_k", {}).items()}
    scores |= {f"{share}_top1": found for share, found in result.get("shares", {}).items()}
    limits = scores.get(key, {}).get("interval95")
    return f"{limits[0]:.2f} to {limits[1]:.2f}" if limits else ""
