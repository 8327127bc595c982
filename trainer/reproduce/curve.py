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
        top1 = f"{point.result.content['top1']:.2f}"
        curve = f"{point.expected.top1:.2f}"
        table.add_row(point.result.label, f"{point.epoch:.4g}", top1, curve, f"{low:.2f} to {high:.2f}", point.word)
    console = Console()
    console.print(table)
    expected = points[0].expected
    console.print(f"curve: {expected.source}; spread over seeds: {expected.spread_source}", soft_wrap=True)
    return FAILED if any(point.word == _WORDS[BELOW] for point in points) else DONE


def compare(config: Config, curve: dict[str, Any]) -> list[Point]:
    """Return the newest measured checkpoint beside the curve, a point for each protocol that has measured it."""
    run_dir = Path(config.run_dir)
    total_steps = whole(read_run(run_dir).state, "total_steps")
    if not total_steps:
        return []
    results = read_results(run_dir / "eval", total_steps / config.optimizer.epochs, [])
    for step in sorted({result.step for result in results if result.step is not None}, reverse=True):
        found = [find_result(results, config, protocol, str(step)) for protocol in curve["top1"]]
        points = [point for result in found if result and (point := _point(result, curve))]
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
    spread = statistics.fmean(mean.spread**2 for mean in means) ** 0.5
    expected = means[0]._replace(top1=top1, spread=spread)
    return Point(result, epoch, expected, expected_interval(expected, result.content["test_images"]))
