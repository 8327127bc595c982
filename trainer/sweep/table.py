"""The table of a sweep: mean and spread of each figure over the seeds of a row, and the curves of all rows."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.data.printable import printable
from trainer.files import atomic_write, write_text
from trainer.report.collect import Result, Run, collect_run
from trainer.report.paper import compare
from trainer.report.plots import Band, color_of, draw_bands
from trainer.sweep.definition import SweepRun
from trainer.sweep.progress import (
    NOT_EVALUATED,
    find_result,
    last_checkpoint,
    protocols_of,
    untrained_results,
    why_unfinished,
)

_FIRST = ("row", "seeds", "steps", "views seen")
_COLUMNS = ("trained", "untrained", "paper")


@dataclass(frozen=True)
class _Seed:
    """The files of one run."""

    run: SweepRun
    files: Run
    unfinished: str
    """Why the run is not finished; empty if it is."""
    results: dict[str, list[Result]]
    """Of the last checkpoint and of the untrained encoder, by the names of their columns."""


def write_table(runs: Sequence[SweepRun], out: Path) -> None:
    """Print the table, and write OUT/table.json, table.md and, if the runs kept checkpoints for curves, curves.png."""
    # Collect the seeds of each row, in the order of the sweep.
    rows: dict[str, list[_Seed]] = {}
    for run in runs:
        rows.setdefault(run.row, []).append(_read(run, runs))
    table = [_row(name, seeds) for name, seeds in rows.items()]
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "table.json", json.dumps({"rows": table}, indent=1) + "\n")
    write_text(out / "table.md", _markdown(table))
    _print(table)
    plots = _curves(rows)
    if plots:
        with atomic_write(out / "curves.png") as file:
            file.write(draw_bands(plots, "views seen, thousands"))
    print(f"written to {out}: table.md, table.json{', curves.png' if plots else ''}")


def _read(run: SweepRun, runs: Sequence[SweepRun]) -> _Seed:
    """Read the files of a run. runs: all runs of the sweep, one of which measured the untrained encoder."""
    files = collect_run(run.run_dir, run.name, {"problems": []})
    # The settings of a SLURM job come from a copy, so the sweep knows better which recipe the row names.
    files = replace(files, sources=run.sources)
    unfinished = why_unfinished(run.config)
    # The checkpoint of a run that has not ended is no result of its row.
    trained: list[Result] = []
    if unfinished in ("", NOT_EVALUATED):
        last = last_checkpoint(run.config)
        found = [find_result(files.results, run.config, name, last) for name in protocols_of(run.config)]
        trained = [result for result in found if result is not None]
    untrained = list(untrained_results(run, runs).values())
    return _Seed(run, files, unfinished, {"trained": trained, "untrained": untrained})


def _row(name: str, seeds: Sequence[_Seed]) -> dict[str, Any]:
    """Return a row as a JSON value."""
    # Collect each figure by seed, then summarise it.
    figures: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        for column, results in seed.results.items():
            for result in results:
                comparison = compare(seed.files, result)
                for key, value in result.figures.items():
                    figure = figures.setdefault(_label(result, key), {"trained": {}, "untrained": {}, "paper": None})
                    figure[column][seed.run.seed] = value
                    if comparison and key == "top1":
                        figure["paper"] = {"top1": comparison.top1, "differences": comparison.differences}
    for figure in figures.values():
        figure |= {column: _statistics(figure[column]) for column in ("trained", "untrained")}
    # All finished seeds of a row have the same number of steps.
    finished = [seed for seed in seeds if not seed.unfinished]
    steps = int(last_checkpoint(finished[0].run.config)) if finished else None
    config = seeds[0].run.config
    return {
        "row": name,
        "seeds": len(seeds),
        "finished": len(finished),
        "steps": steps,
        "views": steps and steps * config.data.images_per_step * config.views.num_views,
        "figures": figures,
        "unfinished": {seed.run.seed: seed.unfinished for seed in seeds if seed.unfinished},
    }


def _label(result: Result, figure: str) -> str:
    """Return the name of a figure in tables and plots."""
    return f"{result.label}, {figure.replace('_', ' ')}"


def _statistics(values: dict[int, float]) -> dict[str, Any] | None:
    """Return the mean and the sample standard deviation of values by seed; None without values."""
    if not values:
        return None
    numbers = list(values.values())
    spread = statistics.stdev(numbers) if len(numbers) > 1 else None
    return {"mean": statistics.fmean(numbers), "spread": spread, "by_seed": values}


def _labels(table: Sequence[dict[str, Any]]) -> list[str]:
    """Return the figures that tables show, in order. Top-5 accuracies are only in table.json."""
    return list(dict.fromkeys(label for row in table for label in row["figures"] if "top5" not in label))


def _first_cells(row: dict[str, Any]) -> list[str]:
    """Return the texts that stand before the figures."""
    count = str(row["seeds"]) if row["finished"] == row["seeds"] else f"{row['finished']} of {row['seeds']}"
    numbers = ["" if row[key] is None else f"{row[key]:,d}" for key in ("steps", "views")]
    return [row["row"], count, *numbers]


def _figure_cells(row: dict[str, Any], label: str) -> list[str]:
    """Return the texts of a figure, in the order of `_COLUMNS`. A star marks a figure of the paper for other settings."""
    figure = row["figures"].get(label)
    if figure is None:
        return [""] * len(_COLUMNS)
    paper = figure["paper"]
    star = "*" if paper and paper["differences"] else ""
    return [_mean(figure["trained"]), _mean(figure["untrained"]), f"{paper['top1']:.2f}{star}" if paper else ""]


def _mean(found: dict[str, Any] | None) -> str:
    """Return the text of a mean, with its spread if several seeds give one."""
    if not found:
        return ""
    mean = f"{found['mean']:.2f}"
    return mean if found["spread"] is None else f"{mean} ± {found['spread']:.2f}"


def _notes(table: Sequence[dict[str, Any]]) -> list[str]:
    """Explain the numbers, and name what makes figures of the paper incomparable with those beside them."""
    notes = ["Mean ± sample standard deviation over the seeds; accuracies in percent."]
    # The figures of a row share their differences, which are named once.
    for row in table:
        listed = [figure["paper"]["differences"] for figure in row["figures"].values() if figure["paper"]]
        differences = dict.fromkeys(line for lines in listed for line in lines)
        if differences:
            notes.append(f"* {row['row']} differs from the paper's experiment: {'; '.join(differences)}.")
    return notes


def _reasons(row: dict[str, Any]) -> str:
    """Name the runs of a row that are not finished, with the reasons."""
    # Seeds that ended for the same reason stand together.
    seeds: dict[str, list[str]] = {}
    for seed, reason in row["unfinished"].items():
        seeds.setdefault(reason, []).append(str(seed))
    return "; ".join(f"seed {', '.join(numbers)}: {reason}" for reason, numbers in seeds.items())


def _markdown(table: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each row and columns for each figure. Columns that no row fills are left out."""
    # Build the columns one after the other, because empty ones are dropped.
    columns = [list(cells) for cells in zip(*[_first_cells(row) for row in table], strict=True)]
    titles = ["", *_FIRST[1:]]
    for label in _labels(table):
        titles += [label, *_COLUMNS[1:]]
        columns += [list(cells) for cells in zip(*[_figure_cells(row, label) for row in table], strict=True)]
    titles.append("not finished")
    columns.append([_reasons(row) for row in table])
    shown = [(title, column) for title, column in zip(titles, columns, strict=True) if any(column)]

    def line(cells: Iterable[str]) -> str:
        # A cell is one line, in which bars and stars are only characters.
        escaped = [" ".join(cell.split()).replace("|", "\\|").replace("*", "\\*") for cell in cells]
        return f"| {' | '.join(escaped)} |"

    # Numbers are aligned at the right.
    rule = "|---|" + "---:|" * (len(shown) - 1)
    lines = zip(*[column for _, column in shown], strict=True)
    notes = [note.replace("*", "\\*") for note in _notes(table)]
    return "\n".join([line(title for title, _ in shown), rule, *map(line, lines)]) + "\n\n" + "\n\n".join(notes) + "\n"


def _print(table: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each figure, because a terminal is narrower than a page."""
    shown = Table()
    for title in (*_FIRST, "figure", *_COLUMNS):
        shown.add_column(title, justify="left" if title in ("row", "figure") else "right", overflow="fold")
    for row in table:
        first = _first_cells(row)
        # A row without figures has one line as well.
        for label in _labels([row]) or [""]:
            shown.add_row(*map(Text, (*first, label, *_figure_cells(row, label))))
            # The name of the row stands beside its first figure only.
            first = [""] * len(first)
        shown.add_section()
    console = Console()
    console.print(shown)
    reasons = [f"{row['row']}, {_reasons(row)}" for row in table if row["unfinished"]]
    for note in (*reasons, *_notes(table)):
        console.print(Text(printable(note)), soft_wrap=True)


def _curves(rows: dict[str, list[_Seed]]) -> dict[str, list[Band]]:
    """Return the band of each row for each protocol that measured several checkpoints, by the label of the figure."""
    plots: dict[str, list[Band]] = {}
    for number, (name, seeds) in enumerate(rows.items()):
        # label -> views seen -> values of the seeds
        points: dict[str, dict[float, list[float]]] = {}
        for seed in seeds:
            for result in seed.files.results:
                figure = next(iter(result.figures), None)  # the main figure of a protocol comes first
                measured = find_result([result], seed.run.config, result.protocol, result.checkpoint)
                if figure is not None and measured and result.step is not None:
                    # Rows with more views of each image see as many views in fewer epochs.
                    views = result.step * seed.run.config.data.images_per_step * seed.run.config.views.num_views
                    of_figure = points.setdefault(_label(result, figure), {})
                    of_figure.setdefault(views / 1000, []).append(result.figures[figure])
        # A single checkpoint gives no curve.
        for label, by_views in points.items():
            if len(by_views) > 1:
                plots.setdefault(label, []).append(_band(name, by_views, color_of(number)))
    return plots


def _band(name: str, by_views: dict[float, list[float]], color: str) -> Band:
    """Return the means and spreads of a row over its seeds. by_views: values of the seeds by views seen."""
    views = sorted(by_views)
    values = [by_views[seen] for seen in views]
    spreads = [statistics.stdev(some) if len(some) > 1 else math.nan for some in values]
    return Band(name, views, [statistics.fmean(some) for some in values], spreads, color)
