"""Prints the tables of docs/performance.md from benchmarks/results/*.json; with --write puts them into the document.

    python benchmarks/performance_table.py [--write] [--results DIR] [--document FILE]

A result whose file is not there has no table. The document has a place for each, see tables.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loss_table import rows as loss_rows
from tables import table, write_tables

ROOT = Path(__file__).parents[1]
Result = dict[str, Any]


def spread(figure: dict[str, float], digits: int = 0) -> str:
    """A median with its quartiles."""
    median, lower, upper = (f"{figure[name]:,.{digits}f}" for name in ("median", "quartile_1", "quartile_3"))
    return f"{median} ({lower} to {upper})"


def measured_with(result: Result) -> str:
    """One line for below a table: what was measured, where."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    overrides = " ".join(["", *result.get("overrides", [])])
    return (
        f"`{result.get('config', '')}{overrides}`; {result['device']}, {result['cores']} cores, {result['torch_threads']} "
        f"threads, {versions}, commit {result['commit']}"
    )


def compute_table(result: Result) -> list[str]:
    """The step alone, its phases, and the roofline."""
    best, phases = result["roofline"], result["phases"]
    cells = [
        ["views/s", spread(result["views_per_s_spread"], 2)],
        ["ms a step", spread(result["step_ms"])],
        *([f"{name}, % of the phases", f"{value:.1f}"] for name, value in phases["percent"].items()),
        ["GFLOP a view", f"{best['flop_per_view'] / 1e9:.2f}"],
        ["MB a view, unfused", f"{best['bytes_per_view'] / 1e6:.0f}"],
        ["best product, TFLOP/s", f"{best['matmul_tflops']:.3g}"],
        ["best copy, GB/s", f"{best['copy_gb_per_s']:.3g}"],
        [f"roofline, views/s a rank (by {best['roofline_bound']})", f"{best['roofline_views_per_s']:,.2f}"],
        ["arithmetic used", f"{best['flop_utilisation']:.0%}"],
        ["traffic used", f"{best['traffic_utilisation']:.0%}"],
    ]
    return [*table(["the step alone", result["precision"]], cells), "", measured_with(result)]


def end2end_table(result: Result) -> list[str]:
    """The loop, and where a step's time goes."""
    step = result["step"]
    unit_of = step.get("device_ms", step["host_ms"])
    cells = [
        ["views/s", spread(result["views_per_s_spread"], 2)],
        ["the step alone, views/s", spread(result["compute"]["views_per_s_spread"], 2)],
        ["share of it", f"{result['share_of_compute']:.1%}"],
        *([f"{name}", f"{ms:,.1f} ms, {step['percent'][name]:.2f} %"] for name, ms in unit_of.items()),
        ["the loop's overhead (agree and rest)", f"**{step['loop_overhead_percent']:.2f} %**"],
    ]
    return [*table(["the whole loop", ""], cells), "", measured_with(result)]


def peers_table(part: str) -> Callable[[Result], list[str]]:
    """Ours beside others, of one part of the peers' run."""

    def make(result: Result) -> list[str]:
        found = result[part]
        cells = [
            [name, spread(figure), f"**{found['times'][name]:.2f}**" if name in found["times"] else ""]
            for name, figure in found["figures"].items()
        ]
        head = [part, found["unit"], "ours is so many times as fast"]
        return [*table(head, cells), "", measured_with(result)]

    return make


def sweep_table(result: Result) -> list[str]:
    """The loader's settings, the fastest first."""
    points = sorted(result["results"], key=lambda point: -point["figures"]["median"])
    names = list(points[0]["setting"])
    cells = [[*(str(point["setting"][name]) for name in names), spread(point["figures"])] for point in points]
    return [*table([*names, result["unit"]], cells), "", measured_with(result)]


def options_table(result: Result) -> list[str]:
    """What the loader gains by each option."""
    cells = [[name, spread(f), f"{result['times'][name]:.2f}"] for name, f in result["figures"].items()]
    return [*table(["option", result["unit"], "times the recipe's"], cells), "", measured_with(result)]


def batch_norm_table(result: Result) -> list[str]:
    """BatchNorm's ways to take statistics."""
    cells = [
        [name, spread(norm["step_ms"]), f"{norm['percent_above']:+.1f} %"]
        for name, norm in result["batch_norm"].items()
    ]
    return [
        *table([f"BatchNorm, {result['ranks']} ranks", "ms a step", "over joint_local"], cells),
        "",
        measured_with(result),
    ]


def growth_table(result: Result) -> list[str]:
    """A row a point."""
    cells = [
        [line["title"], f"{point[line['line']]:,}", _growth_figure(line, point)]
        for line in result["lines"]
        for point in line["points"]
    ]
    return [*table(["what grows", "to", "median (quartiles)"], cells), "", measured_with(result)]


def _growth_figure(line: dict[str, Any], point: dict[str, Any]) -> str:
    if "not_run" in point:
        return f"not run: {point['not_run']}"
    text = f"{spread(point['figure'], 3 if line['line'] == 'images_of_set' else 0)} {line['unit']}"
    if "index_pss_bytes" in point:
        own, whole = point["index_pss_bytes"]["median"] / 1e6, point["pss_bytes"]["median"] / 1e6
        text += f"; {own:.0f} MB of {whole:.0f} MB in all; with imports {point['start_seconds']['median']:.1f} s"
    return text


TABLES: dict[str, tuple[str, Callable[[Result], list[str]]]] = {  # name -> file, what makes it
    "loader": ("peers_cpu_2cores.json", peers_table("loader")),
    "loader_sweep": ("loader_sweep_cpu_2cores.json", sweep_table),
    "loader_options": ("loader_options_cpu_2cores.json", options_table),
    "loss": ("loss_cpu_2cores.json", loss_rows),
    "peers_loss": ("peers_loss_optimizer_cpu_2cores.json", peers_table("loss")),
    "optimizer": ("peers_loss_optimizer_cpu_2cores.json", peers_table("optimizer")),
    "batch_norm": ("batch_norm_cpu_2cores.json", batch_norm_table),
    "compute": ("compute_cpu_2cores.json", compute_table),
    "end2end": ("end2end_cpu_2cores.json", end2end_table),
    "end2end_demo": ("end2end_demo_cpu_2cores.json", end2end_table),
    "growth": ("growth_cpu_2cores.json", growth_table),
    "growth_set": ("growth_set_cpu_2cores.json", growth_table),
}


def make_tables(results: Path) -> dict[str, list[str]]:
    """Those whose results are there."""
    return {
        name: make(json.loads((results / file).read_text()))
        for name, (file, make) in TABLES.items()
        if (results / file).exists()
    }


def main() -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the document")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "performance.md", metavar="FILE")
    own = parser.parse_args()
    tables = make_tables(own.results)
    if own.write:
        write_tables(own.document, tables)
        return
    for name, lines in tables.items():
        print("\n".join([f"<!-- table {name} -->", *lines, "<!-- /table -->", ""]))


if __name__ == "__main__":
    main()
