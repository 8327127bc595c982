"""Turn runs into one HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
import math
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trainer.cluster.runs import number, text
from trainer.config.changes import plain_settings
from trainer.config.schema import Config
from trainer.data.printable import printable
from trainer.metrics import all_metrics
from trainer.report.collect import Result, Run
from trainer.report.paper import PAPER, recipe_of
from trainer.report.pictures import Pictures
from trainer.report.plots import Curve, Level, color_of, draw_bars, draw_curves
from trainer.report.tables import figure_table
from trainer.run.commit import git_commit

_CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "images_per_s": "speed (images/s)",
    "effective_rank": "effective rank of embeddings",
    "min_pivot": "smallest pivot (mean variances)",
}
_BASELINES = {"random": "untrained", "pixels": "pixels"}
_MOST_CLASSES = 50  # of which all bars are drawn
_ENDS = 15  # best and worst of more classes
_MOST_CONFUSIONS = 10
_WIDE_RATIO = 30.0  # of the largest to the smallest value of a method's metric, above which its axis is logarithmic


@dataclass(frozen=True)
class Plot:
    """Picture, its title, and the text for those who do not see it."""

    title: str
    svg: bytes
    alt: str


@dataclass(frozen=True)
class Shown:
    """Run, and the pictures that need its data set."""

    run: Run
    views: str = ""
    """Data URI of the views; empty: they are not shown."""
    pictures: Pictures | None = None
    problems: Sequence[str] = ()
    """Why views or pictures are missing, if they were asked for."""


def render(shown: Sequence[Shown]) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("trainer.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(uri=_svg_uri, number=_number, words=_words, color=color_of)
    runs = [each.run for each in shown]
    template = environment.get_template("template.html.j2")
    return template.render(
        shown=shown,
        runs=runs,
        heads=[_head(run) for run in runs],
        curves=_training_curves(runs),
        accuracy=_accuracy(runs),
        tables=[figure_table(run) for run in runs if run.results],
        paper_names=[(run, recipe_of(run)) for run in runs],
        paper=PAPER,
        classes=[
            (run, result, *_classes(result, color_of(i))) for i, run in enumerate(runs) for result in _scored(run)
        ],
        spectrum=_spectra(runs),
        diagnosed=[(run, result) for run in runs for result in run.last_results() if result.protocol == "diagnostics"],
        differences=_differences(runs),
        changed=[_not_default(run) for run in runs],
        versions=_versions(),
        made=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )


def _printable(value: Any) -> Any:
    """Escape characters that cannot be encoded or that change the writing direction, in each text from outside."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _svg_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _words(key: str) -> str:
    """Return the key of a figure in words."""
    return key.replace("_", " ").replace("top1", "top-1").replace("top5", "top-5")


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _head(run: Run) -> dict[str, str]:
    """Return the rows of the first table for one run."""
    status, config = run.status, run.config
    times = [value for line in run.lines if (value := number(line, "time")) is not None]
    epochs = config.optimizer.epochs if config else "?"
    step, epoch = status["step"], status["epoch"]
    files = [source for source in dict.fromkeys(run.sources.values()) if source not in ("default", "command line")]
    about: dict[str, Any] = {}
    for result in run.results:
        about = about | result.content
    return {
        "Folder": str(run.folder),
        "Status": status["state"] + (f": {status['message']}" if status["message"] else ""),
        "Epochs": f"{'?' if epoch is None else f'{epoch:.4g}'} of {epochs}",
        "Steps": f"{'?' if step is None else f'{step:,}'} of {_or_unknown(status['total_steps'])}",
        "First metrics": time.strftime("%Y-%m-%d %H:%M", time.localtime(times[0])) if times else "none yet",
        "Last metrics": time.strftime("%Y-%m-%d %H:%M", time.localtime(times[-1])) if times else "none yet",
        "Method": config.method if config else "unknown",
        "Encoder": config.model.backbone if config else "unknown",
        "Settings from": ", ".join(files) or "unknown",
        "Data": config.data.root if config else "unknown",
        "Device": run.log.get("device", "unknown"),
        "Ranks": _or_unknown(run.state.get("world_size")),
        "Host": text(run.state, "host") or "unknown",
        "Commit of the training": run.log.get("commit", "unknown"),
        "Commit of the evaluation": text(about, "commit") or "none yet",
        "PyTorch": run.log.get("torch", "unknown"),
    }


def _versions() -> str:
    """Return the versions with which the page was made, which may differ from those of the runs."""
    found = [f"Python {platform.python_version()}"]
    for package in ("torch", "nvidia-dali-cuda120", "timm", "matplotlib"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join([*found, f"commit {git_commit() or 'unknown'}"])


def _or_unknown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _points(lines: Sequence[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the lines that have both values."""
    pairs = [(number(line, x), number(line, y)) for line in lines]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in known], [b for _, b in known]


def _training_curves(runs: Sequence[Run]) -> list[Plot]:
    """Draw the common metrics, and those that the methods add."""
    keys = dict.fromkeys(_CURVES)
    for run in runs:
        keys |= dict.fromkeys(key for key in (run.lines[-1] if run.lines else {}) if key not in all_metrics({}))
    plots = []
    for key in keys:
        curves = [Curve(*_points(run.lines, "epoch", key), color_of(i)) for i, run in enumerate(runs)]
        curves = [curve for curve in curves if curve.y]
        if not curves:
            continue
        label = _CURVES.get(key, key.replace("_", " "))
        values = [value for curve in curves for value in curve.y]
        is_wide = key not in all_metrics({}) and min(values) > 0 and max(values) / min(values) > _WIDE_RATIO
        svg = draw_curves(curves, "epoch", label, log="y" if is_wide else "")
        plots.append(Plot(label, svg, f"{label} against the epoch, last value {curves[0].y[-1]:.4g}"))
    return plots


def _accuracy(runs: Sequence[Run]) -> list[Plot]:
    """Draw each figure of each protocol against the epoch, with the baselines as dotted lines."""
    kinds: dict[tuple[str, str], str] = {}
    for run in runs:
        for result in run.results:
            # Top-5 is in the table only, because twice as many plots would be harder to read.
            shown = [key for key in result.figures if not key.endswith("top5")]
            kinds |= {(result.protocol, key): result.label for key in shown}
    plots = []
    for (protocol, key), label in kinds.items():
        curves, levels = [], []
        for i, run in enumerate(runs):
            found = [r for r in run.results if r.is_of_run and r.protocol == protocol and key in r.figures]
            points = [(r.epoch, r.figures[key]) for r in found if r.epoch is not None]
            if points:
                curves.append(Curve([x for x, _ in points], [y for _, y in points], color_of(i)))
            levels += [Level(r.figures[key], _BASELINES[r.checkpoint], color_of(i)) for r in found if r.step is None]
        if curves:
            unit = " (%)" if "top" in key else ""
            words = _words(key)
            svg = draw_curves(curves, "epoch", words + unit, levels=levels, markers=True)
            title = f"{label}: {words}"
            plots.append(Plot(title, svg, f"{title} against the epoch, last value {curves[0].y[-1]:.4g}"))
    return plots


def _scored(run: Run) -> list[Result]:
    """Return the results of the last checkpoint that have an accuracy for each class."""
    return [result for result in run.last_results() if isinstance(result.content.get("per_class_top1"), dict)]


def _classes(result: Result, color: str) -> tuple[Plot, int, list[list[Any]]]:
    """Draw the accuracy of the classes. Returns also the number of classes, and the most frequent confusions."""
    per_class = result.content["per_class_top1"]
    values = {name: value for name in per_class if (value := number(per_class, name)) is not None}
    order = sorted(values, key=lambda name: -values[name])
    shown = order if len(order) <= _MOST_CLASSES else [*order[:_ENDS], *order[-_ENDS:]]
    svg = draw_bars(shown, [values[name] for name in shown], "top-1 of the class (%)", color)
    confusions = result.content.get("confusions")
    pairs = [pair for pair in confusions if isinstance(pair, list) and len(pair) == 3] if confusions else []
    alt = ", ".join(f"{name} {values[name]:.1f}" for name in shown)
    return Plot(result.label, svg, alt), len(values), pairs[:_MOST_CONFUSIONS]


def _spectra(runs: Sequence[Run]) -> Plot | None:
    """Draw the spectrum of the features of each run's last checkpoint."""
    curves = []
    for i, run in enumerate(runs):
        for result in run.last_results():
            values = result.content.get("spectrum")
            # A logarithmic axis has no place for 0.
            shares = (
                [v for v in values if isinstance(v, float) and 0 < v < math.inf] if isinstance(values, list) else []
            )
            if shares:
                curves.append(Curve(range(1, len(shares) + 1), shares, color_of(i)))
    if not curves:
        return None
    svg = draw_curves(curves, "principal axis of the features", "share of the variance", log="xy")
    return Plot("Spectrum of the features", svg, "share of the variance of each principal axis")


def _differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """List the settings that differ between the runs, with the value of each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [(key, [str(run.settings.get(key, "unknown")) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _not_default(run: Run) -> list[tuple[str, str, str, str]]:
    """List key, value, default and source of the settings that differ from the defaults."""
    defaults = plain_settings(Config())
    return [
        (key, str(value), str(defaults[key]), run.sources.get(key, "unknown"))
        for key, value in run.settings.items()
        if value != defaults[key]
    ]
