"""How many views a second the loader makes, alone, with the files out of the page cache and in it."""

from __future__ import annotations

from typing import Any

from trainer.bench.loading import WARMUP_STEPS, dali_version, endless_loader, measure, settings_used, warm_up
from trainer.bench.timing import spread
from trainer.config.schema import Config
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.run.machine import provenance

WINDOWS = 5
CACHES = {
    "cold": "before each read the kernel is asked to forget the file's (or the shard's) pages: posix_fadvise DONTNEED, which "
    "needs no rights; pages being written, caches of a disk or a file server, and files in memory (tmpfs) stay",
    "warm": "as they come: in the page cache where the set fits, since the cold windows have read it or these have",
}


def bench_loader(config: Config, seconds: float) -> dict[str, Any]:
    """Views a second in WINDOWS windows from a cold page cache and as many from a warm one, `seconds` in all; starts and
    warm-up on top. "views_per_s" and "windows" are the warm ones."""
    device = choose_device(config, Ranks())
    views = config.data.images_per_step * config.views.num_views
    rates = {}
    for cache in CACHES:
        batches = endless_loader(config, cold=cache == "cold")
        warm_up(batches)
        rates[cache] = [measure(batches, views, seconds / WINDOWS / len(CACHES)) for _ in range(WINDOWS)]
        del batches
    figures = {cache: {**spread(values), "samples": values} for cache, values in rates.items()}
    return {
        "bench": "loader",
        "views_per_s": figures["warm"]["median"],
        "windows": rates["warm"],
        "figures": figures,
        "page_cache": CACHES,
        "warm_up_steps": WARMUP_STEPS,
        "images_per_step": config.data.images_per_step,
        "num_views": config.views.num_views,
        "side": config.views.size,
        "interpolation": config.views.interpolation,
        **settings_used(config, device),
        **provenance(device),
        "dali": dali_version(),
    }
