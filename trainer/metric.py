"""Declare a metric: how its values are joined over steps and ranks, and how it is shown."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """Declaration of one metric in metrics.jsonl."""

    group: str = ""
    """Group in TensorBoard; empty: no curve."""
    text: str = ""
    """Format in the log line, such as "loss {:.3f}"; empty: not in the log line."""
    over: Literal["mean", "min"] = "mean"
    """How the values of a method's metric are joined over micro-batches, steps and ranks."""
    only_if_not_zero: bool = False
    """Whether the log line omits the metric while it is 0."""
