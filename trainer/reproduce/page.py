"""docs/results.md: for each recipe, what is published and what this program has reached.

python -m trainer.reproduce.page > docs/results.md
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.files import shipped_folder
from trainer.report.paper import PAPER
from trainer.reproduce.data import SETS
from trainer.reproduce.published import OWN, published_figures
from trainer.run.cost import describe_cost

REPRODUCTIONS = Path(__file__).parents[2] / "benchmarks" / "results" / "reproductions"
_HEAD = """\
# Results

`python -m trainer.reproduce.page > docs/results.md` writes this page from the published figures and from the files in
`benchmarks/results/reproductions/`, and a test checks that it is current. To add a row, copy `RUN_DIR/reproduction.json`
of [`wmse reproduce`](reproduce.md) to that folder and write the page again. A `note` that is added to the file is shown
at the end of the page.

Figures are top-1 in percent, linear / 5-nn. On ImageNet the first one is `linear` for W-MSE and `linear_sgd` for the
other methods. The published figures are those of the W-MSE paper, which are single runs or quoted from other papers, except
for the demo: its row is the mean of three seeds of this program. "Not run" means that this program has not trained this
recipe yet. Times are those of the training alone.
"""
_COLUMNS = ("config", "published", "this program", "verdict", "hardware", "training", "cost", "file")


def results_page(folder: Path = REPRODUCTIONS) -> str:
    """Return the page. folder: holds a reproduction.json under any name for each reproduction."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    # Sorted, so that the page does not depend on the file system.
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        found.setdefault(content["config"], []).append((path.name, content))
    configs = sorted(path.stem for path in shipped_folder("configs").glob("*.yaml"))
    # The order of the paper's tables, and then the recipes that are not in the paper.
    names = [*PAPER, *(name for name in configs if name not in PAPER)]
    parts = [_HEAD]
    # A section for each data set, with which the names of its recipes begin.
    for start, facts in SETS.items():
        title = facts["title"][0].upper() + facts["title"][1:]
        lines = [f"## {title}", ""]
        lines.append(_row(_COLUMNS))
        lines.append("|---" * len(_COLUMNS) + "|")
        for name in names:
            if name.startswith(start):
                lines += _lines(name, found.get(name, []))
        parts.append(_section(lines))
    notes = []
    for reproductions in found.values():
        for file, content in reproductions:
            if "note" in content:
                notes.append(f"- `{file}`: {content['note']}")
    if notes:
        parts.append(_section(["## Notes", "", *notes]))
    return "\n".join(parts)


def _section(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


def _lines(name: str, reproductions: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return a line for each reproduction of a recipe, or one that says that there is none."""
    published = published_figures(name)
    figures = {protocol: figure.top1 for protocol, figure in published.items()}
    whose = " (own)" if name in OWN else ""
    first = [f"`{name}`", f"{_pair(figures)}{whose}"]
    if not reproductions:
        empty = [""] * (len(_COLUMNS) - len(first) - 1)
        return [_row([*first, "not run", *empty])]
    return [_row([*first, *_cells(file, content)]) for file, content in reproductions]


def _cells(file: str, content: dict[str, Any]) -> list[str]:
    """Return the cells of one reproduction, after the published figures."""
    top1 = {protocol: figure["top1"] for protocol, figure in content["figures"].items()}
    training = content["training"]
    machine = content["judged_on"]
    verdict = content["verdict"]
    if content["differences"]:
        verdict += f", not the published recipe: {'; '.join(content['differences'])}"
    # The log names the device as "cuda:0 (NAME)". A run of several ranks has as many of them.
    _, _, device = training["device"].partition(" ")
    hardware = f"{training['ranks']} x {device.strip('()')}"
    if training["device"].startswith("cpu"):
        hardware += f", {machine['cores']} cores, torch threads: {machine['torch_threads']}"
    link = f"[{file}](../benchmarks/results/reproductions/{file})"
    return [
        f"{_pair(top1)}, seed {content['seed']}",
        verdict,
        hardware,
        _time(training["seconds"]),
        # Reproductions of earlier versions have no account.
        describe_cost(content.get("cost")),
        link,
    ]


def _pair(top1: dict[str, float]) -> str:
    """Return "linear / 5-nn" of figures by protocol; one that is missing is a dash."""
    # The figure of `linear_sgd` is the comparable one where both are known.
    linear = top1.get("linear_sgd", top1.get("linear"))
    nearest = top1.get("knn")
    if linear is None and nearest is None:
        return "none"
    shown = ["–" if value is None else f"{value:.2f}" for value in (linear, nearest)]
    return " / ".join(shown)


def _time(seconds: float) -> str:
    """Return a duration in the unit that suits it."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 36_000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(results_page(), end="")
