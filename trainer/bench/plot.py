"""Draw results of `wmse bench` into PNG files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.bench.report import measured_with
from trainer.errors import InputError

AXES = {  # what grows along a line -> the label of its axis
    "slices": "slices B",
    "size": "embedding size k",
    "rows": "rows of a slice M",
    "num_views": "views d of an image (1: the encoder alone)",
    "images_per_rank": "images a rank N",
    "embedding_size": "embedding size k, M = 2k",
    "ranks": "ranks, equal images a rank",
    "images_of_set": "images in the set",
}
Panel = tuple[str, Callable[[Any], None]]  # title, what draws it


def load_matplotlib() -> Any:
    """Return matplotlib.pyplot, which then draws into files only. Raises InputError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("--plot needs matplotlib, which is not installed: pip install matplotlib") from error
    matplotlib.use("Agg")  # draws into files, on machines without a screen
    import matplotlib.pyplot as plt

    return plt


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw a result as panels beside each other. Raises InputError if there is nothing to draw."""
    plt = load_matplotlib()
    panels = panels_of(result)
    if not panels:
        raise InputError(f"nothing to draw of wmse bench {result.get('bench')}")
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4.2), squeeze=False)
    for axis, (title, paint) in zip(axes[0], panels, strict=True):
        axis.set_title(title, fontsize=10)
        paint(axis)
    head = result if "device" in result else next(part for part in result["parts"].values() if "device" in part)
    figure.suptitle(f"wmse bench {result['bench']}: {measured_with(head)}", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def panels_of(result: dict[str, Any]) -> list[Panel]:
    """Return what there is to draw of a result."""
    kind = result.get("bench")
    if kind == "whitening_sweep":
        return [(_fixed_sizes(line), partial(_sweep_line, line=line)) for line in result["lines"]]
    if kind == "growth":
        return [(line["title"], partial(_growth_line, line=line)) for line in result["lines"]]
    if kind == "compute":
        percent = result["phases"]["percent"]
        return [("a step alone", lambda axis: _bars(axis, percent, "percent of its phases"))]
    if kind == "end2end":
        step = result["step"]
        return [(f"a step of {step['step_ms']:.0f} ms", lambda axis: _bars(axis, step["percent"], "percent"))]
    if kind == "all":
        return [panel for part in result["parts"].values() if "error" not in part for panel in panels_of(part)]
    return []


def _bars(axis: Any, values: dict[str, float], unit: str) -> None:
    names = list(values)
    axis.barh(names, list(values.values()))
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    for at, value in enumerate(values.values()):
        axis.text(value, at, f" {value:.1f}", va="center", fontsize=8)
    axis.margins(x=0.15)


def _sweep_line(axis: Any, line: dict[str, Any]) -> None:
    """Draw each backend's median and quartiles over what grows."""
    points = line["points"]
    for backend in dict.fromkeys(name for point in points for name in point["figures"]):
        measured = [point for point in points if backend in point["figures"]]
        figures = [point["figures"][backend] for point in measured]
        _band(axis, [point[line["line"]] for point in measured], figures, backend)
    _log_axes(axis, line["line"], [point[line["line"]] for point in points])
    axis.set_ylabel("microseconds, forward and backward")
    axis.legend()


def _fixed_sizes(line: dict[str, Any]) -> str:
    """Return what stays the same along the line, as its title: "M = 128, k = 64"."""
    if line["line"] == "size":
        return f"B = {line['points'][0]['slices']}, M = 2k"
    others = {"slices": "B", "rows": "M", "size": "k"}
    first = line["points"][0]
    return ", ".join(f"{letter} = {first[name]}" for name, letter in others.items() if name != line["line"])


def _growth_line(axis: Any, line: dict[str, Any]) -> None:
    points = [point for point in line["points"] if "figure" in point]
    at = [point[line["line"]] for point in points]
    _band(axis, at, [point["figure"] for point in points], line["unit"])
    _log_axes(axis, line["line"], at)
    low, high = axis.get_ylim()
    axis.set_ylim(low / 2, high * 2)  # what hardly grows looks as if it hardly grows
    axis.set_ylabel(line["unit"])


def _band(axis: Any, at: list[float], figures: list[dict[str, float]], label: str) -> None:
    """Draw the medians as a line, and the quartiles as a band."""
    (drawn,) = axis.plot(at, [f["median"] for f in figures], marker="o", markersize=3, label=label)
    lower, upper = [f["quartile_1"] for f in figures], [f["quartile_3"] for f in figures]
    axis.fill_between(at, lower, upper, alpha=0.25, color=drawn.get_color(), linewidth=0)


def _log_axes(axis: Any, name: str, at: list[float]) -> None:
    axis.set_xlabel(AXES[name])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(at, [f"{x:,}" for x in at])
    axis.grid(True, which="both", alpha=0.2)
