"""The command line of `wmse bench KIND`: options and measuring function of each kind. A function imports only what it runs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import DONE, FAILED, InputError

if TYPE_CHECKING:
    from trainer.config.schema import Config

Options = argparse.Namespace
Result = dict[str, Any]
Measure = Callable[[Options, Sequence[str]], "Result | None"]
OVER_RANKS = ("compute", "end2end")  # kinds that also run under torchrun
PICTURES = (".png", ".pdf", ".svg")
GROWTH_LINES = ("num_views", "images_per_rank", "embedding_size", "ranks", "images_of_set")


def add_arguments(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Add a sub-parser for each kind of measurement, and return them."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    # Options that several kinds share, each in a parent of the sub-parsers.
    common = _common_options()
    experiment = _options("--config", type=Path, action="append", required=True, metavar="FILE", help=_CONFIG_HELP)
    sweep = _options("--sweep", action="store_true", help=_SWEEP_HELP)
    plot = _options("--plot", type=_picture, metavar="PNG", help="draw the result into this file")
    profile = _options(
        "--profile", type=_new_file, metavar="JSON", help="write the profiler's trace for chrome://tracing"
    )
    folder = _options("--folder", type=_folder, metavar="DIR", help=_FOLDER_HELP)

    def add(name: str, measure: Measure, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=text, description=text, parents=[common, *parents], allow_abbrev=False)
        kind.set_defaults(measure=measure)
        return kind

    loss = add("loss", _loss, "measure the loss alone: the authors' loop and every whitening backend", sweep, plot)
    loss.add_argument(
        "--config", type=Path, action="append", metavar="FILE", help="measure one rank's step of this experiment"
    )
    loss.add_argument(
        "--ranks", type=int, metavar="R", help="number of ranks that divide the experiment's global batch (default 1)"
    )
    loss.add_argument("--shapes", nargs="+", metavar="d,N,M,k,it", help=_SHAPES_HELP)
    add("loader", _loader, "measure the loader alone, with a cold and a warm page cache", experiment, sweep)
    compute = add("compute", _compute, "measure the training step on synthetic images", experiment, plot, profile)
    compute.add_argument("--batch_norm", action="store_true", help="also compare the ways to take BatchNorm statistics")
    methods = add("methods", _methods, "compare the steps of the rows of a sweep, in alternating windows")
    # The rows name their configs.
    methods.set_defaults(config=None)
    methods.add_argument("sweep_file", type=Path, metavar="SWEEP", help=_ROWS_HELP)
    methods.add_argument(
        "--views", type=int, default=0, metavar="V", help="views of each step (default: those of the first row)"
    )
    add("end2end", _end2end, "measure the loop on real images, and each part of a step", experiment, plot, profile)
    add("checkpoint", _checkpoint, "measure how long it takes to save and load a checkpoint", experiment, folder)
    growth = add(
        "growth",
        _growth,
        "measure how the cost grows with views, batch size, embedding size, ranks, set",
        experiment,
        plot,
    )
    growth.add_argument(
        "--lines",
        nargs="+",
        choices=GROWTH_LINES,
        metavar="NAME",
        help=f"measure only these of {', '.join(GROWTH_LINES)}",
    )
    add("all", _all, "run all kinds except growth, and summarise them", experiment, plot, folder)
    return list(kinds.choices.values())


_CONFIG_HELP = (
    "experiment to measure: a YAML file or the name of a recipe in configs/; later files override earlier ones"
)
_SWEEP_HELP = (
    "loss: measure the whitening alone for various numbers of slices, rows and sizes; loader: try its settings"
)
_ROWS_HELP = "sweep whose rows are measured: a YAML file or the name of one in configs/sweeps (docs/sweep.md)"
_SHAPES_HELP = (
    "measure these shapes: views, images, slice size, embedding size, iterations (default: those of the recipes)"
)
_FOLDER_HELP = "write checkpoints here and delete them afterwards (default: the system's temporary folder)"


def _common_options() -> argparse.ArgumentParser:
    common = _options(
        "--seconds", type=_seconds, default=20.0, metavar="S", help="time to measure in seconds (default 20)"
    )
    common.add_argument("--out", type=_new_file, metavar="FILE", help="also write the JSON to this file")
    return common


def _options(*names: str, **keywords: Any) -> argparse.ArgumentParser:
    """Return a parser with one option, as a parent of sub-parsers."""
    # The sub-parser adds its help; a parent with help would add it twice, which argparse refuses.
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument(*names, **keywords)
    return parent


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number of seconds above 0")
    return seconds


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: give the name of a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: the folder {path.parent} does not exist: create it first")
    return path


def _picture(text: str) -> Path:
    if not text.endswith(PICTURES):
        raise argparse.ArgumentTypeError(f"{text}: give a name that ends in {' or '.join(PICTURES)}")
    return _new_file(text)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: this folder does not exist: create it first")
    return Path(text)


def run_bench(own: Options, settings: Sequence[str]) -> int:
    """Measure, print a table and the JSON on the last line of stdout, write and draw. Returns the exit code."""
    from trainer.distributed.ranks import find_ranks

    if own.kind not in OVER_RANKS and find_ranks().world_size > 1:
        raise InputError(f"wmse bench {own.kind} measures a single process: start it without torchrun")
    if getattr(own, "plot", None):
        if own.kind == "loss" and not own.sweep:
            raise InputError(
                "--plot has nothing to draw for wmse bench loss without --sweep: add --sweep or omit --plot"
            )
        from trainer.bench.plot import load_matplotlib

        load_matplotlib()  # fails before the measurement, not after it
    result = own.measure(own, settings)
    # Only rank 0 has a result.
    if result is None:
        return DONE
    if own.config is not None:
        result |= {"config": " ".join(map(str, own.config)), "overrides": list(settings)}
    _show(result, own)
    return FAILED if result.get("failed_parts") else DONE


def _show(result: Result, own: Options) -> None:
    from trainer.bench.report import print_report

    text = json.dumps(result)
    if own.out is not None:
        from trainer.files import write_text

        write_text(own.out, text + "\n")
    print_report(result)
    print(text, flush=True)  # printed before drawing, which may fail
    if getattr(own, "plot", None):
        from trainer.bench.plot import draw

        draw(result, own.plot)


def _config(own: Options, settings: Sequence[str], *, check_method: bool = True) -> Config:
    from trainer.config.loading import load_config

    return load_config(own.config, settings, check_method=check_method)


def _loss(own: Options, settings: Sequence[str]) -> Result:
    # The shapes come from one experiment, from the user, from the sweep, or by default from the recipes.
    choices = (own.config is not None, bool(own.shapes), own.sweep)
    if sum(choices) > 1:
        raise InputError("--config, --shapes and --sweep each choose what to measure: give only one of them")
    if own.config is not None:
        from trainer.bench.loss import bench_config

        ranks = 1 if own.ranks is None else own.ranks
        if ranks < 1:
            raise InputError(f"--ranks is {ranks}: give at least 1")
        return bench_config(_config(own, settings), ranks, own.seconds)
    if settings or own.ranks is not None:
        ranks_option = ["--ranks"] if own.ranks is not None else []
        ignored = " ".join([*ranks_option, *settings])
        raise InputError(f"wmse bench loss uses {ignored} only together with --config FILE")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if own.sweep:
        from trainer.bench.whitening import bench_sweep

        return bench_sweep(device, own.seconds)
    from trainer.bench.loss import bench_loss
    from trainer.bench.shapes import parse_shapes

    return bench_loss(parse_shapes(own.shapes or []), device, own.seconds)


def _loader(own: Options, settings: Sequence[str]) -> Result:
    from trainer.bench.loader import bench_loader, bench_loader_sweep

    config = _config(own, settings, check_method=False)
    return bench_loader_sweep(config, own.seconds) if own.sweep else bench_loader(config, own.seconds)


def _compute(own: Options, settings: Sequence[str]) -> Result | None:
    from trainer.bench.compute import bench_compute

    return bench_compute(_config(own, settings), own.seconds, trace=own.profile, batch_norm=own.batch_norm)


def _methods(own: Options, settings: Sequence[str]) -> Result:
    from trainer.bench.methods import bench_methods
    from trainer.sweep.definition import read_sweep

    # One run of each row; the folder is not used.
    rows = read_sweep(own.sweep_file, [], "0", settings, Path())
    return {
        **bench_methods(rows, own.seconds, own.views),
        "sweep": str(own.sweep_file),
        "overrides": list(settings),
    }


def _end2end(own: Options, settings: Sequence[str]) -> Result | None:
    from trainer.bench.end2end import bench_end2end
    from trainer.loop import train

    return bench_end2end(_config(own, settings), own.seconds, train, trace=own.profile)


def _checkpoint(own: Options, settings: Sequence[str]) -> Result:
    from trainer.bench.checkpoint import bench_checkpoint

    return bench_checkpoint(_config(own, settings, check_method=False), own.seconds, own.folder)


def _growth(own: Options, settings: Sequence[str]) -> Result:
    from trainer.bench.growth import bench_growth

    return bench_growth(_config(own, settings), own.seconds, own.lines or GROWTH_LINES)


def _all(own: Options, settings: Sequence[str]) -> Result:
    from trainer.bench.all import bench_all
    from trainer.bench.checkpoint import bench_checkpoint
    from trainer.bench.compute import bench_compute
    from trainer.bench.end2end import bench_end2end
    from trainer.bench.loader import bench_loader
    from trainer.bench.loss import bench_config
    from trainer.loop import train

    config = _config(own, settings)
    # Each part gets its share of the seconds when it runs.
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
