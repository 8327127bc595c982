"""Compare the newest measured checkpoint of a run with a stored curve: benchmarks/results/curves/NAME.json."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from trainer.cluster.runs import read_run, whole
from trainer.config.schema import Config
from trainer.errors import DONE, FAILED, InputError
from trainer.report.collect import Result, read_results
from trainer.reproduce.published import ABOVE, BELOW, Interval, Published, expected_interval, mean_of, verdict
from trainer.sweep.progress import find_result

CURVES = Path(__file__).parents[2] / "benchmarks" / "results" / "curves"
AS_EXPECTED = "as expected"
_WORDS = {ABOVE: "ahead", BELOW: "behind"}


class Point(NamedTuple):
    """Measured figure of a checkpoint beside the curve."""

    result: Result
    epoch: float
    expected: Published
    interval: Interval

    @property
    def word(self) -> str:
        """ "ahead", "behind" or "as expected"."""
        return _WORDS.get(verdict(self.result.content["top1"], self.interval), AS_EXPECTED)


def check_progress(config: Config, name: str) -> int:
    """Print where the newest measured checkpoint lies. Returns the exit code: FAILED if a figure is behind."""
    path = CURVES / f"{name}.json"
    if not path.exists():
        names = ", ".join(sorted(file.stem for file in CURVES.glob("*.json"))) or "none"
        raise InputError(f"there is no stored curve of {name} ({path}); there are: {names}")
    points = compare(config, json.loads(path.read_text()))
    if not points:
        raise InputError(
            f"{config.run_dir} has no measured checkpoint that the curve covers: measure one by `wmse evaluate --run_dir "
            f"{config.run_dir}`, or all of them by --follow"
        )
    table = Table("protocol", "epoch", "this run", "curve", "expected (95 %)", "", title=f"{name}, so far")
    for point in points:
        low, high = point.interval
        table.add_row(
            point.result.label,
            f"{point.epoch:.4g}",
            f"{point.result.content['top1']:.2f}",
            f"{point.expected.top1:.2f}",
            f"{low:.2f} to {high:.2f}",
            point.word,
        )
    console = Console()
    console.print(table)
    # All points share the source and the seeds of the curve.
    expected = points[0].expected
    console.print(f"curve: {expected.source}; spread over seeds: {expected.spread_source}", soft_wrap=True)
    is_behind = any(point.word == _WORDS[BELOW] for point in points)
    return FAILED if is_behind else DONE


def compare(config: Config, curve: dict[str, Any]) -> list[Point]:
    """Return the newest measured checkpoint beside the curve, a point for each protocol that has measured it."""
    run_dir = Path(config.run_dir)
    # The curve goes by epochs, and a result knows its step.
    total_steps = whole(read_run(run_dir).state, "total_steps")
    if not total_steps:
        return []
    results = read_results(run_dir / "eval", total_steps / config.optimizer.epochs, [])
    steps = {result.step for result in results if result.step is not None}
    # The newest checkpoint may lie outside of the curve, or have been measured by other protocols.
    for step in sorted(steps, reverse=True):
        points = []
        for protocol in curve["top1"]:
            result = find_result(results, config, protocol, str(step))
            point = _point(result, curve) if result else None
            if point is not None:
                points.append(point)
        if points:
            return points
    return []


def _point(result: Result, curve: dict[str, Any]) -> Point | None:
    """Return the curve's value at the epoch of the result, between its points along a line; None outside of the curve."""
    epochs = curve["epochs"]
    epoch = result.epoch
    if epoch is None or not epochs[0] <= epoch <= epochs[-1]:
        return None
    # by_epoch[i][j]: top-1 of seed j after epochs[i].
    by_epoch = curve["top1"][result.protocol]
    means = [mean_of(values, curve["source"]) for values in by_epoch]
    top1 = float(np.interp(epoch, epochs, [mean.top1 for mean in means]))
    # The spread of a few seeds at one epoch says little, so all epochs share the root of the mean variance.
    variance = statistics.fmean(mean.spread**2 for mean in means)
    expected = means[0]._replace(top1=top1, spread=variance**0.5)
    interval = expected_interval(expected, result.content["test_images"])
    return Point(result, epoch, expected, interval)
