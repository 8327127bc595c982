"""Every measurement of an experiment, one after the other, and one table of what limits it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

SHARES = {"loss": 0.15, "loader": 0.2, "compute": 0.25, "end2end": 0.3, "checkpoint": 0.1}  # of the time

_log = logging.getLogger(__name__)


def bench_all(parts: Mapping[str, Callable[[float], dict[str, Any] | None]], seconds: float) -> dict[str, Any]:
    """Run each part for its share of about `seconds`; one that fails says why, and the others still run.

    parts: name in SHARES -> function of its seconds that measures.
    -> {"parts": each one's result or {"error": why}, "failed_parts": [name], "summary": [{what, value, unit}]}.
    """
    results: dict[str, Any] = {}
    for name, measure in parts.items():
        try:
            results[name] = measure(SHARES[name] * seconds)
        except Exception as error:
            _log.debug("%s failed", name, exc_info=True)
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    rows = summary(results)
    _print_table(rows)
    failed = [name for name, result in results.items() if "error" in result]
    return {"bench": "all", "seconds": seconds, "summary": rows, "failed_parts": failed, "parts": results}


def summary(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a figure that decides; a part that failed has a row with its error."""
    rows: list[dict[str, Any]] = []
    for name, result in results.items():
        if "error" in result:
            rows.append({"part": name, "what": "failed", "value": result["error"], "unit": ""})
            continue
        for what, value, unit in FIGURES[name](result):
            rows.append({"part": name, "what": what, "value": value, "unit": unit})
    return rows


def _loss(result: Any) -> list[tuple[str, float, str]]:
    figures = result["results"][0]["figures"]
    name = min(figures, key=lambda each: figures[each]["forward_backward"]["median"])
    both = figures[name]["forward_backward"]
    return [
        (f"forward and backward, {name}", both["median"] / 1e3, "ms"),
        ("against the loop", both["speedup_over_loop"], "times"),
    ]


def _loader(result: Any) -> list[tuple[str, float, str]]:
    return [("alone", result["views_per_s"], "views/s")]


def _compute(result: Any) -> list[tuple[str, float, str]]:
    best = result["roofline"]
    return [
        ("step alone", result["views_per_s"], "views/s"),
        (f"roofline a rank, by {best['roofline_bound']}", best["roofline_views_per_s"], "views/s"),
        ("arithmetic used", 100 * best["flop_utilisation"], "%"),
    ]


def _end2end(result: Any) -> list[tuple[str, float, str]]:
    return [
        ("whole loop", result["views_per_s"], "views/s"),
        ("share of the step alone", 100 * result["share_of_compute"], "%"),
        ("waits for data", result["step"]["percent"]["data_wait"], "%"),
        ("the loop's overhead", result["step"]["loop_overhead_percent"], "%"),
    ]


def _checkpoint(result: Any) -> list[tuple[str, float, str]]:
    lost = result["percent_of_loop"]
    return [
        ("the loop stands still for a save", result["stall_ms"]["median"], "ms"),
        ("lost at a save every 5 minutes", lost.get("with_slowdown", lost["standing_still"]), "%"),
    ]


FIGURES: dict[str, Callable[[Any], list[tuple[str, float, str]]]] = {
    "loss": _loss,
    "loader": _loader,
    "compute": _compute,
    "end2end": _end2end,
    "checkpoint": _checkpoint,
}


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table("part", "", "median", "unit")
    last = None
    for row in rows:
        value = row["value"] if isinstance(row["value"], str) else f"{row['value']:,.3g}"
        if isinstance(row["value"], float) and abs(row["value"]) >= 1000:
            value = f"{row['value']:,.0f}"
        table.add_row("" if row["part"] == last else row["part"], row["what"], value, row["unit"])
        last = row["part"]
    Console(stderr=True, width=120).print(table)
