"""Published figures of the recipes, the interval in which a repetition is expected, and the verdict."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from trainer.report.paper import PAPER

Interval = tuple[float, float]

# Rows that this program has published itself: the source, and the top-1 of each seed by protocol.
OWN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("own.json").read_text())
ASSUMED_SPREAD = 0.3
"""Standard deviation over seeds, in points of accuracy, where nothing is published about it. This is an assumption."""

REACHED = "reached"
BELOW = "below"
ABOVE = "above"
NO_FIGURE = "no published figure"
_Z95 = 1.959964  # standard deviations of a normal distribution on each side that hold 95 %


class Published(NamedTuple):
    """Published top-1 of one protocol, in percent."""

    top1: float
    source: str
    spread: float = ASSUMED_SPREAD
    """Standard deviation over seeds, in points."""
    spread_source: str = "assumed"
    runs: int = 1
    """Number of runs whose mean the figure is."""


def published_figures(name: str) -> dict[str, Published]:
    """Return {protocol: figure} of a recipe; empty if nothing is published about it."""
    if name in OWN:
        row = OWN[name]
        return {protocol: mean_of(values, row["source"]) for protocol, values in row["top1"].items()}
    figures = dict(PAPER.get(name, {}))
    # The same figure of ImageNet stands under both protocols. The text of the paper describes the first one, and the papers
    # that it quotes use the second one (docs/evaluation.md, "Which figures are comparable").
    if "linear_sgd" in figures:
        del figures["linear_sgd" if "_wmse" in name else "linear"]
    return {protocol: Published(top1, "the W-MSE paper, a single run") for protocol, top1 in figures.items()}


def mean_of(values: list[float], source: str) -> Published:
    """Return the figure that is the mean of several seeds, with the spread that they have."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Published(mean, source)
    return Published(mean, source, statistics.stdev(values), f"of {len(values)} seeds", len(values))


def expected_interval(published: Published, test_images: int) -> Interval:
    """Return the 95 % interval of a repetition, in percent.

    It combines the binomial interval of the test set's size with the spread over seeds, as independent errors: that of the
    new run, and that of the mean of the published ones."""
    from trainer.evaluate.scores import wilson_interval

    top1 = published.top1
    num_right = round(top1 * test_images / 100)
    low, high = wilson_interval(num_right, test_images)
    # Variance of the new run plus that of the mean of the published ones.
    seeds = _Z95 * published.spread * math.sqrt(1 + 1 / published.runs)
    # Independent errors add up as squares, on each side by itself, since Wilson's interval is not symmetric.
    below = math.hypot(top1 - low, seeds)
    above = math.hypot(high - top1, seeds)
    return top1 - below, top1 + above


def verdict(top1: float, interval: Interval) -> str:
    """Say where a figure lies. The ends belong to the interval."""
    low, high = interval
    if top1 < low:
        return BELOW
    if top1 > high:
        return ABOVE
    return REACHED


def overall(verdicts: list[str]) -> str:
    """Return the verdict on a row. The worst figure decides, and a protocol without a published figure does not count."""
    judged = [each for each in verdicts if each != NO_FIGURE]
    if not judged:
        return NO_FIGURE
    return next(each for each in (BELOW, REACHED, ABOVE) if each in judged)
