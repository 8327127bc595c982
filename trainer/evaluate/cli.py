"""`wmse probe`, `wmse knn` and `wmse evaluate` on the command line: they differ only in what they measure."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import DONE, InputError


def add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands' own options; all others are settings."""
    run = parser.add_mutually_exclusive_group(required=True)
    run.add_argument("--run_dir", type=Path, metavar="DIR", help="folder of the pre-training run")
    run.add_argument(
        "--follow",
        type=Path,
        metavar="DIR",
        help="the same, but measure each checkpoint as it appears until the run is over",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="last (the default), a step, a file, random (the untrained encoder) or pixels (no encoder)",
    )
    parser.add_argument(
        "--poll_seconds", type=float, metavar="S", help="with --follow: time between two checks (default 20)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="a new file for the results (JSON), instead of files in DIR/eval"
    )


def evaluate_run(own: argparse.Namespace, settings: Sequence[str], measures: Sequence[str]) -> int:
    """Measure one checkpoint, or follow a run; returns the exit code. measures: of "linear" and "knn"."""
    if own.follow is not None:
        return _follow(own, settings, measures)
    if own.poll_seconds is not None:
        raise InputError("--poll_seconds is for --follow DIR: give that instead of --run_dir")
    from trainer.evaluate.run import run_evaluation

    run_evaluation(own.run_dir, own.checkpoint or "last", settings, measures, own.out)
    return DONE


def _follow(own: argparse.Namespace, settings: Sequence[str], measures: Sequence[str]) -> int:
    if own.checkpoint is not None:
        raise InputError("--checkpoint is for --run_dir: --follow takes every checkpoint")
    if own.out is not None:
        raise InputError("--out is for --run_dir: --follow keeps its results in DIR/eval, where it looks for them")
    poll_seconds = 20.0 if own.poll_seconds is None else own.poll_seconds
    if not 0 < poll_seconds < math.inf:
        raise InputError(f"--poll_seconds is {poll_seconds:g}: give a time above 0")
    from trainer.run.signals import stop_on_signals

    with stop_on_signals():  # nothing to save: a signal ends the process at once with 75, which asks for a new start
        from trainer.evaluate.follow import follow_run

        follow_run(own.follow, settings, measures, poll_seconds)
    return DONE
