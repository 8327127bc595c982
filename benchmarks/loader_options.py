"""What the loader gains by the options that buy time, alternating in one run.

    python -m benchmarks.loader_options --config FILE --data.root DIR [--seconds S] --out JSON [--section.key value ...]

Smaller views as views.early_sizes draws them, decoded images in memory (the cache is full when the clock starts), stored
images with their longer side at 400 pixels. Prints a table; JSON last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from trainer.bench.loading import Loaders, endless_loader, in_turns
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.data.decode_cache import SHARED_MEMORY, DecodeCache, decoded_bytes
from trainer.data.image_probe import decode_rgb
from trainer.data.index import Index, open_index
from trainer.data.prepare import prepare
from trainer.data.shard_writer import Shrink
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.errors import BAD_INPUT, DONE, InputError
from trainer.run.machine import provenance

SIDES = (160, 128)
MAX_SIDE = 400


def variants(config: Config, shrunk: Path, cache: DecodeCache) -> Loaders:
    """What is measured: name -> a function that starts it. shrunk: the set with smaller pictures. cache: with all images."""
    small_files = replace(config, data=replace(config.data, root=str(shrunk)))
    made: Loaders = {"as the recipe": partial(endless_loader, config)}
    for side in SIDES:
        drawn = replace(config, views=replace(config.views, size=side))
        made[f"views of {side} px"] = partial(endless_loader, drawn)
    made["decode_cache_gib"] = partial(endless_loader, config, cache=cache)
    made[f"prepare --max_side {MAX_SIDE}"] = partial(endless_loader, small_files)
    return made


def full_cache(index: Index) -> DecodeCache:
    """With every image of the set."""
    cache = DecodeCache(index, SHARED_MEMORY / f"wmse_bench_{os.getpid()}", create=True)
    cache.forget_name()
    for image_id in range(len(index)):
        cache.put(image_id, np.asarray(decode_rgb(index.read(image_id))))
    return cache


def compare(config: Config, seconds: float) -> dict[str, Any]:
    """Views a second of each variant, and how many times as fast as the recipe's loader it is."""
    index = open_index(Path(config.data.root), config.data.train_split)
    images = config.data.images_per_step
    cache = full_cache(index)
    stored = sum(len(index.read(i)) for i in range(len(index)))
    with tempfile.TemporaryDirectory() as folder:
        shrunk = Path(folder) / "shrunk"
        splits = [config.data.train_split]
        prepare(config.data.root, shrunk, splits=splits, shrink=Shrink(MAX_SIDE), progress=False)
        figures = in_turns(variants(config, shrunk, cache), images * config.views.num_views, seconds)
        shrunk_bytes = sum(path.stat().st_size for path in shrunk.glob("*.tar"))
    base = figures["as the recipe"]["median"]
    return {
        "bench": "loader_options",
        "unit": "views a second",
        "figures": figures,
        "times": {name: figure["median"] / base for name, figure in figures.items()},
        "images": len(index),
        "stored_bytes": stored,
        "shrunk_tar_bytes": shrunk_bytes,
        "decoded_bytes": decoded_bytes(index),
        "images_per_step": images,
        "num_views": config.views.num_views,
        "page_cache": "warm",
        **provenance(choose_device(config, Ranks())),
    }


def main(words: list[str]) -> int:
    """Measure, print, write. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all, starts and warm-up on top")
    parser.add_argument("--out", type=Path)
    own, settings = parser.parse_known_args(words)
    try:
        result = {**compare(load_config(own.config, settings), own.seconds), "config": str(own.config)}
    except InputError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    table = Table("option", "views/s, median", "quartiles", "times the recipe's")
    for name, figure in result["figures"].items():
        quartiles = f"{figure['quartile_1']:,.0f} to {figure['quartile_3']:,.0f}"
        table.add_row(name, f"{figure['median']:,.0f}", quartiles, f"{result['times'][name]:.2f}")
    Console(stderr=True).print(table)
    if own.out:
        own.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
