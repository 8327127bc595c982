"""Run every measurement of an experiment in turn, and summarise what limits its speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

SHARES = {"loss": 0.15, "loader": 0.2, "compute": 0.25, "end2end": 0.3, "checkpoint": 0.1}  # share of the seconds

_log = logging.getLogger(__name__)


def bench_all(parts: Mapping[str, Callable[[float], dict[str, Any] | None]], seconds: float) -> dict[str, Any]:
    """Run each part for its share of about `seconds`. A part that fails does not stop the others.

    parts: name in SHARES -> function that measures for a number of seconds. Returns a dict for JSON:
    parts: the result of each part, or {"error": reason} if it failed.
    failed_parts: the names of the parts that failed.
    summary: [{part, what, value, unit}], the most important figures.
    """
    results: dict[str, Any] = {}
    # The parts need memory and packages of different kinds, so any of them may fail alone.
    for name, measure in parts.items():
        try:
            results[name] = measure(SHARES[name] * seconds)
        except Exception as error:
            _log.debug("%s failed", name, exc_info=True)
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    summary = []
    for name, result in results.items():
        for what, value, unit in figures_of(name, result):
            summary.append({"part": name, "what": what, "value": value, "unit": unit})
    failed = [name for name, result in results.items() if "error" in result]
    return {"bench": "all", "seconds": seconds, "summary": summary, "failed_parts": failed, "parts": results}


def figures_of(part: str, result: Any) -> list[tuple[str, Any, str]]:
    """Return the most important figures of a part: (description, value, unit) of each."""
    if "error" in result:
        return [("failed", result["error"], "")]
    if part == "loss":
        # The loss has one shape here, that of the config; its fastest implementation counts.
        figures = result["results"][0]["figures"]
        both = {name: modes["forward_backward"] for name, modes in figures.items()}
        best = min(both, key=lambda name: both[name]["median"])
        fastest = both[best]
        return [
            (f"forward and backward, {best}", fastest["median"] / 1e3, "ms"),
            ("against the loop", fastest["speedup_over_loop"], "times"),
        ]
    if part == "loader":
        return [("alone", result["views_per_s"], "views/s")]
    if part == "compute":
        roofline = result["roofline"]
        return [
            ("step alone", result["views_per_s"], "views/s"),
            (f"roofline a rank, by {roofline['roofline_bound']}", roofline["roofline_views_per_s"], "views/s"),
            ("arithmetic used", 100 * roofline["flop_utilisation"], "%"),
        ]
    if part == "end2end":
        step = result["step"]
        return [
            ("whole loop", result["views_per_s"], "views/s"),
            ("share of the step alone", 100 * result["share_of_compute"], "%"),
            ("waits for data", step["percent"]["data_wait"], "%"),
            ("the loop's overhead", step["loop_overhead_percent"], "%"),
        ]
    # The checkpoint's part is the only one left.
    shares = result["percent_of_loop"]
    lost = shares.get("with_slowdown", shares["standing_still"])
    return [
        ("the loop stands still for a save", result["stall_ms"]["median"], "ms"),
        ("lost at a save every 5 minutes", lost, "%"),
    ]
