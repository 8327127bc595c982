"""Measure the views per second of the loader alone: with a cold and a warm page cache, and for various settings."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trainer.bench.timing import Window, interleave, spread
from trainer.config.schema import Config
from trainer.data.decode_cache import DecodeCache
from trainer.data.index import Index, open_images
from trainer.data.loader import Batch, ViewLoader, train_requests
from trainer.data.plan import Planner
from trainer.data.tar_shards import list_shards
from trainer.distributed.cores import own_cores
from trainer.distributed.device import choose_device, views_dtype
from trainer.distributed.geometry import check_set_size
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.run.machine import provenance

WARMUP_STEPS = 3
WINDOWS = 5
SWEEP_WINDOWS = 3
CACHES = {
    "cold": "before each read the kernel drops the pages of the file or shard (posix_fadvise DONTNEED, which needs no rights); "
    "pages being written, caches of a disk or a file server, and files in memory (tmpfs) stay",
    "warm": "files are in the page cache if the set fits, because earlier windows have read them",
}
Loaders = Mapping[str, Callable[[], Iterator[Any]]]  # name -> a function that starts a loader
Setting = dict[str, Any]  # field of config.data -> value


def bench_loader(config: Config, seconds: float) -> dict[str, Any]:
    """Measure windows with a cold page cache, then as many with a warm one, in about `seconds` without starts and warm-up.

    "views_per_s" and "windows" are those of the warm cache."""
    figures: dict[str, dict[str, Any]] = {}
    share = seconds / len(CACHES)
    # One cache after the other, because a cold window would empty the cache of a warm one.
    for cache in CACHES:
        loader = {cache: partial(endless_loader, config, cold=cache == "cold")}
        figures |= compare_loaders(loader, views_of_step(config), share)
    return {
        "bench": "loader",
        "views_per_s": figures["warm"]["median"],
        "windows": figures["warm"]["samples"],
        "figures": figures,
        "page_cache": CACHES,
        **settings_used(config, choose_device(config, Ranks())),
        **loader_sizes(config),
    }


def bench_loader_sweep(config: Config, seconds: float) -> dict[str, Any]:
    """Measure every setting of `grid` in alternating windows, in about `seconds` without starts and warm-up.

    "best" is the setting with the largest median, as command-line options. "clearly_better" says whether its lower quartile is
    above the upper quartile of the config's setting."""
    tried = grid(config, choose_device(config, Ranks()))
    settings = {as_options(setting): setting for setting in tried}
    loaders = {name: partial(endless_loader, with_setting(config, each)) for name, each in settings.items()}
    figures = compare_loaders(loaders, views_of_step(config), seconds, SWEEP_WINDOWS)
    # The first setting of the grid is that of the config.
    own = figures[next(iter(settings))]
    best = max(figures, key=lambda name: figures[name]["median"])
    return {
        "bench": "loader_sweep",
        "unit": "views a second",
        "results": [{"setting": setting, "figures": figures[name]} for name, setting in settings.items()],
        "best": best,
        "clearly_better": figures[best]["quartile_1"] > own["quartile_3"],
        **loader_sizes(config),
    }


def compare_loaders(loaders: Loaders, views: int, seconds: float, windows: int = WINDOWS) -> dict[str, dict[str, Any]]:
    """Return the views per second of each loader, in windows that alternate. views: number of views in a batch.

    A loader exists only during its windows, so that it cannot work ahead in those of another."""
    # A window warms up its loader itself, so no extra call is needed.
    timers = {name: restarting_window(start) for name, start in loaders.items()}
    samples = interleave(timers, seconds, num_windows=windows, warm_up=False)
    rates = {name: [views / each for each in values] for name, values in samples.items()}
    return {name: {**spread(values), "samples": values} for name, values in rates.items()}


def restarting_window(start: Callable[[], Iterator[Any]]) -> Window:
    """Return a timer that starts a loader, skips its first batches, and times the batches after them."""

    def window(calls: int) -> float:
        batches = start()
        for _ in range(WARMUP_STEPS):
            next(batches)
        began = time.perf_counter()
        for _ in range(calls):
            batch = next(batches)
            # Wait for this batch only, not for the whole device: other streams of DALI work on the next batches.
            if isinstance(batch, Batch) and batch.views.is_cuda:
                torch.cuda.current_stream(batch.views.device).synchronize()
        return time.perf_counter() - began

    return window


class ColdIndex:
    """An index that drops each image from the page cache before it is read. Everything else is that of the wrapped index."""

    def __init__(self, index: Index) -> None:
        self._index = index
        shards = [] if index.is_folder else list_shards(index.root, index.split)
        self._shards = {shard.name: shard for shard in shards}

    def __len__(self) -> int:
        return len(self._index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def read(self, i: int) -> bytes:
        """Read image i's bytes from the disk."""
        self.forget(i)
        return self._index.read(i)

    def forget(self, i: int) -> None:
        """Ask the kernel to drop image i's file, or its whole shard, from the page cache."""
        name = self._index.name(i)
        # The name of an image in a shard begins with that of the shard.
        shard = self._shards.get(name.partition("/")[0])
        path = shard or self._index.root / self._index.split / name
        with contextlib.suppress(OSError):  # the next read reports what is wrong with the file
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def endless_loader(config: Config, *, cold: bool = False, cache: DecodeCache | None = None) -> Iterator[Batch]:
    """Start a loader of the config's plan that does not end. cold: drop files from the page cache before they are read.

    cache: cache of decoded images; None: every batch is decoded, whatever the config says."""
    index = open_images(config.data, config.data.train_split, progress=True)
    check_set_size(config, len(index))
    reader: Any = ColdIndex(index) if cold else index
    images = config.data.images_per_step
    device = choose_device(config, Ranks())
    # One rank loads the whole global batch.
    planner = Planner(
        config.views,
        seed=config.seed,
        num_images=len(index),
        images_per_step=images,
        images=ImageRange(0, images),
    )
    loader = ViewLoader(
        reader,
        config.views,
        config.data,
        train_requests(planner),
        batch_size=images,
        device=device,
        first_step=0,
        end_step=1 << 40,
        cache=cache,
        views_dtype=views_dtype(config, device),
    )
    return iter(loader)


def settings_used(config: Config, device: torch.device) -> Setting:
    """Return the settings that determine the loader's speed on this device."""
    data = config.data
    on_gpu = device.type == "cuda"
    used: Setting = {
        # On a GPU 0 stays 0, because it gives DALI fewer threads than there are readers.
        "threads": data.threads if on_gpu else data.threads or own_cores(),
        "prefetch_batches": data.prefetch_batches,
        "read_ahead_steps": data.read_ahead_steps,
    }
    if on_gpu:
        used |= {"hw_decoder_load": data.hw_decoder_load, "decoder_hint": list(data.decoder_hint)}
    return used


def grid(config: Config, device: torch.device) -> list[Setting]:
    """List the settings to try: the config's first, then threads with queue depths, then one other setting at a time."""
    cores = own_cores()
    on_gpu = device.type == "cuda"
    own = settings_used(config, device)
    tried = [own]
    # On a CPU try around the number of cores, on a GPU around DALI's default of 8.
    counts = {4, 8, 16} if on_gpu else {max(1, cores // 2), cores, 2 * cores}
    for threads in sorted(counts):
        tried += [{**own, "threads": threads, "prefetch_batches": depth} for depth in (1, 2, 4)]
    tried += [{**own, "read_ahead_steps": steps} for steps in (1, 6)]
    if on_gpu:
        tried += [{**own, "hw_decoder_load": load} for load in (1.0, 0.9, 0.65)]
    # Keep the first of equal settings.
    return [setting for i, setting in enumerate(tried) if setting not in tried[:i]]


def as_options(setting: Setting) -> str:
    """Format a setting as command-line options: --data.threads 2 ..."""
    options = []
    for name, value in setting.items():
        text = str(value).replace(" ", "")
        options.append(f"--data.{name} {text}")
    return " ".join(options)


def with_setting(config: Config, setting: Setting) -> Config:
    """Return the config with this setting."""
    # JSON has lists, a config tuples.
    data: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in setting.items()}
    return replace(config, data=replace(config.data, **data))


def views_of_step(config: Config) -> int:
    """Return the number of views in a batch."""
    return config.data.images_per_step * config.views.num_views


def loader_sizes(config: Config) -> dict[str, Any]:
    """Return the settings and the machine that were measured, for the head of a result."""
    from nvidia.dali import __version__

    return {
        "warm_up_steps": WARMUP_STEPS,
        "images_per_step": config.data.images_per_step,
        "num_views": config.views.num_views,
        "side": config.views.size,
        "interpolation": config.views.interpolation,
        **provenance(choose_device(config, Ranks())),
        "dali": str(__version__),
    }
