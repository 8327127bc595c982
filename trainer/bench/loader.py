"""Measure how many views a second the loader makes, alone: from a cold and a warm page cache, and over its settings."""

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
from trainer.distributed.device import choose_device
from trainer.distributed.geometry import check_set_size
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.run.machine import provenance

WARMUP_STEPS = 3
WINDOWS = 5
SWEEP_WINDOWS = 3
CACHES = {
    "cold": "before each read the kernel is asked to forget the file's (or the shard's) pages: posix_fadvise DONTNEED, which "
    "needs no rights; pages being written, caches of a disk or a file server, and files in memory (tmpfs) stay",
    "warm": "as they come: in the page cache where the set fits, since the cold windows have read it or these have",
}
Loaders = Mapping[str, Callable[[], Iterator[Any]]]  # name -> a function that starts a loader
Setting = dict[str, Any]  # field of config.data -> value


def bench_loader(config: Config, seconds: float) -> dict[str, Any]:
    """Measure windows from a cold page cache, then as many from a warm one, in about `seconds`, starts and warm-up not counted.

    "views_per_s" and "windows" are those of the warm cache."""
    figures: dict[str, dict[str, Any]] = {}
    for cache in CACHES:
        loader = {cache: partial(endless_loader, config, cold=cache == "cold")}
        figures |= compare_loaders(loader, views_of_step(config), seconds / len(CACHES))
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
    """Measure every setting of `grid` in turns, in about `seconds`, starts and warm-up not counted.

    "best" is the setting with the largest median, as options; "clearly_better" is whether its lower quartile is above the upper
    one of the config's own setting."""
    settings = {as_options(setting): setting for setting in grid(config, choose_device(config, Ranks()))}
    loaders = {name: partial(endless_loader, with_setting(config, each)) for name, each in settings.items()}
    figures = compare_loaders(loaders, views_of_step(config), seconds, SWEEP_WINDOWS)
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
    """Return the views a second of each loader, in windows that alternate. views: of a batch.

    A loader lives in its own windows only, so that none works ahead in another's."""
    timers = {name: _window(start) for name, start in loaders.items()}
    samples = interleave(timers, seconds, num_windows=windows, warm_up=False)
    rates = {name: [views / each for each in values] for name, values in samples.items()}
    return {name: {**spread(values), "samples": values} for name, values in rates.items()}


def _window(start: Callable[[], Iterator[Any]]) -> Window:
    """Start a loader, leave the first batches out, and time `calls` batches."""

    def window(calls: int) -> float:
        batches = start()
        for _ in range(WARMUP_STEPS):
            next(batches)
        began = time.perf_counter()
        for _ in range(calls):
            batch = next(batches)
            if isinstance(batch, Batch) and batch.views.is_cuda:
                # not the whole device: DALI works on coming batches in streams of its own
                torch.cuda.current_stream(batch.views.device).synchronize()
        return time.perf_counter() - began

    return window


class ColdIndex:
    """An index whose reads find nothing in the page cache. Everything else is the index's own."""

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
        path = self._shards.get(name.partition("/")[0]) or self._index.root / self._index.split / name
        with contextlib.suppress(OSError):  # the read that follows says what is wrong with the file
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def endless_loader(config: Config, *, cold: bool = False, cache: DecodeCache | None = None) -> Iterator[Batch]:
    """Start a loader of the config's plan that does not end. cold: with files that are not in the page cache.

    cache: of decoded images; None: each batch is decoded, whatever the config says."""
    index = open_images(config.data, config.data.train_split, progress=True)
    check_set_size(config, len(index))
    reader: Any = ColdIndex(index) if cold else index
    images = config.data.images_per_step
    planner = Planner(
        config.views, seed=config.seed, num_images=len(index), images_per_step=images, images=ImageRange(0, images)
    )
    return iter(
        ViewLoader(
            reader,
            config.views,
            config.data,
            train_requests(planner),
            batch_size=images,
            device=choose_device(config, Ranks()),
            first_step=0,
            end_step=1 << 40,
            cache=cache,
        )
    )


def settings_used(config: Config, device: torch.device) -> Setting:
    """Return the settings that decide a loader's speed on this device."""
    data, on_gpu = config.data, device.type == "cuda"
    used: Setting = {
        # no one number stands for a GPU's 0, which gives DALI fewer threads than readers
        "threads": data.threads if on_gpu else data.threads or own_cores(),
        "prefetch_batches": data.prefetch_batches,
        "read_ahead_steps": data.read_ahead_steps,
    }
    if on_gpu:
        used |= {"hw_decoder_load": data.hw_decoder_load, "decoder_hint": list(data.decoder_hint)}
    return used


def grid(config: Config, device: torch.device) -> list[Setting]:
    """List the settings to try, the config's own first: threads with queue depths, then one other at a time."""
    cores, on_gpu = own_cores(), device.type == "cuda"
    own = settings_used(config, device)
    tried = [own]
    for threads in sorted({4, 8, 16} if on_gpu else {max(1, cores // 2), cores, 2 * cores}):
        tried += [{**own, "threads": threads, "prefetch_batches": depth} for depth in (1, 2, 4)]
    tried += [{**own, "read_ahead_steps": steps} for steps in (1, 6)]
    if on_gpu:
        tried += [{**own, "hw_decoder_load": load} for load in (1.0, 0.9, 0.65)]
    return [setting for i, setting in enumerate(tried) if setting not in tried[:i]]


def as_options(setting: Setting) -> str:
    """Write a setting as it is typed: --data.threads 2 ..."""
    return " ".join(f"--data.{name} {str(value).replace(' ', '')}" for name, value in setting.items())


def with_setting(config: Config, setting: Setting) -> Config:
    """Return the config with this setting."""
    data: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in setting.items()}
    return replace(config, data=replace(config.data, **data))


def views_of_step(config: Config) -> int:
    """Return the number of views of a batch."""
    return config.data.images_per_step * config.views.num_views


def loader_sizes(config: Config) -> dict[str, Any]:
    """Return what was measured, for the head of a result."""
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
