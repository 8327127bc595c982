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
    steps = sorted({result.step for result in run.results if result.is_of_run and result.step is not None})
    epochs: list[float] = []
    values: list[float] = []
    for step in steps:
        line = _line_of(run, step)
        epoch, value = number(line, "epoch"), number(line, key)
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
        for label, points in accuracies.items():
            pairs = [(number(line, key), accuracy) for line, accuracy in points]
            known = [(value, accuracy) for value, accuracy in pairs if value is not None]
            found = spearman([value for value, _ in known], [accuracy for _, accuracy in known])
            if len(known) >= _LEAST_POINTS and found is not None:
                what = "logged lines" if label == "online probe" else "checkpoints"
                sentences.append(f"{name} and {label}: {found:+.2f}, a correlation over {len(known)} {what}")
    return sentences


def _accuracies(run: Run) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Return pairs of a line of metrics.jsonl and a top-1 accuracy, by what was measured."""
    found: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for result in run.results:
        if not result.is_of_run or result.step is None:
            continue
        for figure, value in result.figures.items():
            if figure.endswith("top1"):
                words = figure.replace("_", " ").replace("top1", "top-1")
                found.setdefault(f"{result.label}, {words}", []).append((_line_of(run, result.step), value))
    if not found:
        probe = [(line, number(line, "probe_top1")) for line in run.lines]
        found["online probe"] = [(line, value) for line, value in probe if value is not None]
    return found


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None if all values of one side are equal, or if there are none."""
    ranks = np.array([_ranks(x), _ranks(y)])
    centred = ranks - ranks.mean(axis=1, keepdims=True) if len(x) else ranks
    spread = float(np.sqrt((centred**2).sum(axis=1).prod()))
    return float((centred[0] * centred[1]).sum()) / spread if spread else None


def _ranks(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    _, which, counts = np.unique(np.array(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]
