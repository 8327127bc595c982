"""How many views a second the loader makes, alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from nvidia.dali import __version__ as dali_version

from trainer.config import Config
from trainer.data.loader import Batch, ViewLoader, own_cores, train_requests
from trainer.data.plan import Planner, Rows
from trainer.device import choose_device
from trainer.distributed import Ranks
from trainer.machine import provenance
from trainer.setup import open_shared_index

WARMUP_STEPS = 3
WINDOWS = 5


def endless_loader(config: Config) -> Iterator[Batch]:
    """Batch after batch of the config's plan, for as long as asked."""
    index = open_shared_index(config, Ranks())
    images = config.data.images_per_step
    planner = Planner(
        config.views, seed=config.seed, num_images=len(index), images_per_step=images, rows=Rows(0, images)
    )
    return iter(
        ViewLoader(
            index,
            config.views,
            config.data,
            train_requests(planner),
            batch_size=images,
            device=choose_device(config, Ranks()),
            first_step=0,
            end_step=1 << 40,
        )
    )


def bench_loader(config: Config, seconds: float) -> dict[str, Any]:
    """Median views a second over five windows of `seconds` in all, warm-up left out; the files come from a warm page cache
    where the set fits, since the warm-up and earlier windows have read them."""
    batches = endless_loader(config)
    views = config.data.images_per_step * config.views.num_views
    for _ in range(WARMUP_STEPS):
        next(batches)
    rates = [measure(batches, views, seconds / WINDOWS) for _ in range(WINDOWS)]
    device = choose_device(config, Ranks())
    return {
        "bench": "loader",
        "views_per_s": statistics.median(rates),
        "windows": rates,
        "images_per_step": config.data.images_per_step,
        "num_views": config.views.num_views,
        "side": config.views.side,
        "threads": config.data.threads or own_cores(),
        "page_cache": "warm where the set fits",
        **provenance(device),
        "dali": dali_version,
    }


def measure(batches: Iterator[Any], views_per_batch: int, seconds: float) -> float:
    """Views a second over at least `seconds`."""
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        batch = next(batches)
        if isinstance(batch, Batch) and batch.views.is_cuda:
            torch.cuda.synchronize()
        count += views_per_batch
    return count / elapsed
