"""Draws the result of `wmse bench loss --sweep --out RESULT.json`.

    python benchmarks/plot_loss.py RESULT.json OUT.png

Cost of the whitening against the number, the size and the rows of slices, a panel each, a line for each backend, both axes
logarithmic; the band is from the first to the third quartile.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into files, on machines without a screen
import matplotlib.pyplot as plt

AXES = {"slices": "slices B", "size": "embedding size k", "rows": "rows of a slice M"}


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw one sweep into a PNG."""
    figure, panels = plt.subplots(1, len(result["lines"]), figsize=(5 * len(result["lines"]), 4.2), squeeze=False)
    for panel, line in zip(panels[0], result["lines"], strict=True):
        draw_line(panel, line)
    panels[0][0].set_ylabel("microseconds, forward and backward")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    figure.suptitle(
        f"Whitening on {result['device']} ({result['device_type']}, {result['torch_threads']} threads), "
        f"{versions}, commit {result['commit']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def draw_line(panel: Any, line: dict[str, Any]) -> None:
    """One line of the sweep: what grows along x, each backend's median and quartiles along y."""
    points = line["points"]
    for backend in dict.fromkeys(name for point in points for name in point["figures"]):
        measured = [point for point in points if backend in point["figures"]]
        x = [point[line["line"]] for point in measured]
        figures = [point["figures"][backend] for point in measured]
        (drawn,) = panel.plot(x, [f["median"] for f in figures], marker="o", markersize=3, label=backend)
        lower, upper = [f["quartile_1"] for f in figures], [f["quartile_3"] for f in figures]
        panel.fill_between(x, lower, upper, alpha=0.25, color=drawn.get_color(), linewidth=0)
    panel.set(xlabel=AXES[line["line"]], title=fixed_sizes(line))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    at = [point[line["line"]] for point in points]
    panel.set_xticks(at, [str(x) for x in at])
    panel.grid(True, which="both", alpha=0.2)
    panel.legend()


def fixed_sizes(line: dict[str, Any]) -> str:
    """What stays the same along the line, for its title: "M = 128, k = 64"."""
    if line["line"] == "size":
        return f"B = {line['points'][0]['slices']}, M = 2k"
    others = {"slices": "B", "rows": "M", "size": "k"}
    first = line["points"][0]
    return ", ".join(f"{letter} = {first[name]}" for name, letter in others.items() if name != line["line"])


def main() -> None:
    """Read, draw, say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("out", type=Path)
    own = parser.parse_args()
    result = json.loads(own.result.read_text())
    if result.get("bench") != "whitening_sweep":
        parser.error(f"{own.result} is no sweep: make one with wmse bench loss --sweep --out FILE")
    draw(result, own.out)
    print(own.out)


if __name__ == "__main__":
    main()
