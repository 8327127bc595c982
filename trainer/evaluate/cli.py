"""Command-line options of `wmse probe`, `wmse knn` and `wmse evaluate`, which differ only in their protocols."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import DONE, InputError

_POLL_SECONDS = 20.0


def add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of these commands; all other options are settings."""
    run = parser.add_mutually_exclusive_group(required=True)
    run.add_argument(
        "--run_dir", type=Path, metavar="DIR", help="folder of the pre-training run; measure one checkpoint"
    )
    run.add_argument(
        "--follow",
        type=Path,
        metavar="DIR",
        help="folder of the pre-training run; measure each checkpoint as it appears, until the run is over",
    )
    run.add_argument(
        "--encoder",
        metavar="SOURCE",
        help="measure any encoder: an exported folder, a checkpoint, timm:NAME, torchvision:NAME=FILE, ... (docs/export.md); "
        "give its data set by --config FILE or --data.root DIR",
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="with --encoder: YAML file with settings, or name of a recipe in configs/",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="with --run_dir: last (the default), a step, a file, random (the untrained encoder) or pixels (no encoder)",
    )
    parser.add_argument(
        "--poll_seconds",
        type=float,
        metavar="S",
        help=f"with --follow: seconds between two looks for new checkpoints (default {_POLL_SECONDS:g})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="with --run_dir or --encoder: write the results to this new JSON file instead of files in DIR/eval",
    )


def evaluate_run(options: argparse.Namespace, settings: Sequence[str], names: Sequence[str] | None) -> int:
    """Measure one encoder, or follow a run. Returns the exit code.

    names: protocols; None: those of `evaluate.protocols`."""
    if options.config and options.encoder is None:
        raise InputError("--config only applies to --encoder: remove it, since a run has its own settings")
    # Options that do not apply are refused rather than ignored.
    if options.follow is not None:
        return _follow(options, settings, names)
    if options.poll_seconds is not None:
        raise InputError("--poll_seconds only applies to --follow: give --follow DIR, or remove it")
    # This import takes seconds, so it follows the checks of the options.
    from trainer.evaluate.run import run_evaluation, run_foreign_evaluation

    if options.encoder is not None:
        if options.checkpoint is not None:
            raise InputError("--checkpoint only applies to --run_dir: give the checkpoint itself as --encoder FILE")
        run_foreign_evaluation(options.encoder, options.config or [], settings, names, options.out)
        return DONE
    run_evaluation(options.run_dir, options.checkpoint or "last", settings, names, options.out)
    return DONE


def _follow(options: argparse.Namespace, settings: Sequence[str], names: Sequence[str] | None) -> int:
    if options.checkpoint is not None:
        raise InputError("--checkpoint only applies to --run_dir: remove it, since --follow measures every checkpoint")
    if options.out is not None:
        raise InputError("--out only applies to --run_dir: remove it, since --follow writes its results to DIR/eval")
    poll_seconds = _POLL_SECONDS if options.poll_seconds is None else options.poll_seconds
    if not 0 < poll_seconds < math.inf:
        raise InputError(f"--poll_seconds is {poll_seconds:g}: give a number above 0")
    from trainer.run.signals import stop_on_signals

    # An evaluator has nothing to save: a signal ends it at once with exit code 75, which asks for a new start.
    with stop_on_signals():
        # This import takes seconds, so it follows the handlers.
        from trainer.evaluate.follow import follow_run

        follow_run(options.follow, settings, names, poll_seconds)
    return DONE
