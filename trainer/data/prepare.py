"""Convert an image folder or a published data set to tar shards (WebDataset convention) with an index and class names.

DEST holds SPLIT-000000.tar, ..., SPLIT.index, dataset.json and, if files were skipped, SPLIT.skipped.txt. The same input gives
the same bytes. The images of a split are shuffled once, for programs that read shards in order (this one does not).
"""

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.data.cache_folder import user_cache
from trainer.data.index import Index
from trainer.data.index_build import log_skipped
from trainer.data.index_file import write_index
from trainer.data.named_datasets import SETS
from trainer.data.shard_writer import Shrink, write_shards
from trainer.data.sources import OpenedSplit, find_source
from trainer.data.tar_shards import list_shards
from trainer.errors import InputError
from trainer.files import write_text

SCRATCH = "source_index"  # folder for temporary indices of the source, and for archives that have to be uncompressed
_COMPLETE = ".complete"  # suffix of the file that records the settings of a complete split

_log = logging.getLogger(__name__)


def prepare(
    source: str,
    dest: Path,
    *,
    splits: Sequence[str] | None = None,
    max_images: Mapping[str, int] | None = None,
    images_per_shard: int = 10_000,
    shrink: Shrink | None = None,
    classes: Path | None = None,
    download_dir: Path | None = None,
    progress: bool = True,
) -> None:
    """Write SOURCE as a prepared set to DEST: a name in `named_datasets.SETS`, or a path that `sources` recognises.

    DEST must be missing or empty, and appears only when it is complete. After an interruption the same call keeps the splits
    that were complete. SPLIT.skipped.txt lists the skipped files.

    splits: the splits to take; None: all.
    max_images: largest number of images of a split, spread evenly over its classes.
    shrink: how to downscale large images; None: store all images byte for byte.
    classes: a file that lists the classes to take (`class_list`), not for a set given by name; None: all.
    Raises InputError before anything is written if the sizes, splits or folders are wrong.
    """
    dest = dest.expanduser().absolute()
    # Check everything that can be wrong before anything is written.
    _check_arguments(source, dest, images_per_shard, shrink, classes)
    max_images = max_images or {}
    download_dir = download_dir or user_cache() / "downloads"
    found = find_source(source, dest, classes, download_dir, progress)
    splits = _choose_splits(source, found.splits, splits, max_images)
    with _partial_folder(dest) as partial:
        scratch = partial / SCRATCH
        scratch.mkdir(exist_ok=True)
        # Open all splits first, because their class names must agree.
        sources = {split: found.open_split(split, scratch) for split in splits}
        names_by_split = {split: images.class_names for split, (images, _) in sources.items()}
        class_names = _common_classes(source, names_by_split)
        counts = {}
        # Write one split after the other; an interruption loses only the current one.
        for split, opened in sources.items():
            num_images = len(opened.images)
            _write_split(
                opened,
                partial,
                split,
                dest=dest,
                class_names=class_names,
                limit=min(max_images.get(split, num_images), num_images),
                images_per_shard=images_per_shard,
                shrink=shrink,
                progress=progress,
            )
            index = Index(partial / f"{split}.index", partial, list_shards(partial, split))
            counts[split] = len(index)
        _write_description(partial / "dataset.json", source, counts, class_names, shrink)


def _write_split(
    opened: OpenedSplit,
    partial: Path,
    split: str,
    *,
    dest: Path,
    class_names: list[str],
    limit: int,
    images_per_shard: int,
    shrink: Shrink | None,
    progress: bool,
) -> None:
    """Write shards and index of a split to the folder `partial`, unless an earlier call has completed it.

    dest: the final name of that folder, for messages. limit: number of images to write. The others are as for `prepare`.
    """
    # A split is complete only if it was written with the same settings.
    settings = json.dumps([opened.images.fingerprint, class_names, limit, images_per_shard, shrink])
    if _is_complete(partial, split, settings):
        return
    # Shards, index and mark are written in this order: a split without the mark is written again.
    content = write_shards(
        opened.images,
        partial,
        split=split,
        class_names=class_names,
        skipped=opened.skipped,
        limit=limit,
        images_per_shard=images_per_shard,
        shrink=shrink,
        progress=progress,
    )
    write_index(partial / f"{split}.index", content)
    log_skipped(content, dest / f"{split}.skipped.txt")
    write_text(partial / f"{split}{_COMPLETE}", settings)


def _write_description(
    path: Path,
    source: str,
    counts: dict[str, int],
    class_names: list[str],
    shrink: Shrink | None,
) -> None:
    """Write dataset.json, which holds the class names for programs that read the shards without the index."""
    description: dict[str, Any] = {
        "source": Path(source).name,
        "images": counts,
        "class_names": class_names,
    }
    if shrink is not None:
        description |= shrink._asdict()
    # JSON in ASCII, because the names need not be UTF-8.
    write_text(path, json.dumps(description, indent=1) + "\n")


def _choose_splits(
    source: str,
    available: list[str],
    splits: Sequence[str] | None,
    max_images: Mapping[str, int],
) -> list[str]:
    """Return the splits to take. Raises InputError if the source has no split of a given name."""
    chosen = list(splits) if splits else available
    if unknown := sorted({*chosen, *max_images} - set(available)):
        raise InputError(f"{source}: no split {', '.join(unknown)}; it has {', '.join(available)}")
    return chosen


def _check_arguments(
    source: str,
    dest: Path,
    images_per_shard: int,
    shrink: Shrink | None,
    classes: Path | None,
) -> None:
    """Raise InputError if DEST is not empty or an argument is out of range."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise InputError(f"{dest}: is not empty; give a new folder, or remove it first")
    if shrink is not None:
        max_side, quality = shrink
        if max_side < 8 or not 1 <= quality <= 100:
            raise InputError(
                f"max_side is {max_side} and quality {quality}: max_side must be at least 8 pixels and quality between 1 and "
                "100"
            )
    if images_per_shard < 1:
        raise InputError(f"images_per_shard is {images_per_shard}, but must be at least 1")
    if classes is not None and source in SETS:
        raise InputError(f"--classes is for image folders, not for {source}: all its classes are taken")


@contextmanager
def _partial_folder(dest: Path) -> Iterator[Path]:
    """Yield the folder in which DEST is written, and rename it to DEST after the block.

    After an error the folder is deleted, unless it holds complete splits. Raises InputError if another process uses it.
    """
    partial = dest.with_name(f".{dest.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    # A lock file keeps two processes from writing the same data set.
    with (partial / ".lock").open("wb") as lock:
        try:
            # The system releases the lock when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{dest}: another `wmse prepare` is writing it: wait for it, or give another folder"
            ) from error
        try:
            yield partial
        except BaseException:
            # Keep what took long to write.
            if any(partial.glob(f"*{_COMPLETE}")):
                _log.warning("the complete splits stay in %s: the same command continues with them", partial)
            else:
                shutil.rmtree(partial)
            raise
        # DEST is complete: remove what only an interrupted call would need.
        shutil.rmtree(partial / SCRATCH, ignore_errors=True)
        for temporary in (*partial.glob(f"*{_COMPLETE}"), partial / ".lock"):
            temporary.unlink()
        partial.rename(dest)


def _is_complete(partial: Path, split: str, settings: str) -> bool:
    """Return whether an earlier call completed the split with the same settings; if not, delete its shards."""
    mark = partial / f"{split}{_COMPLETE}"
    if mark.exists() and mark.read_text() == settings:
        _log.info("split %s: an earlier call completed it", split)
        return True
    for remainder in (mark, *list_shards(partial, split, exact=True)):
        remainder.unlink(missing_ok=True)
    return False


def _common_classes(source: str, names_by_split: dict[str, list[str]]) -> list[str]:
    """Return the class names that all splits with classes share. Raises InputError if they differ.

    They can differ only if the split train has no class folders.
    """
    with_classes = [names for names in names_by_split.values() if names]
    if not with_classes:
        return []
    class_names = with_classes[0]
    # Labels are numbers of classes, so all splits must count the same classes.
    if any(names != class_names for names in with_classes):
        splits = ", ".join(names_by_split)
        raise InputError(
            f"{source}: the split train has no class folders, so all others need the same ones, but they differ: {splits}"
        )
    return class_names
