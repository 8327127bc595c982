"""The demo: pre-train on real images, measure what was learnt, and end with a table and a picture.

    wmse demo [--seed S] [--run_dir DIR] [--section.key value ...]

Each part is the command a user would type, in a process of its own. An older run in the way is moved aside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.files import shipped_folder, write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command; all others are settings."""
    parser.add_argument("--run_dir", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    parser.add_argument("--seed", type=int, default=0, metavar="S")


def run_demo(run_dir: Path, seed: int, settings: Sequence[str]) -> int:
    """Run everything; returns an exit code."""
    run_dir, began = run_dir.absolute(), time.time()
    _move_aside(run_dir)
    common = ["--seed", str(seed), "--data.root", str(shipped_folder("demo_data")), *settings]
    _wmse("pretrain", "--config", "demo_fashion_mnist", "--run_dir", str(run_dir), *common)
    trained = _measure("evaluate", run_dir, "last")
    random = _measure("evaluate", run_dir, "random")
    pixels = _measure("knn", run_dir, "pixels")
    report = _report(trained, random, pixels) | {"seed": seed, "seconds": round(time.time() - began, 1)}
    write_text(run_dir / "report.json", json.dumps(report, indent=1) + "\n")
    _wmse("preview", "--config", str(run_dir / "config.yaml"), "--out", str(run_dir / "views.png"), "--images", "5")
    picture = _draw(run_dir, report)
    _print(report, picture)
    return 0


def _move_aside(run_dir: Path) -> None:
    if run_dir.exists():
        kept = run_dir.with_name(f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        run_dir.rename(kept)
        print(f"the last demo is kept in {kept}", file=sys.stderr)


def _wmse(*words: str, capture: bool = False) -> str:
    """A command of ours; its failure ends the demo with its exit code."""
    print(f"\n$ wmse {' '.join(words)}", file=sys.stderr, flush=True)
    # one thread: operations this small gain little from more, and on a busy machine lose a lot (docs/performance.md)
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    command = [sys.executable, "-m", "trainer", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True, env=env)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def _measure(command: str, run_dir: Path, which: str) -> dict[str, Any]:
    return json.loads(_wmse(command, "--run_dir", str(run_dir), "--checkpoint", which, capture=True))


def _report(trained: dict[str, Any], random: dict[str, Any], pixels: dict[str, Any]) -> dict[str, Any]:
    figures = {}
    for prefix, result in (("", trained), ("random_", random)):
        figures[f"{prefix}linear_top1"] = result["linear"]["top1"]
        figures[f"{prefix}linear_standardised_top1"] = result["linear"]["standardised_top1"]
        figures[f"{prefix}knn_top1"] = result["knn"]["top1"]
    return figures | {"pixels_knn_top1": pixels["knn"]["top1"], "test_images": trained["knn"]["test_images"]}


def _draw(run_dir: Path, report: dict[str, Any]) -> Path:
    """One picture: the loss, the figures, and the views the encoder learnt from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figure, (loss, bars, views) = plt.subplots(1, 3, figsize=(16, 5), width_ratios=(3, 3, 4))
    loss.plot([line["step"] for line in lines], [line["loss"] for line in lines])
    loss.set(title="W-MSE 4 loss", xlabel="step", ylabel="loss (2: unrelated views)", ylim=(0, None))
    names = ("knn_top1", "linear_top1", "linear_standardised_top1")
    for offset, prefix, label in ((-0.2, "random_", "untrained"), (0.2, "", "trained")):
        drawn = bars.bar([i + offset for i in range(3)], [report[prefix + name] for name in names], 0.38, label=label)
        bars.bar_label(drawn, fmt="%.1f")
    bars.axhline(report["pixels_knn_top1"], color="grey", linestyle=":", label="raw pixels, 5-nn")
    bars.set(title="top-1, %", xticks=range(3), xticklabels=("5-nn", "linear", "linear, standardised"), ylim=(40, 100))
    bars.legend(loc="upper left")
    views.imshow(plt.imread(run_dir / "views.png"))
    views.set_title("images (left) and their views")
    views.axis("off")
    figure.tight_layout()
    path = run_dir / "demo.png"
    figure.savefig(path, dpi=100)
    return path


def _print(report: dict[str, Any], picture: Path) -> None:
    title = f"Fashion-MNIST, {report['test_images']} test images, {report['seconds']:.0f} s (top-1, %)"
    table = Table("", "untrained", "trained", "gain", title=title)
    for name, label in (
        ("knn_top1", "5-nn"),
        ("linear_top1", "linear, raw features"),
        ("linear_standardised_top1", "linear, standardised"),
    ):
        before, after = report[f"random_{name}"], report[name]
        table.add_row(label, f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}")
    table.add_row("5-nn of raw pixels", "", f"{report['pixels_knn_top1']:.1f}", "")
    console = Console()
    console.print(table)
    console.print(f"loss curve and views: {picture}", soft_wrap=True)
