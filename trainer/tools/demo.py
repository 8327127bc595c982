"""Demo that pre-trains on real images, evaluates the encoder, and ends with a table and a page of plots and pictures.

    wmse demo [--seed S] [--run_dir DIR] [--section.key value ...]

Each part runs as a separate process, with the command that a user would type. An older run is renamed, not deleted.
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

# Accuracies of an encoder, by their names in report.json, and their labels.
_MEASURES = {
    "knn_top1": "5-nn",
    "linear_top1": "linear, raw features",
    "linear_standardised_top1": "linear, standardised",
}
_PROTOCOLS = ("--evaluate.protocols", "linear,knn,diagnostics")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; all other options are settings."""
    parser.add_argument(
        "--run_dir",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="default: runs/demo",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S")


def run_demo(run_dir: Path, seed: int, settings: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    began = time.time()
    run_dir = run_dir.absolute()
    # A new demo would otherwise resume the old run.
    _rename_old_run(run_dir)

    # Train, then measure the trained encoder, the untrained encoder and the raw pixels.
    common = ["--seed", str(seed), "--data.root", str(shipped_folder("demo_data")), *settings]
    _wmse("pretrain", "--config", "demo_fashion_mnist", "--run_dir", str(run_dir), *common)
    trained = _measure("evaluate", run_dir, "last", *_PROTOCOLS)
    random = _measure("evaluate", run_dir, "random", *_PROTOCOLS)
    pixels = _measure("knn", run_dir, "pixels")

    # Report the figures, and write the page.
    report = _report(trained, random, pixels)
    seconds = round(time.time() - began, 1)
    report |= {"seed": seed, "seconds": seconds}
    write_text(run_dir / "report.json", json.dumps(report, indent=1) + "\n")
    page = _wmse("report", str(run_dir), capture=True).strip()
    _print(report, page)
    return 0


def _rename_old_run(run_dir: Path) -> None:
    if run_dir.exists():
        now = time.strftime("%Y%m%d-%H%M%S")
        new_path = run_dir.with_name(f"{run_dir.name}-{now}")
        run_dir.rename(new_path)
        print(f"renamed the folder of the previous demo to {new_path}", file=sys.stderr)


def _wmse(*words: str, capture: bool = False) -> str:
    """Run a wmse command, and return its output if captured. If it fails, end the demo with its exit code."""
    print(f"\n$ wmse {' '.join(words)}", file=sys.stderr, flush=True)
    # Use one thread: such small operations gain little from more, and lose a lot on a busy machine.
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    command = [sys.executable, "-m", "trainer", *words]
    # The log of the command goes to stderr, so it stays visible while stdout is captured.
    stdout = subprocess.PIPE if capture else None
    done = subprocess.run(command, stdout=stdout, text=True, env=env)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def _measure(command: str, run_dir: Path, which: str, *settings: str) -> dict[str, Any]:
    output = _wmse(command, "--run_dir", str(run_dir), "--checkpoint", which, *settings, capture=True)
    return json.loads(output)


def _report(trained: dict[str, Any], random: dict[str, Any], pixels: dict[str, Any]) -> dict[str, Any]:
    """Collect the accuracies of the demo under the names of report.json."""
    # Figures of the trained encoder have plain names, and those of the untrained one a prefix.
    report = {}
    for prefix, result in (("", trained), ("random_", random)):
        report[f"{prefix}linear_top1"] = result["linear"]["top1"]
        report[f"{prefix}linear_standardised_top1"] = result["linear"]["standardised_top1"]
        report[f"{prefix}knn_top1"] = result["knn"]["top1"]
    report["pixels_knn_top1"] = pixels["knn"]["top1"]
    report["test_images"] = trained["knn"]["test_images"]
    return report


def _print(report: dict[str, Any], page: str) -> None:
    title = f"Fashion-MNIST, {report['test_images']} test images, {report['seconds']:.0f} s (top-1, %)"
    table = Table("", "untrained", "trained", "gain", title=title)
    for name, label in _MEASURES.items():
        before = report[f"random_{name}"]
        after = report[name]
        table.add_row(label, f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}")
    table.add_row("5-nn of raw pixels", "", f"{report['pixels_knn_top1']:.1f}", "")
    console = Console()
    console.print(table)
    console.print(f"plots and pictures: {page}", soft_wrap=True)
