"""Judge a finished run: print the table, and write RUN_DIR/reproduction.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.cluster.runs import whole
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.errors import DONE, FAILED
from trainer.files import write_text
from trainer.report.collect import Result, Run, collect_run
from trainer.report.paper import differences_from
from trainer.reproduce.measured import measured
from trainer.reproduce.published import (
    BELOW,
    NO_FIGURE,
    Published,
    expected_interval,
    overall,
    published_figures,
    verdict,
)
from trainer.run.certificate import NAME, summary
from trainer.run.checkpoint import choose_checkpoint, load_checkpoint
from trainer.run.machine import provenance

Content = dict[str, Any]


def write_reproduction(
    config: Config,
    name: str,
    recipe: Config,
    found: dict[str, dict[str, Any]],
    differences: Sequence[str],
) -> int:
    """Judge the last checkpoint, write reproduction.json and print the table. Returns the exit code.

    found, differences: from `check_data`."""
    run_dir = Path(config.run_dir)
    # Only the page of `wmse report` shows the row of `wmse status`.
    run = collect_run(run_dir, run_dir.name, {"problems": []})
    published = published_figures(name)
    # The settings of the training, which the command may have overridden since.
    trained_config = load_config(run_dir / "config.yaml", [])
    figures: dict[str, Content] = {}
    all_differences = [*differences, *_other_training(config, found)]
    for protocol, result in measured(config, found).items():
        result = replace(result, epoch=_epoch(run, result))
        figures[protocol] = _judge(result, published.get(protocol))
        all_differences += differences_from(recipe, name, trained_config, result)
    content = {
        "config": name,
        "seed": config.seed,
        "verdict": overall([figure["verdict"] for figure in figures.values()]),
        # Several protocols may find the same difference.
        "differences": list(dict.fromkeys(all_differences)),
        "figures": figures,
        "data": found,
        "training": _training(run),
        "cost": run.state.get("cost"),
        "certificate": summary(run_dir / NAME),
        "judged_on": provenance(choose_device(config, Ranks())),
        "load_average_5_min": round(os.getloadavg()[1], 2),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    path = run_dir / "reproduction.json"
    write_text(path, json.dumps(content, indent=1) + "\n")
    _print(content)
    print(f"written to {path}")
    return FAILED if content["verdict"] == BELOW else DONE


def _epoch(run: Run, result: Result) -> float | None:
    """Return the epoch of a result, from the exact number of steps of the whole schedule."""
    total_steps = whole(run.state, "total_steps")
    if run.config is None or result.step is None or not total_steps:
        return None
    # The settings name the length in epochs, and a checkpoint its step.
    share = result.step / total_steps
    return share * run.config.optimizer.epochs


def _judge(result: Result, published: Published | None) -> Content:
    """Return a figure with its published counterpart and its verdict."""
    content = result.content
    figure: Content = {
        "top1": content["top1"],
        "label": result.label,
        "step": result.step,
        "test_images": content["test_images"],
        "precision": content["precision"],
        "seconds": content["seconds"],
        "commit": content["commit"],
    }
    # There is nothing to judge it by.
    if published is None:
        return figure | {"verdict": NO_FIGURE}
    # The verdict uses the exact interval, the file shows a rounded one.
    interval = expected_interval(published, content["test_images"])
    return figure | {
        "published": round(published.top1, 2),
        "source": published.source,
        "interval": [round(limit, 2) for limit in interval],
        "seed_spread": round(published.spread, 3),
        "seed_spread_source": published.spread_source,
        "verdict": verdict(content["top1"], interval),
    }


def _other_training(config: Config, found: dict[str, dict[str, Any]]) -> list[str]:
    """Compare the images that the run was trained on, by its checkpoint, with those on the disk."""
    # The images on the disk may have changed since the training.
    path = choose_checkpoint(Path(config.run_dir), "last")
    trained = load_checkpoint(path)["data"]["fingerprint"]
    now = found[config.data.train_split]["fingerprint"]
    if trained == now:
        return []
    return [f"digest of the images of the training: {now} -> {trained}"]


def _training(run: Run) -> Content:
    """Return how the run was trained: device, ranks, versions, steps and time."""
    # Each line has the mean time of the steps since the line before it, so pauses between two starts do not count.
    seconds = 0.0
    before = 0
    for line in run.lines:
        seconds += (line["step"] - before) * line.get("seconds_per_step", 0.0)
        before = line["step"]
    return {
        **run.log,
        "ranks": run.state.get("world_size"),
        "starts": run.state.get("starts"),
        "steps": run.state.get("step"),
        "seconds": round(seconds, 1),
    }


def _print(content: Content) -> None:
    table = Table("protocol", "this run", "published", "expected (95 %)", "verdict", title=content["config"])
    for figure in content["figures"].values():
        published = ""
        expected = ""
        if "published" in figure:
            low, high = figure["interval"]
            published = f"{figure['published']:.2f}"
            expected = f"{low:.2f} to {high:.2f}"
        table.add_row(
            figure["label"],
            f"{figure['top1']:.2f}",
            published,
            expected,
            figure["verdict"],
        )
    console = Console()
    console.print(table)
    # These lines are not wrapped, so that they can be copied whole.
    for figure in content["figures"].values():
        if "published" in figure:
            console.print(_basis(figure), soft_wrap=True, markup=False)
    console.print(f"verdict: {content['verdict']}", markup=False)
    if content["differences"]:
        listed = "; ".join(content["differences"])
        console.print(f"not the published recipe: {listed}", soft_wrap=True, markup=False)


def _basis(figure: Content) -> str:
    """Say where a published figure comes from, and what its interval assumes."""
    spread = f"a spread over seeds of {figure['seed_spread']:.2f} points ({figure['seed_spread_source']})"
    chance = f"chance on {figure['test_images']} test images"
    return f"{figure['label']}: published by {figure['source']}; expected with {chance} and {spread}"
