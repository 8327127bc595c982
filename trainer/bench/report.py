"""Show results of `wmse bench`: one table for each kind, on the terminal and in Markdown.

    python -m trainer.bench.report RESULT.json            prints the table as Markdown
    python -m trainer.bench.report --write DOCUMENT.md    fills the document's tables from benchmarks/results

A document marks the place of a table by `<!-- table RESULT.json -->` and `<!-- /table -->`; of a result with several parts,
`<!-- table RESULT.json PART -->` takes one.
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
PEERS = ("loader", "options", "loss", "optimizer")

Result = Mapping[str, Any]
Row = Sequence[str]


class Report(NamedTuple):
    """A table of a result."""

    head: Row
    rows: Sequence[Row]


def print_report(result: Result) -> None:
    """Print a result as a table to stderr, and the reasons why something was not measured."""
    from rich.console import Console  # only here: figures are also measured where it is missing
    from rich.table import Table

    head, rows = report(result)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console = Console(stderr=True, width=150)
    console.print(table)
    refusals = [result.get("not_run", {}), *(each.get("not_run", {}) for each in result.get("results", []))]
    for name, reason in (item for reasons in refusals for item in reasons.items()):
        console.print(f"not run: {name}: {reason}")


def markdown(result: Result, part: str | None = None) -> list[str]:
    """Return the lines of a result's table in Markdown, and what it was measured with. part: of a result of peers."""
    head, rows = comparison(result[part], part) if part else report(result)
    lines = [_line(head), "|" + "---|" * len(head), *map(_line, rows)]
    return [*lines, "", measured_with(result)]


def _line(cells: Row) -> str:
    return f"| {' | '.join(cells)} |"


def measured_with(result: Result) -> str:
    """Describe in one line what was measured, and where."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    settings = " ".join([result.get("config", ""), *result.get("overrides", [])]).strip()
    machine = f"{result['device']}, {result['cores']} cores, {result['torch_threads']} threads"
    return f"{f'`{settings}`; ' if settings else ''}{machine}, {versions}, commit {result['commit']}"


def write_tables(document: Path, results: Path) -> None:
    """Fill each marked place of the document from the result that it names. Raises OSError if a result is missing."""

    def fill(place: re.Match[str]) -> str:
        begin, file, part, end = place.groups()
        lines = markdown(json.loads((results / file).read_text()), part)
        return begin + "\n".join(lines) + "\n" + end

    document.write_text(PLACE.sub(fill, document.read_text()))


def spread_text(figure: Mapping[str, float], digits: int = 0) -> str:
    """Write a median with its quartiles."""
    median, lower, upper = (f"{figure[name]:,.{digits}f}" for name in ("median", "quartile_1", "quartile_3"))
    return f"{median} ({lower} to {upper})"


def report(result: Result) -> Report:
    """Return the table of a result."""
    return REPORTS[result["bench"]](result)


def _loss(result: Result) -> Report:
    head = ["d, N, M, k, iterations", "", "forward", "backward", "both", "times loop", "MB saved", "times floor"]
    rows: list[Row] = []
    for entry in result["results"]:
        sizes = ", ".join(str(size) for size in entry["shape"].values())
        for name, modes in entry["figures"].items():
            cost, both = entry["costs"][name], modes["forward_backward"]
            times = [f"{modes['forward']['median']:,.0f}", f"{modes['backward']['median']:,.0f}", spread_text(both)]
            ratio = f"{both['speedup_over_loop']:.2f}"
            rows.append([sizes, name, *times, ratio, f"{cost['saved_bytes'] / 1e6:.2f}", f"{cost['times_floor']:.1f}"])
            sizes = ""
    return Report(head, rows)


def _whitening(result: Result) -> Report:
    points = [(line["line"], point) for line in result["lines"] for point in line["points"]]
    backends = list(dict.fromkeys(name for _, point in points for name in point["figures"]))
    rows: list[Row] = []
    for line, point in points:
        cells = [spread_text(point["figures"][name]) if name in point["figures"] else "refused" for name in backends]
        rows.append([line, *(str(point[name]) for name in ("slices", "rows", "size")), *cells])
    return Report(["line", "slices", "rows", "size", *(f"{name}, us" for name in backends)], rows)


def _loader(result: Result) -> Report:
    return Report(
        ["page cache", "views/s"], [[name, spread_text(figure)] for name, figure in result["figures"].items()]
    )


def _loader_sweep(result: Result) -> Report:
    points = sorted(result["results"], key=lambda point: -point["figures"]["median"])
    names = list(points[0]["setting"])
    rows = [[*(str(point["setting"][name]) for name in names), spread_text(point["figures"])] for point in points]
    return Report([*names, result["unit"]], rows)


def comparison(part: Result, name: str | None = None) -> Report:
    """Return the table of things that were compared. name: of the part."""
    ratio = "times the recipe's" if name == "options" else "ours is this many times as fast"
    times = {each: f"{value:.2f}" for each, value in part["times"].items()}
    rows = [[each, spread_text(figure), times.get(each, "")] for each, figure in part["figures"].items()]
    return Report([name or "", part["unit"], ratio], rows)


def _peers(result: Result) -> Report:
    rows: list[Row] = []
    for name in PEERS:
        if name in result:
            rows += [[name, *row, result[name]["unit"]] for row in comparison(result[name], name).rows]
    return Report(["part", "what", "median (quartiles)", "times", "unit"], rows)


def _compute(result: Result) -> Report:
    best = result["roofline"]
    rows: list[Row] = [
        ["views/s", spread_text(result["views_per_s_spread"], 2)],
        ["ms a step", spread_text(result["step_ms"])],
        *([f"{name}, % of the phases", f"{value:.1f}"] for name, value in result["phases"]["percent"].items()),
        ["GFLOP a view", f"{best['flop_per_view'] / 1e9:.2f}"],
        ["best product, TFLOP/s", f"{best['matmul_tflops']:.3g}"],
        [f"roofline, views/s a rank (by {best['roofline_bound']})", f"{best['roofline_views_per_s']:,.2f}"],
        ["arithmetic used", f"{best['flop_utilisation']:.0%}"],
    ]
    for name, norm in result.get("batch_norm", {}).items():
        rows.append([f"BatchNorm {name}, ms a step", f"{spread_text(norm['step_ms'])}, {norm['percent_above']:+.1f} %"])
    return Report([f"the step alone, {result['ranks']} rank(s)", result["precision"]], rows)


def _end2end(result: Result) -> Report:
    step = result["step"]
    parts = step.get("device_ms", step["host_ms"])
    rows = [
        ["views/s", spread_text(result["views_per_s_spread"], 2)],
        ["the step alone, views/s", spread_text(result["compute"]["views_per_s_spread"], 2)],
        ["share of it", f"{result['share_of_compute']:.1%}"],
        *([name, f"{ms:,.1f} ms, {step['percent'][name]:.2f} %"] for name, ms in parts.items()),
        ["the loop's overhead (agree and rest)", f"{step['loop_overhead_percent']:.2f} %"],
    ]
    return Report(["the whole loop", ""], rows)


def _checkpoint(result: Result) -> Report:
    lost = result["percent_of_loop"]
    rows = [
        ["the loop stands still for a save", f"{spread_text(result['stall_ms'])} ms"],
        ["until it is on the disk", f"{spread_text(result['write_s'], 2)} s"],
        ["reading it", f"{spread_text(result['load_s'], 2)} s"],
        ["lost at a save every 5 minutes", f"{lost.get('with_slowdown', lost['standing_still']):.3f} %"],
    ]
    return Report(["a checkpoint", ""], rows)


def _growth(result: Result) -> Report:
    rows = [
        [line["title"], f"{point[line['line']]:,}", _growth_text(line, point)]
        for line in result["lines"]
        for point in line["points"]
    ]
    return Report(["what grows", "to", "median (quartiles)"], rows)


def _growth_text(line: Result, point: Result) -> str:
    if "not_run" in point:
        return f"not run: {point['not_run']}"
    text = f"{spread_text(point['figure'], 3 if line['line'] == 'images_of_set' else 0)} {line['unit']}"
    if "index_pss_bytes" in point:
        own, whole = point["index_pss_bytes"]["median"] / 1e6, point["pss_bytes"]["median"] / 1e6
        text += f"; {own:.0f} MB of {whole:.0f} MB in all; with imports {point['start_seconds']['median']:.1f} s"
    return text


def _all(result: Result) -> Report:
    return Report(["part", "", "median", "unit"], list(_summary_rows(result)))


def _summary_rows(result: Result) -> Iterator[Row]:
    for row in result["summary"]:
        value = row["value"]
        text = value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.3g}"
        yield [row["part"], row["what"], text, row["unit"]]


REPORTS: dict[str, Callable[[Result], Report]] = {
    "loss": _loss,
    "whitening_sweep": _whitening,
    "loader": _loader,
    "loader_sweep": _loader_sweep,
    "loader_options": lambda result: comparison(result, "options"),  # of earlier versions, now a part of peers
    "peers": _peers,
    "compute": _compute,
    "end2end": _end2end,
    "checkpoint": _checkpoint,
    "growth": _growth,
    "all": _all,
}


def main() -> None:
    """Print a table, or fill a document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?", metavar="RESULT.json")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="fill the tables of this document")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="the results that it names")
    own = parser.parse_args()
    if own.write:
        write_tables(own.write, own.results)
    elif own.result:
        print("\n".join(markdown(json.loads(own.result.read_text()))))
    else:
        parser.error("give a result, or --write a document")


if __name__ == "__main__":
    main()
