"""Batches for the benchmarks of the loader: endless, from a cold page cache or as they come, and how fast they come."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from trainer.bench.timing import spread
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

WARMUP_STEPS = 3
Loaders = dict[str, Callable[[], Iterator[Any]]]  # name -> a function that starts it


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
        """Image i's bytes, from the disk."""
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
    """Batch after batch of the config's plan, for as long as asked; cold: from files that are not in the page cache. cache: of
    decoded images; None: each batch is decoded, whatever the config says."""
    index = open_images(config.data, config.data.train_split, progress=True)
    check_set_size(config, len(index))
    images = config.data.images_per_step
    planner = Planner(
        config.views, seed=config.seed, num_images=len(index), images_per_step=images, images=ImageRange(0, images)
    )
    return iter(
        ViewLoader(
            cast(Index, ColdIndex(index)) if cold else index,
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


def dali_version() -> str:
    """Of the DALI that the loader runs on."""
    from nvidia.dali import __version__

    return str(__version__)


def settings_used(config: Config, device: torch.device) -> dict[str, Any]:
    """Those that decide a loader's speed on this device."""
    data, on_gpu = config.data, device.type == "cuda"
    used: dict[str, Any] = {
        # no one number stands for a GPU's 0, which gives DALI fewer threads than readers
        "threads": data.threads if on_gpu else data.threads or own_cores(),
        "prefetch_batches": data.prefetch_batches,
        "read_ahead_steps": data.read_ahead_steps,
    }
    if on_gpu:
        used |= {"hw_decoder_load": data.hw_decoder_load, "decoder_hint": list(data.decoder_hint)}
    return used


def warm_up(batches: Iterator[Any]) -> None:
    """Take the batches that are left out: threads start and memory is allocated."""
    for _ in range(WARMUP_STEPS):
        next(batches)


def measure(batches: Iterator[Any], views_per_batch: int, seconds: float) -> float:
    """Views a second over at least `seconds`."""
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        batch = next(batches)
        if isinstance(batch, Batch) and batch.views.is_cuda:
            # not the whole device: DALI works on coming batches in streams of its own
            torch.cuda.current_stream(batch.views.device).synchronize()
        count += views_per_batch
    return count / elapsed


def in_turns(made: Loaders, views: int, seconds: float, rounds: int = 5) -> dict[str, dict[str, Any]]:
    """Views a second of each loader: so many windows of each, `seconds` in all, starts and warm-up on top. A loader lives in
    its own windows only, so that none works ahead in another's."""
    rates: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, make in made.items():
            batches = make()
            warm_up(batches)
            rates[name].append(measure(batches, views, seconds / rounds / len(made)))
            del batches  # ends its threads
    return {name: {**spread(values), "samples": values} for name, values in rates.items()}
