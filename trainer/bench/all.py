"""Make every measurement of an experiment, one after the other, and sum up what limits it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

SHARES = {"loss": 0.15, "loader": 0.2, "compute": 0.25, "end2end": 0.3, "checkpoint": 0.1}  # of the time

_log = logging.getLogger(__name__)


def bench_all(parts: Mapping[str, Callable[[float], dict[str, Any] | None]], seconds: float) -> dict[str, Any]:
    """Run each part for its share of about `seconds`. A part that fails says why, and the others still run.

    parts: name in SHARES -> function of its seconds. Returns "parts": the result of each, or {"error": why}; "failed_parts";
    "summary": [{part, what, value, unit}].
    """
    results: dict[str, Any] = {}
    for name, measure in parts.items():
        try:
            results[name] = measure(SHARES[name] * seconds)
        except Exception as error:
            _log.debug("%s failed", name, exc_info=True)
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    summary = [
        {"part": name, "what": what, "value": value, "unit": unit}
        for name, result in results.items()
        for what, value, unit in figures_of(name, result)
    ]
    failed = [name for name, result in results.items() if "error" in result]
    return {"bench": "all", "seconds": seconds, "summary": summary, "failed_parts": failed, "parts": results}


def figures_of(part: str, result: Any) -> list[tuple[str, Any, str]]:
    """Return the figures of a part that decide, each with what it is and its unit."""
    if "error" in result:
        return [("failed", result["error"], "")]
    if part == "loss":
        both = {name: modes["forward_backward"] for name, modes in result["results"][0]["figures"].items()}
        best = min(both, key=lambda name: both[name]["median"])
        return [
            (f"forward and backward, {best}", both[best]["median"] / 1e3, "ms"),
            ("against the loop", both[best]["speedup_over_loop"], "times"),
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
        return [
            ("whole loop", result["views_per_s"], "views/s"),
            ("share of the step alone", 100 * result["share_of_compute"], "%"),
            ("waits for data", result["step"]["percent"]["data_wait"], "%"),
            ("the loop's overhead", result["step"]["loop_overhead_percent"], "%"),
        ]
    lost = result["percent_of_loop"]
    return [
        ("the loop stands still for a save", result["stall_ms"]["median"], "ms"),
        ("lost at a save every 5 minutes", lost.get("with_slowdown", lost["standing_still"]), "%"),
    ]
