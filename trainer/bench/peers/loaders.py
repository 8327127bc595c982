"""Compare our loader with other loaders, and with itself with the options that buy time."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.bench.loader import Loaders, compare_loaders, endless_loader, loader_sizes, views_of_step
from trainer.bench.peers.loader_dali import dali_batches
from trainer.bench.peers.loader_torchvision import torchvision_batches
from trainer.config.schema import Config
from trainer.data.decode_cache import SHARED_MEMORY, DecodeCache, decoded_bytes
from trainer.data.image_probe import decode_rgb
from trainer.data.index import Index, open_index
from trainer.data.prepare import prepare
from trainer.data.shard_writer import Shrink

SIZES = (160, 128)  # sizes of smaller views in px, as in views.early_sizes
MAX_SIDE = 400


def peer_loaders(config: Config, workers: int) -> Loaders:
    """Return the loaders to compare: name -> a function that starts one."""
    return {
        "ours": partial(endless_loader, replace(config, device="cpu")),  # the peers run on the CPU as well
        "torchvision": partial(torchvision_batches, config, workers),
        "dali_decode_once": partial(dali_batches, config, decode_once=True),
        "dali_decode_per_view": partial(dali_batches, config, decode_once=False),
    }


def compare_with_peers(config: Config, seconds: float, workers: int) -> dict[str, Any]:
    """Measure the views per second of each loader, and our speed as a multiple of each peer's."""
    figures = compare_loaders(peer_loaders(config, workers), views_of_step(config), seconds)
    ours = figures["ours"]["median"]
    times = {name: ours / figure["median"] for name, figure in figures.items() if name != "ours"}
    return {"unit": "views a second", "figures": figures, "times": times, "workers": workers, **loader_sizes(config)}


def compare_options(config: Config, seconds: float) -> dict[str, Any]:
    """Measure the options that buy time, and the speed of each as a multiple of the config's loader."""
    index = open_index(Path(config.data.root), config.data.train_split)
    cache = _full_cache(index)
    # Prepare the set with smaller images in a temporary folder.
    with tempfile.TemporaryDirectory() as folder:
        shrunk = Path(folder) / "shrunk"
        splits = [config.data.train_split]
        prepare(config.data.root, shrunk, splits=splits, shrink=Shrink(MAX_SIDE), progress=False)
        figures = compare_loaders(option_loaders(config, shrunk, cache), views_of_step(config), seconds)
        shrunk_bytes = sum(path.stat().st_size for path in shrunk.glob("*.tar"))
    base = figures["as the recipe"]["median"]
    return {
        "unit": "views a second",
        "figures": figures,
        "times": {name: figure["median"] / base for name, figure in figures.items()},
        "images": len(index),
        "stored_bytes": sum(len(index.read(i)) for i in range(len(index))),
        "shrunk_tar_bytes": shrunk_bytes,
        "decoded_bytes": decoded_bytes(index),
        "page_cache": "warm",
        **loader_sizes(config),
    }


def option_loaders(config: Config, shrunk: Path, cache: DecodeCache) -> Loaders:
    """Return the loaders to compare. shrunk: folder of the set with smaller images. cache: a cache that holds all images."""
    small_views = {}
    for size in SIZES:
        views = replace(config.views, size=size)
        small_views[f"views of {size} px"] = partial(endless_loader, replace(config, views=views))
    small_files = replace(config, data=replace(config.data, root=str(shrunk)))
    return {
        "as the recipe": partial(endless_loader, config),
        **small_views,
        "decode_cache_gib": partial(endless_loader, config, cache=cache),
        "decoder torchcodec": partial(endless_loader, replace(config, data=replace(config.data, decoder="torchcodec"))),
        f"prepare --max_side {MAX_SIDE}": partial(endless_loader, small_files),
    }


def _full_cache(index: Index) -> DecodeCache:
    """Decode every image of the set into a cache."""
    cache = DecodeCache(index, SHARED_MEMORY / f"wmse_bench_{os.getpid()}", create=True)
    # Without a name the memory is freed when this process ends, whatever ends it.
    cache.forget_name()
    for image_id in range(len(index)):
        image = decode_rgb(index.read(image_id))
        cache.put(image_id, np.asarray(image))
    return cache
