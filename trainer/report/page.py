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
from trainer.report.health import HEALTH, checkpoint_health, describe_correlations
from trainer.report.paper import PAPER, recipe_of
from trainer.report.pictures import Pictures
from trainer.report.plots import Curve, Level, color_of, draw_bars, draw_curves
from trainer.report.tables import figure_table
from trainer.run.commit import git_commit
from trainer.run.cost import describe_cost

_CURVES = {
    "loss": "loss",
    "lr": "learning rate",
    "images_per_s": "speed (images/s)",
    "compute_share": "share of the time that the step alone takes",
    "effective_rank": "effective rank of embeddings",
    "rankme": "RankMe of embeddings",
    "lidar": "LiDAR of embeddings",
    "largest_share": "share of the first principal axis",
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
    # Names of classes and files are not trusted, so each text is escaped, and a missing name is an error.
    environment = Environment(
        loader=PackageLoader("trainer.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        uri=_svg_uri,
        number=_number,
        words=_words,
        color=color_of,
    )
    runs = [each.run for each in shown]
    # The template only lays out what is computed here.
    template = environment.get_template("template.html.j2")
    return template.render(
        shown=shown,
        runs=runs,
        heads=_heads(runs),
        curves=_training_curves(runs),
        accuracy=_accuracy(runs),
        health=_health(runs),
        correlations=[(run, sentences) for run in runs if (sentences := describe_correlations(run))],
        tables=[figure_table(run) for run in runs if run.results],
        **_rows_of_results(runs),
        paper_names=[(run, recipe_of(run)) for run in runs],
        paper=PAPER,
        spectrum=_spectra(runs),
        differences=_differences(runs),
        changed=[_not_default(run) for run in runs],
        versions=_versions(),
        made=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )


def _rows_of_results(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the rows of the tables of results, each with its run and result, by their names in the template."""
    classes: list[Any] = []
    diagnosed: list[Any] = []
    for i, run in enumerate(runs):
        for result in run.last_results():
            # Only some protocols give an accuracy for each class.
            if isinstance(result.content.get("per_class_top1"), dict):
                classes.append((run, result, *_classes(result, color_of(i))))
            if result.protocol == "diagnostics":
                diagnosed.append((run, result))
    return {"classes": classes, "diagnosed": diagnosed}


def _printable(value: Any) -> Any:
    """Escape characters that cannot be encoded or that change the writing direction, in each text from outside."""
    # Markup is text that this module has made itself.
    is_from_outside = isinstance(value, str) and not isinstance(value, Markup)
    return printable(value) if is_from_outside else value


def _svg_uri(svg: bytes) -> str:
    """Return an SVG file as a data URI, so that the page needs no other file."""
    # Base64 takes any character of the labels.
    encoded = base64.b64encode(svg).decode()
    return f"data:image/svg+xml;base64,{encoded}"


def _words(key: str) -> str:
    """Return the key of a figure in words."""
    return key.replace("_", " ").replace("top1", "top-1").replace("top5", "top-5")


def _number(value: object) -> str:
    """Return a setting or a figure as text, with at most four digits of a fraction."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _heads(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return the rows of the first table, for each run."""
    heads = [_head(run) for run in runs]
    verified = [_verified(run) for run in runs]
    # Without any certificate there is no such row.
    if any(verified):
        for head, line in zip(heads, verified, strict=True):
            head["wmse verify"] = line or "no certificate"
    return heads


def _head(run: Run) -> dict[str, str]:
    """Return the rows of the first table for one run."""
    config = run.config
    # dict.fromkeys drops repetitions and keeps the order.
    sources = dict.fromkeys(run.sources.values())
    files = [source for source in sources if source not in ("default", "command line")]
    # The commit of the last result that names one counts.
    about: dict[str, Any] = {}
    for result in run.results:
        about |= result.content
    return {
        "Folder": str(run.folder),
        **_progress(run),
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
        "Other versions": _other_versions(run),
    }


def _verified(run: Run) -> str:
    """Describe the certificate of `wmse verify` that the training attached; empty without one."""
    found = run.certificate
    passed, failed, skipped = (number(found, name) for name in ("passed", "failed", "skipped"))
    if passed is None or failed is None or skipped is None:
        return ""
    date = text(found, "date") or "an unknown date"
    return f"{passed:.0f} checks passed, {failed:.0f} failed, {skipped:.0f} skipped, on {date}"


def _other_versions(run: Run) -> str:
    """Return the versions of the last start besides torch's."""
    versions = run.starts[-1].get("versions") if run.starts else None
    if not isinstance(versions, dict):
        return "unknown"
    return ", ".join(f"{name} {version}" for name, version in versions.items() if name != "torch")


def _progress(run: Run) -> dict[str, str]:
    """Return the rows that say how far a run is."""
    status = run.status
    state = status["state"]
    if status["message"]:
        state = f"{state}: {status['message']}"
    epoch = status["epoch"]
    epoch_text = "?" if epoch is None else f"{epoch:.4g}"
    epochs = run.config.optimizer.epochs if run.config else "?"
    step = _or_unknown(status["step"])
    total_steps = _or_unknown(status["total_steps"])
    # A damaged line may lack its time.
    times = [number(line, "time") for line in run.lines]
    known = [seconds for seconds in times if seconds is not None]
    return {
        "Status": state,
        "Epochs": f"{epoch_text} of {epochs}",
        "Steps": f"{step} of {total_steps}",
        "Cost": describe_cost(run.state.get("cost")) or "unknown",
        "First metrics": _minute(known[0]) if known else "none yet",
        "Last metrics": _minute(known[-1]) if known else "none yet",
    }


def _minute(seconds: float) -> str:
    """Return a point in time, in seconds since 1970, as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _versions() -> str:
    """Return the versions with which the page was made, which may differ from those of the runs."""
    found = [f"Python {platform.python_version()}"]
    for package in ("torch", "nvidia-dali-cuda120", "timm", "matplotlib"):
        # A package that is not installed is not part of what made the page.
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(package)
            found.append(f"{package} {version}")
    commit = git_commit() or "unknown"
    found.append(f"commit {commit}")
    return ", ".join(found)


def _or_unknown(value: object) -> str:
    """Return a whole number with separators of thousands; a question mark for anything else."""
    return f"{value:,}" if isinstance(value, int) else "?"


def _points(lines: Sequence[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the values under the keys `x` and `y` of the lines that have both."""
    xs: list[float] = []
    ys: list[float] = []
    for line in lines:
        x_value = number(line, x)
        y_value = number(line, y)
        if x_value is not None and y_value is not None:
            xs.append(x_value)
            ys.append(y_value)
    return xs, ys


def _training_curves(runs: Sequence[Run]) -> list[Plot]:
    """Draw the common metrics, and those that the methods add."""
    common = all_metrics({})
    # A dict is a set that keeps the order.
    keys = dict.fromkeys(_CURVES)
    for run in runs:
        last_line = run.lines[-1] if run.lines else {}
        of_method = [key for key in last_line if key not in common]
        keys |= dict.fromkeys(of_method)
    plots = []
    for key in keys:
        curves = []
        for i, run in enumerate(runs):
            x, y = _points(run.lines, "epoch", key)
            if y:
                curves.append(Curve(x, y, color_of(i)))
        if not curves:
            continue
        # The scale of a common metric is known; that of a method's metric follows from its values.
        is_wide = key not in common and _is_wide(curves)
        label = _CURVES.get(key, key.replace("_", " "))
        svg = draw_curves(curves, "epoch", label, log="y" if is_wide else "")
        plots.append(Plot(label, svg, _describe(label, curves)))
    return plots


def _is_wide(curves: Sequence[Curve]) -> bool:
    """Return whether the values need a logarithmic axis, and can have one."""
    # A logarithmic axis needs values above 0.
    smallest = min(min(curve.y) for curve in curves)
    largest = max(max(curve.y) for curve in curves)
    return smallest > 0 and largest / smallest > _WIDE_RATIO


def _describe(title: str, curves: Sequence[Curve]) -> str:
    """Describe a plot for those who do not see it."""
    # A text for screen readers: the value that a reader looks for first.
    last_value = curves[0].y[-1]
    return f"{title} against the epoch, last value {last_value:.4g}"


def _accuracy(runs: Sequence[Run]) -> list[Plot]:
    """Draw each figure of each protocol against the epoch, with the baselines as dotted lines."""
    kinds: dict[tuple[str, str], str] = {}
    for run in runs:
        for result in run.results:
            for key in result.figures:
                # Top-5 is in the table only, because twice as many plots would be harder to read.
                if not key.endswith("top5"):
                    kinds[result.protocol, key] = result.label
    plots = []
    # One plot for each figure, with a curve for each run.
    for (protocol, key), label in kinds.items():
        curves: list[Curve] = []
        levels: list[Level] = []
        for i, run in enumerate(runs):
            curve, baselines = _curve_of(run, protocol, key, color_of(i))
            if curve.y:
                curves.append(curve)
            levels += baselines
        # Baselines alone do not depend on the epoch, so they give no plot.
        if not curves:
            continue
        words = _words(key)
        unit = " (%)" if "top" in key else ""
        svg = draw_curves(
            curves,
            "epoch",
            words + unit,
            levels=levels,
            markers=True,
        )
        title = f"{label}: {words}"
        plots.append(Plot(title, svg, _describe(title, curves)))
    return plots


def _health(runs: Sequence[Run]) -> list[Plot]:
    """Draw RankMe and LiDAR of the embeddings at the evaluated checkpoints."""
    plots = []
    # Only evaluated checkpoints, so that the plot stands beside those of the accuracies.
    for key, name in HEALTH.items():
        curves = []
        for i, run in enumerate(runs):
            epochs, values = checkpoint_health(run, key)
            if values:
                curves.append(Curve(epochs, values, color_of(i)))
        if curves:
            svg = draw_curves(curves, "epoch", name, markers=True)
            plots.append(Plot(f"{name} of the embeddings", svg, _describe(name, curves)))
    return plots


def _curve_of(run: Run, protocol: str, key: str, color: str) -> tuple[Curve, list[Level]]:
    """Return one figure of a run's checkpoints against the epoch, and the same figure of its baselines."""
    epochs: list[float] = []
    values: list[float] = []
    baselines: list[Level] = []
    for result in run.results:
        if not result.is_of_run or result.protocol != protocol or key not in result.figures:
            continue
        value = result.figures[key]
        if result.epoch is not None:
            epochs.append(result.epoch)
            values.append(value)
        # Only a baseline has no step.
        if result.step is None:
            name = _BASELINES[result.checkpoint]
            baselines.append(Level(value, name, color))
    return Curve(epochs, values, color), baselines


def _classes(result: Result, color: str) -> tuple[Plot, int, list[list[Any]]]:
    """Draw the accuracy of the classes. Returns also the number of classes, and the most frequent confusions."""
    # Somebody may have edited the file of the result, so values of other types are left out.
    per_class = result.content["per_class_top1"]
    values: dict[str, float] = {}
    for name in per_class:
        value = number(per_class, name)
        if value is not None:
            values[name] = value
    shown = sorted(values, key=lambda name: -values[name])
    # Of 1,000 classes, only the best and the worst are of interest.
    if len(shown) > _MOST_CLASSES:
        shown = [*shown[:_ENDS], *shown[-_ENDS:]]
    heights = [values[name] for name in shown]
    svg = draw_bars(shown, heights, "top-1 of the class (%)", color)
    alt = ", ".join(f"{name} {values[name]:.1f}" for name in shown)
    confusions = result.content.get("confusions") or []
    pairs = [pair for pair in confusions if isinstance(pair, list) and len(pair) == 3]
    return Plot(result.label, svg, alt), len(values), pairs[:_MOST_CONFUSIONS]


def _spectra(runs: Sequence[Run]) -> Plot | None:
    """Draw the spectrum of the features of each run's last checkpoint."""
    curves = []
    for i, run in enumerate(runs):
        for result in run.last_results():
            values = result.content.get("spectrum")
            if not isinstance(values, list):
                continue
            # A logarithmic axis has no place for 0.
            shares = [value for value in values if isinstance(value, float) and 0 < value < math.inf]
            if shares:
                axis_numbers = range(1, len(shares) + 1)
                curves.append(Curve(axis_numbers, shares, color_of(i)))
    if not curves:
        return None
    svg = draw_curves(curves, "principal axis of the features", "share of the variance", log="xy")
    return Plot("Spectrum of the features", svg, "share of the variance of each principal axis")


def _differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """List the settings that differ between the runs, with the value of each run."""
    # `Run.settings` is computed at each access.
    settings_of_runs = [run.settings for run in runs]
    # The settings of a run whose config cannot be read are empty.
    keys: dict[str, None] = {}
    for settings in settings_of_runs:
        keys |= dict.fromkeys(settings)
    rows = []
    for key in keys:
        values = [str(settings.get(key, "unknown")) for settings in settings_of_runs]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows


def _not_default(run: Run) -> list[tuple[str, str, str, str]]:
    """List key, value, default and source of the settings that differ from the defaults."""
    # The runs may be older than this program, whose defaults are shown.
    defaults = plain_settings(Config())
    rows = []
    for key, value in run.settings.items():
        default = defaults[key]
        if value != default:
            source = run.sources.get(key, "unknown")
            rows.append((key, str(value), str(default), source))
    return rows
