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
    # A dict keeps the order of the rows.
    for run in runs:
        rows.setdefault(run.row, []).append(_read(run, runs))
    table = [_row(name, seeds) for name, seeds in rows.items()]
    text = json.dumps({"rows": table}, indent=1)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "table.json", text + "\n")
    write_text(out / "table.md", _markdown(table))
    _print(table)
    plots = _curves(rows)
    if plots:
        with atomic_write(out / "curves.png") as file:
            file.write(draw_bands(plots, "views seen, thousands"))
    curves = ", curves.png" if plots else ""
    print(f"written to {out}: table.md, table.json{curves}")


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
        for name in protocols_of(run.config):
            result = find_result(files.results, run.config, name, last)
            if result is not None:
                trained.append(result)
    # The untrained encoder is the same for all rows that share its settings.
    untrained = list(untrained_results(run, runs).values())
    return _Seed(run, files, unfinished, {"trained": trained, "untrained": untrained})


def _row(name: str, seeds: Sequence[_Seed]) -> dict[str, Any]:
    """Return a row as a JSON value."""
    # All finished seeds of a row have the same number of steps.
    finished = [seed for seed in seeds if not seed.unfinished]
    steps = int(last_checkpoint(finished[0].run.config)) if finished else None
    views = None if steps is None else steps * _views_of_step(seeds[0])
    return {
        "row": name,
        "seeds": len(seeds),
        "finished": len(finished),
        "steps": steps,
        "views": views,
        "figures": _figures(seeds),
        "unfinished": {seed.run.seed: seed.unfinished for seed in seeds if seed.unfinished},
    }


def _views_of_step(seed: _Seed) -> int:
    """Return the number of views that a step of the run trains on."""
    config = seed.run.config
    return config.data.images_per_step * config.views.num_views


def _figures(seeds: Sequence[_Seed]) -> dict[str, dict[str, Any]]:
    """Return the figures of a row by their labels, each with the statistics over its seeds and the figure of the paper."""
    figures: dict[str, dict[str, Any]] = {}
    # Some seeds may lack a protocol, if their runs are not finished.
    for seed in seeds:
        for column, results in seed.results.items():
            for result in results:
                comparison = compare(seed.files, result)
                for key, value in result.figures.items():
                    empty: dict[str, Any] = {
                        "trained": {},
                        "untrained": {},
                        "paper": None,
                    }
                    figure = figures.setdefault(_label(result, key), empty)
                    figure[column][seed.run.seed] = value
                    if comparison and key == "top1":
                        figure["paper"] = {
                            "top1": comparison.top1,
                            "differences": comparison.differences,
                        }
    # Only now are the values of all seeds known.
    for figure in figures.values():
        for column in ("trained", "untrained"):
            figure[column] = _statistics(figure[column])
    return figures


def _label(result: Result, figure: str) -> str:
    """Return the name of a figure in tables and plots."""
    return f"{result.label}, {figure.replace('_', ' ')}"


def _statistics(values: dict[int, float]) -> dict[str, Any] | None:
    """Return the mean and the sample standard deviation of values by seed; None without values."""
    if not values:
        return None
    numbers = list(values.values())
    return {
        "mean": statistics.fmean(numbers),
        "spread": statistics.stdev(numbers) if len(numbers) > 1 else None,
        "by_seed": values,
    }


def _labels(table: Sequence[dict[str, Any]]) -> list[str]:
    """Return the figures that tables show, in order. Top-5 accuracies are only in table.json."""
    labels: dict[str, None] = {}
    for row in table:
        labels |= dict.fromkeys(row["figures"])
    return [label for label in labels if "top5" not in label]


def _first_cells(row: dict[str, Any]) -> list[str]:
    """Return the texts that stand before the figures."""
    count = str(row["seeds"])
    if row["finished"] != row["seeds"]:
        count = f"{row['finished']} of {count}"
    numbers = ["" if row[key] is None else f"{row[key]:,d}" for key in ("steps", "views")]
    return [row["row"], count, *numbers]


def _figure_cells(row: dict[str, Any], label: str) -> list[str]:
    """Return the texts of a figure, in the order of `_COLUMNS`. A star marks a figure of the paper for other settings."""
    figure = row["figures"].get(label)
    if figure is None:
        return [""] * len(_COLUMNS)
    paper = figure["paper"]
    of_paper = ""
    if paper:
        star = "*" if paper["differences"] else ""
        of_paper = f"{paper['top1']:.2f}{star}"
    return [_mean(figure["trained"]), _mean(figure["untrained"]), of_paper]


def _mean(found: dict[str, Any] | None) -> str:
    """Return the text of a mean, with its spread if several seeds give one."""
    if not found:
        return ""
    mean = f"{found['mean']:.2f}"
    if found["spread"] is None:
        return mean
    return f"{mean} ± {found['spread']:.2f}"


def _notes(table: Sequence[dict[str, Any]]) -> list[str]:
    """Explain the numbers, and name what makes figures of the paper incomparable with those beside them."""
    notes = ["Mean ± sample standard deviation over the seeds; accuracies in percent."]
    for row in table:
        # The figures of a row share their differences, which are named once.
        differences: dict[str, None] = {}
        for figure in row["figures"].values():
            if figure["paper"]:
                differences |= dict.fromkeys(figure["paper"]["differences"])
        if differences:
            notes.append(f"* {row['row']} differs from the paper's experiment: {'; '.join(differences)}.")
    return notes


def _reasons(row: dict[str, Any]) -> str:
    """Name the runs of a row that are not finished, with the reasons."""
    # Seeds that ended for the same reason stand together.
    seeds: dict[str, list[str]] = {}
    for seed, reason in row["unfinished"].items():
        seeds.setdefault(reason, []).append(str(seed))
    parts = [f"seed {', '.join(numbers)}: {reason}" for reason, numbers in seeds.items()]
    return "; ".join(parts)


def _markdown(table: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each row and columns for each figure. Columns that no row fills are left out."""
    labels = _labels(table)
    titles = ["", *_FIRST[1:]]
    for label in labels:
        titles += [label, *_COLUMNS[1:]]
    titles.append("not finished")
    rows = []
    for row in table:
        cells = _first_cells(row)
        for label in labels:
            cells += _figure_cells(row, label)
        rows.append([*cells, _reasons(row)])

    # Empty columns are dropped, so the table is built of columns.
    columns = zip(*rows, strict=True)
    shown = [(title, *cells) for title, cells in zip(titles, columns, strict=True) if any(cells)]
    lines = [_markdown_line(cells) for cells in zip(*shown, strict=True)]
    # Numbers are aligned at the right.
    lines.insert(1, "|---|" + "---:|" * (len(shown) - 1))
    notes = [note.replace("*", "\\*") for note in _notes(table)]
    return "\n".join(lines) + "\n\n" + "\n\n".join(notes) + "\n"


def _markdown_line(cells: Iterable[str]) -> str:
    """Return a line of a table. A cell is one line, in which bars and stars are only characters."""
    escaped = []
    for cell in cells:
        one_line = " ".join(cell.split())
        escaped.append(one_line.replace("|", "\\|").replace("*", "\\*"))
    return f"| {' | '.join(escaped)} |"


def _print(table: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each figure, because a terminal is narrower than a page."""
    shown = Table()
    for title in (*_FIRST, "figure", *_COLUMNS):
        is_text = title in ("row", "figure")
        shown.add_column(title, justify="left" if is_text else "right", overflow="fold")
    for row in table:
        first = _first_cells(row)
        # A row without figures has one line as well.
        for label in _labels([row]) or [""]:
            cells = [*first, label, *_figure_cells(row, label)]
            shown.add_row(*map(Text, cells))
            # The name of the row stands beside its first figure only.
            first = [""] * len(first)
        shown.add_section()
    console = Console()
    console.print(shown)
    # The table has no room for reasons.
    reasons = [f"{row['row']}, {_reasons(row)}" for row in table if row["unfinished"]]
    for note in (*reasons, *_notes(table)):
        console.print(Text(printable(note)), soft_wrap=True)


def _curves(rows: dict[str, list[_Seed]]) -> dict[str, list[Band]]:
    """Return the band of each row for each protocol that measured several checkpoints, by the label of the figure."""
    plots: dict[str, list[Band]] = {}
    for number, (name, seeds) in enumerate(rows.items()):
        for label, by_views in _points(seeds).items():
            # A single checkpoint gives no curve.
            if len(by_views) > 1:
                band = _band(name, by_views, color_of(number))
                plots.setdefault(label, []).append(band)
    return plots


def _points(seeds: Sequence[_Seed]) -> dict[str, dict[float, list[float]]]:
    """Return the values of the seeds of a row, by the label of the figure, then by thousands of views seen."""
    points: dict[str, dict[float, list[float]]] = {}
    for seed in seeds:
        for result in seed.files.results:
            figure = next(iter(result.figures), None)  # the main figure of a protocol comes first
            # Results of other settings are left out.
            measured = find_result([result], seed.run.config, result.protocol, result.checkpoint)
            if figure is None or measured is None or result.step is None:
                continue
            # Rows with more views of each image see as many views in fewer epochs.
            views = result.step * _views_of_step(seed)
            of_figure = points.setdefault(_label(result, figure), {})
            of_figure.setdefault(views / 1000, []).append(result.figures[figure])
    return points


def _band(name: str, by_views: dict[float, list[float]], color: str) -> Band:
    """Return the means and spreads of a row over its seeds. by_views: values of the seeds by views seen."""
    views = sorted(by_views)
    means = []
    spreads = []
    for seen in views:
        values = by_views[seen]
        means.append(statistics.fmean(values))
        spreads.append(statistics.stdev(values) if len(values) > 1 else math.nan)
    return Band(name, views, means, spreads, color)
