"""Format results of `wmse bench` as tables, on the terminal and in Markdown.

    python -m trainer.bench.report RESULT.json            prints the table as Markdown
    python -m trainer.bench.report --write DOCUMENT.md    fills the document's tables from benchmarks/results

A document marks the place of a table by `<!-- table RESULT.json -->` and `<!-- /table -->`. If a result has several parts,
`<!-- table RESULT.json PART -->` names one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- table (\S+)(?: (\S+))? -->\n).*?(<!-- /table -->)", re.DOTALL)
PEERS = ("loader", "options", "loss", "optimizer", "training")

Result = Mapping[str, Any]
Row = Sequence[str]


class Report(NamedTuple):
    """A table of a result."""

    head: Row
    rows: Sequence[Row]


def print_report(result: Result) -> None:
    """Print a result as a table to stderr, followed by what was not measured, and why."""
    from rich.console import Console  # imported here, because measuring does not need it
    from rich.table import Table

    head, rows = report(result)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console = Console(stderr=True, width=150)
    console.print(table)
    # The result as a whole and each of its parts may name things that were not measured.
    for part in (result, *result.get("results", [])):
        for name, reason in part.get("not_run", {}).items():
            console.print(f"not run: {name}: {reason}")


def markdown(result: Result, part: str | None = None) -> list[str]:
    """Return the lines of a result's table in Markdown, and of what was measured. part: the part of a result of peers."""
    head, rows = comparison(result[part], part) if part else report(result)
    separator = "|" + "---|" * len(head)
    table = [_line(row) for row in rows]
    return [_line(head), separator, *table, "", measured_with(result)]


def _line(cells: Row) -> str:
    return f"| {' | '.join(cells)} |"


def measured_with(result: Result) -> str:
    """Describe in one line the settings and the machine of a result."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    machine = f"{result['device']}, {result['cores']} cores, {result['torch_threads']} threads"
    text = f"{machine}, {versions}, commit {result['commit']}"
    # Results of fixed shapes have no config.
    words = [result.get("config", ""), *result.get("overrides", [])]
    settings = " ".join(words).strip()
    return f"`{settings}`; {text}" if settings else text


def write_tables(document: Path, results: Path) -> None:
    """Fill each marked place of the document from the result that it names. Raises OSError if a result does not exist."""

    def fill(place: re.Match[str]) -> str:
        begin, file, part, end = place.groups()
        result = json.loads((results / file).read_text())
        lines = markdown(result, part)
        return begin + "\n".join(lines) + "\n" + end

    text = document.read_text()
    document.write_text(PLACE.sub(fill, text))


def spread_text(figure: Mapping[str, float], digits: int = 0) -> str:
    """Format a median with its quartiles: "2 (1 to 3)"."""
    median = f"{figure['median']:,.{digits}f}"
    lower = f"{figure['quartile_1']:,.{digits}f}"
    upper = f"{figure['quartile_3']:,.{digits}f}"
    return f"{median} ({lower} to {upper})"


def report(result: Result) -> Report:
    """Return the table of a result."""
    return REPORTS[result["bench"]](result)


def _loss(result: Result) -> Report:
    head = ["d, N, M, k, iterations", "", "forward", "backward", "both", "times loop", "MB saved", "times floor"]
    rows: list[Row] = []
    for entry in result["results"]:
        sizes = ", ".join(map(str, entry["shape"].values()))
        for name, modes in entry["figures"].items():
            both = modes["forward_backward"]
            cost = entry["costs"][name]
            saved_mb = cost["saved_bytes"] / 1e6
            row = [
                sizes,
                name,
                f"{modes['forward']['median']:,.0f}",
                f"{modes['backward']['median']:,.0f}",
                spread_text(both),
                f"{both['speedup_over_loop']:.2f}",
                f"{saved_mb:.2f}",
                f"{cost['times_floor']:.1f}",
            ]
            rows.append(row)
            # Only the first row of a shape names the shape.
            sizes = ""
    return Report(head, rows)


def _whitening(result: Result) -> Report:
    points = [(line["line"], point) for line in result["lines"] for point in line["points"]]
    # Columns are all backends that were measured at any point, in the order of their first appearance.
    backends = list(dict.fromkeys(name for _, point in points for name in point["figures"]))
    rows: list[Row] = []
    for line, point in points:
        figures = point["figures"]
        sizes = [str(point[name]) for name in ("slices", "rows", "size")]
        # A backend may refuse a size, for example because it needs too much memory.
        cells = [spread_text(figures[name]) if name in figures else "refused" for name in backends]
        rows.append([line, *sizes, *cells])
    columns = [f"{name}, us" for name in backends]
    return Report(["line", "slices", "rows", "size", *columns], rows)


def _loader(result: Result) -> Report:
    rows = [[name, spread_text(figure)] for name, figure in result["figures"].items()]
    return Report(["page cache", "views/s"], rows)


def _loader_sweep(result: Result) -> Report:
    # The fastest setting comes first.
    points = sorted(result["results"], key=lambda point: -point["figures"]["median"])
    names = list(points[0]["setting"])
    rows = []
    for point in points:
        values = [str(point["setting"][name]) for name in names]
        rows.append([*values, spread_text(point["figures"])])
    return Report([*names, result["unit"]], rows)


def comparison(part: Result, name: str | None = None) -> Report:
    """Return the table of a comparison, such as a part of a result of peers. name: the name of the part."""
    ratio = "times the recipe's" if name == "options" else "ours is this many times as fast"
    rows = []
    # What all others are compared with has no ratio.
    for each, figure in part["figures"].items():
        times = f"{part['times'][each]:.2f}" if each in part["times"] else ""
        rows.append([each, spread_text(figure), times])
    return Report([name or "", part["unit"], ratio], rows)


def _peers(result: Result) -> Report:
    rows: list[Row] = []
    # A result holds only the parts that --only has chosen.
    for name in PEERS:
        if name in result:
            part = result[name]
            rows += [[name, *row, part["unit"]] for row in comparison(part, name).rows]
    return Report(["part", "what", "median (quartiles)", "times", "unit"], rows)


def _compute(result: Result) -> Report:
    # How near the step is to the best speed of this machine.
    best = result["roofline"]
    gigaflop = best["flop_per_view"] / 1e9
    percent = result["phases"]["percent"]
    phases = [[f"{name}, % of the phases", f"{value:.1f}"] for name, value in percent.items()]
    rows: list[Row] = [
        ["views/s", spread_text(result["views_per_s_spread"], 2)],
        ["ms a step", spread_text(result["step_ms"])],
        *phases,
        ["GFLOP a view", f"{gigaflop:.2f}"],
        ["best product, TFLOP/s", f"{best['matmul_tflops']:.3g}"],
        [f"roofline, views/s a rank (by {best['roofline_bound']})", f"{best['roofline_views_per_s']:,.2f}"],
        ["arithmetic used", f"{best['flop_utilisation']:.0%}"],
    ]
    for name, norm in result.get("batch_norm", {}).items():
        step_ms = spread_text(norm["step_ms"])
        rows.append([f"BatchNorm {name}, ms a step", f"{step_ms}, {norm['percent_above']:+.1f} %"])
    return Report([f"the step alone, {result['ranks']} rank(s)", result["precision"]], rows)


def _methods(result: Result) -> Report:
    # The first row is the measure of all others.
    rows = [[name, spread_text(figure), f"{result['times'][name]:.3f}"] for name, figure in result["figures"].items()]
    return Report([f"a step of {result['views_per_step']} views", result["unit"], "times the first"], rows)


def _end2end(result: Result) -> Report:
    step = result["step"]
    # A GPU's own time says more than that of the host, which only launches.
    times = step.get("device_ms", step["host_ms"])
    parts = [[name, f"{ms:,.1f} ms, {step['percent'][name]:.2f} %"] for name, ms in times.items()]
    rows = [
        ["views/s", spread_text(result["views_per_s_spread"], 2)],
        ["the step alone, views/s", spread_text(result["compute"]["views_per_s_spread"], 2)],
        ["share of it", f"{result['share_of_compute']:.1%}"],
        *parts,
        ["the loop's overhead (agree and rest)", f"{step['loop_overhead_percent']:.2f} %"],
    ]
    return Report(["the whole loop", ""], rows)


def _checkpoint(result: Result) -> Report:
    # The slowdown is unknown if a save was too short to measure it.
    shares = result["percent_of_loop"]
    lost = shares.get("with_slowdown", shares["standing_still"])
    rows = [
        ["the loop stands still for a save", f"{spread_text(result['stall_ms'])} ms"],
        ["until it is on the disk", f"{spread_text(result['write_s'], 2)} s"],
        ["reading it", f"{spread_text(result['load_s'], 2)} s"],
        ["lost at a save every 5 minutes", f"{lost:.3f} %"],
    ]
    return Report(["a checkpoint", ""], rows)


def _growth(result: Result) -> Report:
    rows = []
    for line in result["lines"]:
        for point in line["points"]:
            value = point[line["line"]]
            rows.append([line["title"], f"{value:,}", _growth_text(line, point)])
    return Report(["what grows", "to", "median (quartiles)"], rows)


def _growth_text(line: Result, point: Result) -> str:
    if "not_run" in point:
        return f"not run: {point['not_run']}"
    # A start takes seconds, a step many milliseconds.
    digits = 3 if line["line"] == "images_of_set" else 0
    text = f"{spread_text(point['figure'], digits)} {line['unit']}"
    if "index_pss_bytes" in point:
        index_mb = point["index_pss_bytes"]["median"] / 1e6
        whole_mb = point["pss_bytes"]["median"] / 1e6
        start_seconds = point["start_seconds"]["median"]
        text += f"; {index_mb:.0f} MB of {whole_mb:.0f} MB in all; with imports {start_seconds:.1f} s"
    return text


def _all(result: Result) -> Report:
    return Report(["part", "", "median", "unit"], list(_summary_rows(result)))


def _summary_rows(result: Result) -> Iterator[Row]:
    for row in result["summary"]:
        value = row["value"]
        # A text is the error of a part that failed.
        if isinstance(value, str):
            text = value
        elif abs(value) >= 1000:
            text = f"{value:,.0f}"
        else:
            text = f"{value:,.3g}"
        yield [row["part"], row["what"], text, row["unit"]]


REPORTS: dict[str, Callable[[Result], Report]] = {
    "loss": _loss,
    "whitening_sweep": _whitening,
    "loader": _loader,
    "loader_sweep": _loader_sweep,
    "loader_options": lambda result: comparison(result, "options"),  # results of earlier versions; now a part of peers
    "peers": _peers,
    "compute": _compute,
    "methods": _methods,
    "end2end": _end2end,
    "checkpoint": _checkpoint,
    "growth": _growth,
    "all": _all,
}


def main() -> None:
    """Print the table of a result, or fill the tables of a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?", metavar="RESULT.json")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="fill the tables of this document instead")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder of the results that the document names (default: benchmarks/results)",
    )
    own = parser.parse_args()
    if own.write:
        write_tables(own.write, own.results)
    elif own.result:
        result = json.loads(own.result.read_text())
        print("\n".join(markdown(result)))
    else:
        parser.error("give RESULT.json, or --write DOCUMENT.md")


if __name__ == "__main__":
    main()
