"""Draw plots as SVG, those of `draw_bands` as PNG, all in the same style.

Texts in them are data: names of classes are never read as formulas."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from trainer.data.printable import printable

# Okabe and Ito's colours, which colour-blind readers can tell apart, and three more.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A4FBF", "#8C6D31", "#B22255", "#555555")
OTHER = "#BBBBBB"  # classes without a colour of their own
_MOST_POINTS = 1000  # of a curve
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: smaller, and in the fonts of the reader
    "svg.hashsalt": "wmse",  # the same plot gives the same file
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.4,
}


@dataclass(frozen=True)
class Curve:
    """Points of one run, or of one class."""

    x: Sequence[float]
    y: Sequence[float]
    color: str


@dataclass(frozen=True)
class Band:
    """Mean of several runs, with their spread above and below it; NaN: no spread is known."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float]
    color: str


@dataclass(frozen=True)
class Level:
    """Dotted line across a plot, with a label beside it."""

    y: float
    label: str
    color: str


_LINE_STYLES = ("-", "--", ":")


def color_of(number: int) -> str:
    """Return the colour of the run of this number."""
    return COLORS[number % len(COLORS)]


def thin_out(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Keep at most 1,000 evenly spread points of a curve, the first and the last among them."""
    count = min(len(x), _MOST_POINTS)
    # Distance of the kept points in the curve; it is not a whole number, so each place is rounded.
    step = (len(x) - 1) / max(count - 1, 1)
    kept = [round(number * step) for number in range(count)]
    kept_x = [x[number] for number in kept]
    kept_y = [y[number] for number in kept]
    return kept_x, kept_y


def draw_curves(
    curves: Sequence[Curve],
    xlabel: str,
    ylabel: str,
    *,
    log: str = "",
    levels: Sequence[Level] = (),
    markers: bool = False,
) -> bytes:
    """Draw curves, and return the SVG file.

    log: the letters of the axes with a logarithmic scale. markers: show each point, and label the last ones and the levels."""
    with rc_context(_STYLE):
        figure, axes = _axes(4.6, 2.9, xlabel, ylabel)
        for curve in curves:
            # A browser cannot show more points, and they would only make the page large.
            x, y = thin_out(curve.x, curve.y)
            # A single point is invisible as a line.
            marker = "o" if markers or len(x) == 1 else ""
            axes.plot(x, y, marker=marker, markersize=4, color=curve.color)
        for level in levels:
            axes.axhline(level.y, color=level.color, linestyle=":")
        for axis in log:
            axes.set(**{f"{axis}scale": "log"})
            # matplotlib's own labels of powers are formulas.
            getattr(axes, f"{axis}axis").set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if markers:
            axes.margins(y=0.12)
            # Room for the marker of the last point.
            last_x = max(max(curve.x) for curve in curves)
            axes.set_xlim(0, 1.06 * last_x)
            labels = []
            for curve in curves:
                last_y = curve.y[-1]
                labels.append(Level(last_y, f"{last_y:.4g}", curve.color))
            labels += [Level(level.y, f"{level.label} {level.y:.4g}", level.color) for level in levels]
            _label_levels(axes, labels)
        return _svg(figure)


def draw_bands(plots: Mapping[str, Sequence[Band]], xlabel: str) -> bytes:
    """Draw plots side by side, and return the PNG file. plots: the bands of each plot, by the label of its y axis."""
    with rc_context(_STYLE):
        most = max(len(bands) for bands in plots.values())
        # The height leaves a line of the legend for each band.
        figure = Figure(figsize=(5.2 * len(plots) + 2, max(3.6, 0.2 * most + 0.6)), layout="constrained")
        # Each figure has its own scale, so plots stand side by side instead of sharing axes.
        drawn = figure.subplots(1, len(plots), squeeze=False)[0]
        for axes, (ylabel, bands) in zip(drawn, plots.items(), strict=True):
            axes.set(xlabel=xlabel, ylabel=ylabel)
            for number, band in enumerate(bands):
                y = np.array(band.y)
                spread = np.array(band.spread)
                # Where the colours repeat, the kind of the line differs.
                repeats = sum(earlier.color == band.color for earlier in bands[:number])
                style = _LINE_STYLES[repeats % len(_LINE_STYLES)]
                axes.plot(
                    band.x,
                    y,
                    style,
                    marker="o",
                    markersize=3,
                    color=band.color,
                    label=_short(band.label),
                )
                # A spread that is not known (NaN) draws no band.
                axes.fill_between(
                    band.x,
                    y - spread,
                    y + spread,
                    color=band.color,
                    alpha=0.12,
                    linewidth=0,
                )
        # One legend, beside the plots, because many bands leave no free place inside.
        handles, labels = max((axes.get_legend_handles_labels() for axes in drawn), key=lambda found: len(found[0]))
        figure.legend(
            handles,
            labels,
            loc="outside right center",
            fontsize=7,
            frameon=False,
        )
        file = io.BytesIO()
        # A PNG can be shown beside a Markdown table, where an SVG often cannot.
        figure.savefig(file, format="png", dpi=150)
        return file.getvalue()


def _label_levels(axes: Axes, levels: Sequence[Level]) -> None:
    """Write labels at the right of the plot, each at its height, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    # Height of a line of text.
    gap = (high - low) * 0.065
    free = low - gap
    # From the bottom to the top, each label is moved up until it is free of the one below it.
    for level in sorted(levels, key=lambda level: level.y):
        free = max(level.y, free + gap)
        axes.text(
            1.01,
            free,
            level.label,
            color=level.color,
            va="center",
            fontsize=8,
            # x is a share of the width of the plot, and y a value of its axis.
            transform=axes.get_yaxis_transform(),
        )


def draw_bars(names: Sequence[str], values: Sequence[float], xlabel: str, color: str) -> bytes:
    """Draw a horizontal bar for each name, the first on top, with its value beside it."""
    with rc_context(_STYLE):
        # The plot grows with the number of bars, so that each name has a line of its own.
        height = 0.5 + 0.21 * len(names)
        figure, axes = _axes(4.6, height, xlabel, "")
        rows = range(len(names))
        drawn = axes.barh(rows, values, 0.7, color=color)
        axes.bar_label(drawn, fmt="%.1f", padding=2, fontsize=8)
        shown_names = [_short(name) for name in names]
        axes.set_yticks(rows, shown_names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        # Percentages, with room for the value beside the longest bar.
        axes.set_xlim(0, 108)
        axes.set_xticks(range(0, 101, 20))
        axes.grid(False, axis="y")
        return _svg(figure)


def draw_map(groups: Sequence[Curve]) -> bytes:
    """Draw points, a colour for each group."""
    with rc_context(_STYLE):
        figure, axes = _axes(6.5, 5.2, "first principal axis", "second principal axis")
        for group in groups:
            axes.scatter(group.x, group.y, s=9, color=group.color, linewidths=0)
        return _svg(figure)


def _short(name: str) -> str:
    """Return a name that can be drawn, at most 28 characters long."""
    shown = printable(name)
    if len(shown) <= 28:
        return shown
    return f"{shown[:27]}…"


def _axes(width: float, height: float, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Return an empty plot of this size in inches. pyplot is not used, because it would keep every figure."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def _svg(figure: Figure) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        # The reader's fonts draw the text, so it does not matter which characters matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()
