"""Compare parts of this program with common alternatives, in alternating windows of one run.

    python -m trainer.bench.peers --config FILE --data.root DIR [--only PARTS] [--seconds S]
        [--out JSON] [--loader_images N] [--workers W] [--ranks R] [--section.key value ...]

PARTS are loader, loss, optimizer, training and options, separated by commas. The loss is compared at the share of one of
--ranks R ranks. "training" compares whole steps with the structure of the authors' code. "options" compares our loader with and
without the options that buy time. Prints a table, and JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.bench.loss import bench_config
from trainer.bench.peers.authors import compare_training
from trainer.bench.peers.loaders import compare_options, compare_with_peers
from trainer.bench.peers.optimizers import compare_optimizers
from trainer.bench.report import print_report
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.distributed.cores import own_cores
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.errors import BAD_INPUT, DONE, InputError
from trainer.files import write_text
from trainer.run.machine import provenance

DEFAULT_PARTS = "loader,loss,optimizer"


def main(argv: Sequence[str]) -> int:
    """Measure, print and write the result. Returns the exit code."""
    own, settings = _parser().parse_known_args(argv)
    try:
        result = compare(load_config(own.config, settings, check_method="loss" in own.only), own)
    except InputError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print_report(result)
    if own.out:
        write_text(own.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return DONE


def compare(config: Config, own: argparse.Namespace) -> dict[str, Any]:
    """Measure each part for an equal share of the seconds. Raises InputError for an unknown part."""
    device = choose_device(config, Ranks())
    # On two cores a step of 4,096 images takes more than a minute, too long for a window.
    images = own.loader_images or config.data.images_per_step
    smaller = replace(config, data=replace(config.data, images_per_step=images))
    parts: dict[str, Callable[[float], dict[str, Any]]] = {
        "loader": lambda seconds: compare_with_peers(smaller, seconds, own.workers),
        "options": lambda seconds: compare_options(smaller, seconds),
        "loss": lambda seconds: _compare_losses(config, own.ranks, seconds),
        "optimizer": lambda seconds: compare_optimizers(config, seconds, device),
        "training": lambda seconds: compare_training(config, seconds, own.workers),
    }
    # Refuse an unknown part before the first one is measured.
    chosen = own.only.split(",")
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        raise InputError(f"--only {own.only}: there is no part {unknown[0]!r}; choose from {', '.join(parts)}")
    share = own.seconds / len(chosen)
    results = {name: parts[name](share) for name in chosen}
    return {"bench": "peers", "config": str(own.config), "seconds": own.seconds, **results, **provenance(device)}


def _compare_losses(config: Config, ranks: int, seconds: float) -> dict[str, Any]:
    """Compare the implementations of the loss by forward and backward. `ranks`: ranks that divide the global batch."""
    (measured,) = bench_config(config, ranks, seconds)["results"]
    figures = {name: modes["forward_backward"] for name, modes in measured["figures"].items()}
    # How many times as long as our loss the baselines take.
    ours = figures["torch"]["median"]
    return {
        "unit": "microseconds of forward and backward",
        "figures": figures,
        "times": {name: figures[name]["median"] / ours for name in ("loop", "reference")},
        "shape": measured["shape"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m trainer.bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="experiment to measure")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--only", default=DEFAULT_PARTS, help=f"parts, separated by commas (default {DEFAULT_PARTS})")
    parser.add_argument("--seconds", type=float, default=90.0, help="time for all parts together (default 90)")
    parser.add_argument("--workers", type=int, default=own_cores(), help="processes of torchvision's DataLoader")
    parser.add_argument("--ranks", type=int, default=1, help="loss: number of ranks that divide the global batch")
    parser.add_argument("--loader_images", type=int, default=0, help="loader: images of a step (default: the config's)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
