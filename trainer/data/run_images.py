"""The images of one run: the index that the run began with, and the cache of decoded images on each node."""

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
    """Open the node's cache of decoded images, or return None if it is not configured.

    Raises InputError if the decoded images do not fit.
    """
    if not config.data.decode_cache_gib:
        return None
    check_cache_size(index, config.data.decode_cache_gib)
    if ranks.is_first:
        _log.info("reserving %.2f GiB of shared memory for decoded images", decoded_bytes(index) / 2**30)
    # All ranks of a node must find the same file, and other jobs on the node must not.
    job = str(os.getpid())
    if ranks.world_size > 1:
        job = job_key() or os.environ.get("MASTER_PORT", "")
    # The name holds user, images and job, so that different runs never share a file by accident.
    path = SHARED_MEMORY / f"wmse_{os.getuid()}_{index.fingerprint}_{job}"
    try:
        # The first rank of each node creates the file; the others open it afterwards.
        cache = one_rank_a_node_first(ranks, lambda: DecodeCache(index, path, create=ranks.local_rank == 0))
        if ranks.world_size > 1:
            # Wait until all ranks have opened the file.
            dist.barrier()
    finally:
        # Unlink the file even if a rank failed, so that the system frees the memory when the processes end.
        if ranks.local_rank == 0:
            with suppress(OSError):  # the first error is the one to report
                path.unlink()
    return cache


def images_of_run(found: Index, config: Config, run_dir: Path, ranks: Ranks) -> Index:
    """Return the images that the run began with, even if files were added to or removed from an image folder since then.

    Ids, order and labels do not change, and missing files are skipped like other images that cannot be used. With
    allow_changes, return `found`, the images that are there now.
    """
    kept = run_dir / "images.index"
    is_resumed = kept.exists() and list_checkpoints(run_dir / "checkpoints")
    if is_resumed and not config.allow_changes:
        # Images may have been added or removed since the first start.
        original = Index(kept, found.root)
        if found.is_folder and original.split == found.split and original.fingerprint != found.fingerprint:
            if ranks.is_first:
                _log.warning(
                    "%s has changed since the run began (%d -> %d images): continuing with those it began with and "
                    "skipping those that are missing. --allow_changes true uses the images that are there now",
                    found.root,
                    len(original),
                    len(found),
                )
            return original
    elif ranks.is_first and found.is_folder:
        # First start: keep a copy of the index for later starts.
        with atomic_write(kept) as file:
            file.write(found.path.read_bytes())
    return found
