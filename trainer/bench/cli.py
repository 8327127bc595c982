"""wmse bench KIND ...: the options, and for each kind the function that measures. Each imports only what it runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import DONE, FAILED, InputError

if TYPE_CHECKING:
    from trainer.config.schema import Config

Options = argparse.Namespace
Result = dict[str, Any]
OVER_RANKS = ("compute", "end2end")  # kinds that torchrun may start
PICTURES = (".png", ".pdf", ".svg")
GROWTH_LINES = ("num_views", "images_per_rank", "embedding_size", "ranks", "images_of_set")
OPTIONS_OF = {  # option that only some kinds take -> those
    "ranks": ("loss",),
    "shapes": ("loss",),
    "sweep": ("loss", "loader"),
    "folder": ("checkpoint", "all"),
    "profile": ("compute", "end2end"),
    "batch_norm": ("compute",),
    "lines": ("growth",),
    "plot": ("loss", "compute", "end2end", "growth", "all"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of all kinds."""
    parser.add_argument("kind", choices=tuple(MEASURES))
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="the experiment: YAML, or the name of a recipe (loss: one rank's step; default: those of all recipes)",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="R", help="loss: ranks that share the experiment's step (default 1)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="time to measure for, in all, warm-up and counting on top (default 20)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to this file, too")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the result (loss: with --sweep)")
    _add_options_of_kinds(parser)


def _add_options_of_kinds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="d,N,M,k,it",
        help="loss: views, images, slice size, embedding size, iterations of each measurement",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="loss: the whitening alone over numbers, rows and sizes of slices; loader: over its settings, naming the fastest",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="JSON", help="compute, end2end: write a trace for chrome://tracing"
    )
    parser.add_argument(
        "--batch_norm", action="store_true", help="compute: BatchNorm's ways to take statistics, in turns, too"
    )
    parser.add_argument(
        "--lines",
        nargs="+",
        choices=GROWTH_LINES,
        metavar="NAME",
        help="growth: of what, of " + ", ".join(GROWTH_LINES),
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="checkpoint: where files are written, and deleted afterwards (default: the system's temporary folder)",
    )


def run_bench(own: Options, settings: list[str], num_ranks: int) -> int:
    """Measure, write, draw, print JSON on the last line. num_ranks: of --ranks. Returns the exit code."""
    _check(own)
    result = MEASURES[own.kind](own, settings, num_ranks)
    if result is None:  # not the first rank
        return DONE
    if own.config is not None:
        result |= {"config": " ".join(map(str, own.config)), "overrides": settings}
    text = json.dumps(result)
    if own.out is not None:
        from trainer.files import write_text

        write_text(own.out, text + "\n")
    if "views_per_s" in result:
        print(_in_words(result), file=sys.stderr)
    print(text, flush=True)  # whatever becomes of the drawing
    if own.plot is not None:
        from trainer.bench.plot import draw

        draw(result, own.plot)
    return FAILED if result.get("failed_parts") else DONE


def _in_words(result: Result) -> str:
    """The figures that one looks for first."""
    said = [f"{result['bench']}: {result['views_per_s']:,.1f} views/s"]
    if "roofline" in result:
        said.append(
            f"{result['roofline']['traffic_utilisation']:.0%} of the memory traffic that the device can do, unfused"
        )
    if "share_of_compute" in result:
        said.append(f"{result['share_of_compute']:.1%} of the step alone")
        said.append(f"loop overhead {result['step']['loop_overhead_percent']:.2f} % of a step")
    return ", ".join(said)


def _check(own: Options) -> None:
    """Before anything is measured: raises InputError for options that the kind has no use for, and for paths that can't be."""
    for option, kinds in OPTIONS_OF.items():
        if getattr(own, option) not in (None, False) and own.kind not in kinds:
            raise InputError(f"--{option} is for wmse bench {' and '.join(kinds)}")
    if not 0 < own.seconds < math.inf:
        raise InputError(f"--seconds is {own.seconds}: give a time above 0")
    for option in ("out", "plot", "profile"):
        path = getattr(own, option)
        if path is not None and not path.parent.is_dir():
            raise InputError(f"--{option} {path}: there is no folder {path.parent}; make it first")
        if path is not None and path.is_dir():
            raise InputError(f"--{option} {path}: is a folder; name a file")
    if own.plot is not None:
        if own.kind == "loss" and not own.sweep:
            raise InputError("--plot has nothing to draw of wmse bench loss without --sweep")
        from trainer.bench.plot import load_matplotlib

        load_matplotlib()
        if own.plot.suffix not in PICTURES:
            raise InputError(f"--plot {own.plot}: give a name that ends in {' or '.join(PICTURES)}")
    from trainer.distributed.ranks import find_ranks

    if own.kind not in OVER_RANKS and find_ranks().world_size > 1:
        raise InputError(
            f"wmse bench {own.kind} measures one process: start it without torchrun; {' and '.join(OVER_RANKS)} take several"
        )


def _experiment(own: Options, settings: list[str]) -> Config:
    from trainer.config.loading import load_config

    if own.config is None:
        raise InputError(f"wmse bench {own.kind} needs --config FILE")
    return load_config(own.config, settings)


def _loss(own: Options, settings: list[str], num_ranks: int) -> Result:
    if sum((own.config is not None, bool(own.shapes), own.sweep)) > 1:
        raise InputError("--config, --shapes and --sweep each say what is measured: give one of them")
    if own.config is not None:
        from trainer.bench.loss import bench_config

        return bench_config(_experiment(own, settings), num_ranks, own.seconds)
    if settings or own.ranks is not None:
        ignored = " ".join(["--ranks"] * (own.ranks is not None) + settings)
        raise InputError(
            f"wmse bench loss has no use for {ignored} without --config FILE; --shapes d,N,M,k,it names sizes without one"
        )
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if own.sweep:
        from trainer.bench.sweep import bench_sweep

        return bench_sweep(device, own.seconds)
    from trainer.bench.loss import bench_loss
    from trainer.bench.shapes import parse_shapes

    return bench_loss(parse_shapes(own.shapes or []), device, own.seconds)


def _loader(own: Options, settings: list[str], num_ranks: int) -> Result:
    config = _experiment(own, settings)
    if own.sweep:
        from trainer.bench.loader_sweep import bench_loader_sweep

        return bench_loader_sweep(config, own.seconds)
    from trainer.bench.loader import bench_loader

    return bench_loader(config, own.seconds)


def _compute(own: Options, settings: list[str], num_ranks: int) -> Result | None:
    from trainer.bench.compute import bench_compute

    config = _experiment(own, settings)
    return bench_compute(config, own.seconds, trace=own.profile, batch_norm=own.batch_norm)


def _end2end(own: Options, settings: list[str], num_ranks: int) -> Result | None:
    from trainer.bench.end2end import bench_end2end
    from trainer.loop import train

    return bench_end2end(_experiment(own, settings), own.seconds, train, trace=own.profile)


def _checkpoint(own: Options, settings: list[str], num_ranks: int) -> Result:
    from trainer.bench.checkpoint import bench_checkpoint

    return bench_checkpoint(_experiment(own, settings), own.seconds, own.folder)


def _growth(own: Options, settings: list[str], num_ranks: int) -> Result:
    from trainer.bench.growth import bench_growth

    return bench_growth(_experiment(own, settings), own.seconds, own.lines or GROWTH_LINES)


def _all(own: Options, settings: list[str], num_ranks: int) -> Result:
    from trainer.bench.all import bench_all
    from trainer.bench.checkpoint import bench_checkpoint
    from trainer.bench.compute import bench_compute
    from trainer.bench.end2end import bench_end2end
    from trainer.bench.loader import bench_loader
    from trainer.bench.loss import bench_config
    from trainer.loop import train

    config = _experiment(own, settings)
    return bench_all(
        {
            "loss": partial(bench_config, config, 1),
            "loader": partial(bench_loader, config),
            "compute": partial(bench_compute, config),
            "end2end": lambda seconds: bench_end2end(config, seconds, train),
            "checkpoint": lambda seconds: bench_checkpoint(config, seconds, own.folder),
        },
        own.seconds,
    )


MEASURES: dict[str, Callable[[Options, list[str], int], Result | None]] = {
    "loss": _loss,
    "loader": _loader,
    "compute": _compute,
    "end2end": _end2end,
    "checkpoint": _checkpoint,
    "growth": _growth,
    "all": _all,
}
