"""Draw results of `wmse bench` into PNG files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.bench.report import measured_with
from trainer.errors import InputError

AXES = {  # name of a line -> label of its axis
    "slices": "slices B",
    "size": "embedding size k",
    "rows": "rows of a slice M",
    "num_views": "views d of an image (1: the encoder alone)",
    "images_per_rank": "images a rank N",
    "embedding_size": "embedding size k, M = 2k",
    "ranks": "ranks, equal images a rank",
    "images_of_set": "images in the set",
}
Panel = tuple[str, Callable[[Any], None]]  # title, function that draws on an axis


def load_matplotlib() -> Any:
    """Return matplotlib.pyplot, set to draw into files only. Raises InputError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("--plot needs matplotlib, which is not installed: run `pip install matplotlib`") from error
    matplotlib.use("Agg")  # needs no screen
    import matplotlib.pyplot as plt

    return plt


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw a result as a row of panels into the file `out`. Raises InputError if the result has nothing to draw."""
    plt = load_matplotlib()
    panels = panels_of(result)
    if not panels:
        raise InputError(f"--plot cannot draw the result of wmse bench {result.get('bench')}: omit --plot")
    width = 5 * len(panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(width, 4.2), squeeze=False)
    for axis, (title, paint) in zip(axes[0], panels, strict=True):
        axis.set_title(title, fontsize=10)
        paint(axis)
    # A result of `wmse bench all` names its machine only in its parts.
    candidates = [result, *result.get("parts", {}).values()]
    head = next(part for part in candidates if "device" in part)
    figure.suptitle(f"wmse bench {result['bench']}: {measured_with(head)}", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def panels_of(result: dict[str, Any]) -> list[Panel]:
    """Return the panels of a result; an empty list if it has nothing to draw."""
    kind = result.get("bench")
    if kind == "whitening_sweep":
        return [(_fixed_sizes(line), partial(_sweep_line, line=line)) for line in result["lines"]]
    if kind == "growth":
        return [(line["title"], partial(_growth_line, line=line)) for line in result["lines"]]
    if kind == "compute":
        percent = result["phases"]["percent"]
        return [("a step alone", partial(_bars, values=percent, unit="percent of its phases"))]
    if kind == "end2end":
        step = result["step"]
        title = f"a step of {step['step_ms']:.0f} ms"
        return [(title, partial(_bars, values=step["percent"], unit="percent"))]
    if kind == "all":
        # A part that failed has no figures.
        panels = []
        for part in result["parts"].values():
            if "error" not in part:
                panels += panels_of(part)
        return panels
    return []


def _bars(axis: Any, values: dict[str, float], unit: str) -> None:
    """Draw a horizontal bar for each value, the first at the top, with the value beside it."""
    axis.barh(list(values), list(values.values()))
    # matplotlib draws the first bar at the bottom.
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    for at, value in enumerate(values.values()):
        axis.text(value, at, f" {value:.1f}", va="center", fontsize=8)
    axis.margins(x=0.15)


def _sweep_line(axis: Any, line: dict[str, Any]) -> None:
    """Draw each backend's median and quartiles along the line."""
    points = line["points"]
    name = line["line"]
    backends = dict.fromkeys(backend for point in points for backend in point["figures"])
    # A backend may refuse some of the points.
    for backend in backends:
        measured = [point for point in points if backend in point["figures"]]
        at = [point[name] for point in measured]
        figures = [point["figures"][backend] for point in measured]
        _band(axis, at, figures, backend)
    all_places = [point[name] for point in points]
    _log_axes(axis, name, all_places)
    axis.set_ylabel("microseconds, forward and backward")
    axis.legend()


def _fixed_sizes(line: dict[str, Any]) -> str:
    """Return the title of a line, the sizes that are the same at all its points: "M = 128, k = 64"."""
    first = line["points"][0]
    # The number of rows grows with the size.
    if line["line"] == "size":
        return f"B = {first['slices']}, M = 2k"
    letters = {"slices": "B", "rows": "M", "size": "k"}
    fixed = [f"{letter} = {first[name]}" for name, letter in letters.items() if name != line["line"]]
    return ", ".join(fixed)


def _growth_line(axis: Any, line: dict[str, Any]) -> None:
    """Draw the points of a line of `wmse bench growth` that were measured."""
    points = [point for point in line["points"] if "figure" in point]
    at = [point[line["line"]] for point in points]
    figures = [point["figure"] for point in points]
    _band(axis, at, figures, line["unit"])
    _log_axes(axis, line["line"], at)
    # Widen the range, so that a line that hardly grows looks flat.
    low, high = axis.get_ylim()
    axis.set_ylim(low / 2, high * 2)
    axis.set_ylabel(line["unit"])


def _band(axis: Any, at: list[float], figures: list[dict[str, float]], label: str) -> None:
    """Draw the medians as a line, and the quartiles as a band."""
    medians = [figure["median"] for figure in figures]
    lower = [figure["quartile_1"] for figure in figures]
    upper = [figure["quartile_3"] for figure in figures]
    (drawn,) = axis.plot(at, medians, marker="o", markersize=3, label=label)
    color = drawn.get_color()
    axis.fill_between(at, lower, upper, alpha=0.25, color=color, linewidth=0)


def _log_axes(axis: Any, name: str, at: list[float]) -> None:
    """Make both axes logarithmic, with a tick at each measured point."""
    axis.set_xlabel(AXES[name])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(at, [f"{x:,}" for x in at])
    axis.grid(True, which="both", alpha=0.2)
