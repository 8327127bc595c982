"""Ours beside what others would use, alternating in one run: loaders, losses, optimizers.

    python -m benchmarks.peers --config FILE --data.root DIR [--only loader,loss,optimizer] [--seconds S] --out JSON
        [--loader_images N] [--workers W] [--section.key value ...]

The loss is compared at one rank's share of a step, for --ranks R that share it. Prints a table of ratios; JSON last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.loaders import compare_loaders
from benchmarks.peers.optimizers import compare_optimizers
from trainer.bench.loss import bench_config
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.distributed.cores import own_cores
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.errors import BAD_INPUT, DONE, InputError
from trainer.run.machine import provenance

PARTS = ("loader", "loss", "optimizer")


def main(words: list[str]) -> int:
    """Measure, print, write. Returns the exit code."""
    own, settings = _options().parse_known_args(words)
    try:
        parts = _parts(own.only)
        config = load_config(own.config, settings)
        result = compare(config, parts, own)
    except InputError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    _print_table(result)
    if own.out:
        own.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return DONE


def compare(config: Config, parts: tuple[str, ...], own: argparse.Namespace) -> dict[str, Any]:
    """The result of each part, with an equal share of the seconds each, and what it was measured with."""
    device, share = choose_device(config, Ranks()), own.seconds / len(parts)
    images = own.loader_images or config.data.images_per_step
    smaller = replace(config, data=replace(config.data, images_per_step=images))
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "loader": lambda: compare_loaders(smaller, share, own.workers),
        "loss": lambda: _loss(config, own.ranks, share),
        "optimizer": lambda: compare_optimizers(config, share, device),
    }
    results = {part: measures[part]() for part in parts}
    return {"bench": "peers", "config": str(own.config), "seconds": own.seconds, **results, **provenance(device)}


def _loss(config: Config, ranks: int, seconds: float) -> dict[str, Any]:
    """Forward and backward of the loss against the loop that is structured as the authors' code."""
    (measured,) = bench_config(config, ranks, seconds)["results"]
    figures = {name: modes["forward_backward"] for name, modes in measured["figures"].items()}
    return {
        "unit": "microseconds of forward and backward",
        "figures": figures,
        "times": {name: figures[name]["median"] / figures["torch"]["median"] for name in ("loop", "reference")},
        "shape": measured["shape"],
    }


def _parts(only: str) -> tuple[str, ...]:
    parts = tuple(only.split(","))
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise InputError(f"--only {only}: {unknown[0]!r} is none of {', '.join(PARTS)}")
    return parts


def _print_table(result: dict[str, Any]) -> None:
    table = Table("part", "what", "median", "quartiles", "ours is so many times as fast")
    for part in PARTS:
        for name, figure in result.get(part, {}).get("figures", {}).items():
            ratio = result[part]["times"].get(name)
            quartiles = f"{figure['quartile_1']:,.0f} to {figure['quartile_3']:,.0f}"
            table.add_row(part, name, f"{figure['median']:,.0f}", quartiles, f"{ratio:.2f}" if ratio else "")
        table.add_section()
    table.caption = "; ".join(f"{part}: {result[part]['unit']}" for part in PARTS if part in result)
    Console(stderr=True, width=130).print(table)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--seconds", type=float, default=90.0, help="in all, shared by the parts")
    parser.add_argument("--workers", type=int, default=own_cores(), help="processes of torchvision's DataLoader")
    parser.add_argument("--ranks", type=int, default=1, help="that share a step, for the loss")
    parser.add_argument("--loader_images", type=int, default=0, help="images of a loader's step; default: the config's")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
