"""Our loader and its peers, in windows that take turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.peers.loader_dali import dali_batches
from benchmarks.peers.loader_torchvision import torchvision_batches
from trainer.bench.loading import WARMUP_STEPS, Loaders, endless_loader, in_turns
from trainer.config.schema import Config


def loaders(config: Config, workers: int) -> Loaders:
    """What is measured: name -> a function that starts it."""
    return {
        "ours": lambda: endless_loader(replace(config, device="cpu")),  # where the peers are, too
        "torchvision": lambda: torchvision_batches(config, workers),
        "dali_decode_once": lambda: dali_batches(config, decode_once=True),
        "dali_decode_per_view": lambda: dali_batches(config, decode_once=False),
    }


def compare_loaders(config: Config, seconds: float, workers: int) -> dict[str, Any]:
    """Views a second of each loader, and how many times as fast as each peer ours is."""
    figures = in_turns(loaders(config, workers), config.data.images_per_step * config.views.num_views, seconds)
    return {
        "unit": "views a second",
        "figures": figures,
        "times": {name: figures["ours"]["median"] / f["median"] for name, f in figures.items() if name != "ours"},
        "workers": workers,
        "images_per_step": config.data.images_per_step,
        "num_views": config.views.num_views,
        "side": config.views.size,
        "interpolation": config.views.interpolation,
        "warm_up_steps": WARMUP_STEPS,
    }
