"""Table of all figures of a run: a row for each figure, a column for each encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.report.collect import Result, Run
from trainer.report.paper import Comparison, compare

_BASELINES = ("pixels", "random")  # the columns before the checkpoints


@dataclass
class Row:
    """One figure of a protocol for all encoders. Results of other settings have rows of their own."""

    label: str
    figure: str
    how: str
    is_of_run: bool
    """Whether it was measured with the settings of the run."""
    results: dict[str, Result] = field(default_factory=dict)
    """By the name of the column."""
    comparison: Comparison | None = None
    """The paper's figure beside that of the last checkpoint."""

    @property
    def described(self) -> tuple[str, str]:
        """Name of the protocol, and how it measures."""
        return self.label, self.how


@dataclass(frozen=True)
class FigureTable:
    """All figures of one run."""

    run: Run
    columns: Sequence[str]
    rows: Sequence[Row]


def figure_table(run: Run) -> FigureTable:
    """Arrange the results of a run."""
    rows: dict[tuple[str, ...], Row] = {}
    columns: dict[str, tuple[int, int]] = {}
    for result in run.results:
        column = _column(result)
        columns[column] = _order(result)
        for figure in result.figures:
            # Results differ in their settings exactly if these descriptions differ.
            where = [str(result.content.get(key)) for key in ("data_root", "train_split", "test_split", "precision")]
            key = (result.protocol, figure, result.how, *where)
            row = rows.setdefault(key, Row(result.label, figure, result.how, is_of_run=True))
            row.is_of_run &= result.is_of_run or result.is_of_another_run
            row.results[column] = result
            if figure == "top1" and result.is_of_run:
                row.comparison = compare(run, result) or row.comparison
    return FigureTable(run, sorted(columns, key=lambda name: columns[name]), list(rows.values()))


def _column(result: Result) -> str:
    """Return the name of the encoder's column."""
    if result.is_of_another_run:
        return f"{result.checkpoint} of another run"
    if result.epoch is None:
        return {"random": "untrained"}.get(result.checkpoint, result.checkpoint)
    return f"step {result.checkpoint}, epoch {result.epoch:.4g}"


def _order(result: Result) -> tuple[int, int]:
    """Return the place of the encoder's column: baselines first, then checkpoints by their steps, then those of other runs."""
    if result.checkpoint in _BASELINES:
        return 0, _BASELINES.index(result.checkpoint)
    return 1 + result.is_of_another_run, result.step or 0
