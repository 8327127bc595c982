"""The images of one run: those that it began with, and the memory of a node that keeps them decoded."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from trainer.config.schema import Config
from trainer.data.decode_cache import SHARED_MEMORY, DecodeCache, check_cache_size, decoded_bytes
from trainer.data.index import Index
from trainer.distributed.process_group import one_rank_a_node_first
from trainer.distributed.ranks import Ranks, job_key
from trainer.files import atomic_write
from trainer.run.checkpoint_files import list_checkpoints

_log = logging.getLogger(__name__)


def open_cache(config: Config, index: Index, ranks: Ranks) -> DecodeCache | None:
    """Open the node's memory for decoded images, if the settings ask for it. Raises InputError if the set does not fit."""
    if not config.data.decode_cache_gib:
        return None
    check_cache_size(index, config.data.decode_cache_gib)
    if ranks.is_first:
        _log.info("reserving %.2f GiB of shared memory for decoded images", decoded_bytes(index) / 2**30)
    job = (job_key() or os.environ.get("MASTER_PORT", "")) if ranks.world_size > 1 else str(os.getpid())
    path = SHARED_MEMORY / f"wmse_{os.getuid()}_{index.fingerprint}_{job}"
    try:
        cache = one_rank_a_node_first(ranks, lambda: DecodeCache(index, path, create=ranks.local_rank == 0))
        if ranks.world_size > 1:
            dist.barrier()
    finally:
        if ranks.local_rank == 0:  # also where another rank failed: no memory is left behind
            with suppress(OSError):  # the first error is the one to report
                path.unlink()
    return cache


def images_of_run(found: Index, config: Config, run_dir: Path, ranks: Ranks) -> Index:
    """Return the images that the run began with, even if files of an image folder were added or removed since.

    Ids, order and labels stay, and missing files are replaced like other unusable images. allow_changes takes those found
    now."""
    kept = run_dir / "images.index"
    if kept.exists() and list_checkpoints(run_dir / "checkpoints") and not config.allow_changes:
        begun = Index(kept, found.root)
        if found.is_folder and begun.split == found.split and begun.fingerprint != found.fingerprint:
            if ranks.is_first:
                _log.warning(
                    "%s has changed since the run began (%d -> %d images): continuing with those it began with and "
                    "replacing those that are missing. --allow_changes true takes what is there now",
                    found.root,
                    len(begun),
                    len(found),
                )
            return begun
    elif ranks.is_first and found.is_folder:
        with atomic_write(kept) as file:
            file.write(found.path.read_bytes())
    return found
