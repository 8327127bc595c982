"""RankMe and LiDAR of a run beside the accuracies of its checkpoints, and their rank correlation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.cluster.runs import number
from trainer.report.collect import Run

HEALTH = {"rankme": "RankMe", "lidar": "LiDAR"}
_LEAST_POINTS = 3  # the ranks of two points always agree or disagree entirely


def checkpoint_health(run: Run, key: str) -> tuple[list[float], list[float]]:
    """Return epoch and value of a metric at each evaluated checkpoint of a run, in the order of the steps."""
    # Several protocols may have measured a checkpoint.
    steps = {result.step for result in run.results if result.is_of_run and result.step is not None}
    epochs: list[float] = []
    values: list[float] = []
    for step in sorted(steps):
        line = _line_of(run, step)
        epoch = number(line, "epoch")
        value = number(line, key)
        if epoch is not None and value is not None:
            epochs.append(epoch)
            values.append(value)
    return epochs, values


def _line_of(run: Run, step: int) -> dict[str, Any]:
    """Return the last line of metrics.jsonl up to a step; empty if there is none."""
    lines = [line for line in run.lines if line["step"] <= step]
    return lines[-1] if lines else {}


def describe_correlations(run: Run) -> list[str]:
    """Describe the rank correlation of RankMe and LiDAR with each top-1 accuracy of the evaluations, or of the online probe."""
    accuracies = _accuracies(run)
    sentences = []
    for key, name in HEALTH.items():
        # Each measure is compared with each accuracy by itself.
        for label, points in accuracies.items():
            # A run of an older program lacks the values.
            values = []
            known = []
            for line, accuracy in points:
                value = number(line, key)
                if value is not None:
                    values.append(value)
                    known.append(accuracy)
            found = spearman(values, known)
            if len(values) >= _LEAST_POINTS and found is not None:
                what = "logged lines" if label == "online probe" else "checkpoints"
                sentences.append(f"{name} and {label}: {found:+.2f}, a correlation over {len(values)} {what}")
    return sentences


def _accuracies(run: Run) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Return pairs of a line of metrics.jsonl and a top-1 accuracy, by what was measured."""
    found: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for result in run.results:
        if not result.is_of_run or result.step is None:
            continue
        line = _line_of(run, result.step)
        for figure, accuracy in result.figures.items():
            if figure.endswith("top1"):
                words = figure.replace("_", " ").replace("top1", "top-1")
                points = found.setdefault(f"{result.label}, {words}", [])
                points.append((line, accuracy))
    # A run without evaluations may still have an online probe.
    if not found:
        points = found.setdefault("online probe", [])
        for line in run.lines:
            probe = number(line, "probe_top1")
            if probe is not None:
                points.append((line, probe))
    return found


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None if all values of one side are equal, or if there are none."""
    if not len(x):
        return None
    # Pearson's correlation, of the ranks instead of the values.
    ranks_x = _ranks(x)
    ranks_y = _ranks(y)
    a = ranks_x - ranks_x.mean()
    b = ranks_y - ranks_y.mean()
    spread = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / spread if spread else None


def _ranks(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    _, which, counts = np.unique(np.array(values, dtype=np.float64), return_inverse=True, return_counts=True)
    # Equal values take the ranks from last - count + 1 to last.
    last = np.cumsum(counts)
    mean_ranks = last - (counts - 1) / 2
    return mean_ranks[which]
