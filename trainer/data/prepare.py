"""Convert an image folder or a published data set to tar shards (WebDataset convention) with an index and class names.

DEST holds SPLIT-000000.tar, ..., SPLIT.index, dataset.json and, if files were skipped, SPLIT.skipped.txt. The same input gives
the same bytes. The images of a split are shuffled once, for programs that read shards in order (this one does not).
"""

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.data.cache_folder import user_cache
from trainer.data.class_list import read_class_list
from trainer.data.index import Index
from trainer.data.index_build import (
    LAYOUT,
    build_folder,
    find_class_names,
    list_class_folders,
    log_skipped,
)
from trainer.data.index_file import write_index
from trainer.data.named_datasets import SETS, ArraySplit, load_split
from trainer.data.shard_writer import Shrink, write_shards
from trainer.data.tar_shards import SHARD_NAME, list_shards
from trainer.errors import InputError
from trainer.files import write_text

SOURCE_INDEX = "source_index"  # folder for temporary indices of the source
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
    """Write SOURCE, an image folder (ROOT/SPLIT/CLASS/IMAGE) or a name in `named_datasets.SETS`, as a prepared set to DEST.

    DEST must be missing or empty, and appears only when it is complete. After an interruption the same call keeps the splits
    that were complete. SPLIT.skipped.txt lists the skipped files.

    splits: the splits to take; None: all.
    max_images: largest number of images of a split, spread evenly over its classes.
    shrink: how to downscale large images; None: store all images byte for byte.
    classes: a file that lists the classes of an image folder to take (`class_list`); None: all.
    Raises InputError before anything is written if the sizes, splits or folders are wrong.
    """
    dest = dest.expanduser().absolute()
    # Check everything that can be wrong before anything is written.
    _check_arguments(source, dest, images_per_shard, shrink, classes)
    max_images = max_images or {}
    splits = _choose_splits(source, splits, max_images)
    download_to = download_dir or user_cache() / "downloads"
    with _partial_folder(dest) as partial:
        # Open all splits first, because their class names must agree.
        sources = {split: _open_source(source, split, partial, download_to, classes, progress) for split in splits}
        names_by_split = {split: images.class_names for split, (images, _) in sources.items()}
        class_names = _common_classes(source, names_by_split)
        counts = {}
        # Write one split after the other; an interruption loses only the current one.
        for split, (images, skipped) in sources.items():
            limit = min(max_images.get(split, len(images)), len(images))
            # A split is complete only if it was written with the same settings.
            settings = json.dumps([_identity(images), class_names, limit, images_per_shard, shrink])
            if not _is_complete(partial, split, settings):
                # Shards, index and mark are written in this order: a split without the mark is written again.
                content = write_shards(
                    images,
                    partial,
                    split=split,
                    class_names=class_names,
                    skipped=skipped,
                    limit=limit,
                    images_per_shard=images_per_shard,
                    shrink=shrink,
                    progress=progress,
                )
                write_index(partial / f"{split}.index", content)
                log_skipped(content, dest / f"{split}.skipped.txt")
                write_text(partial / f"{split}{_COMPLETE}", settings)
            index = Index(partial / f"{split}.index", partial, list_shards(partial, split))
            counts[split] = len(index)
        _write_description(partial / "dataset.json", source, counts, class_names, shrink)


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


def _choose_splits(source: str, splits: Sequence[str] | None, max_images: Mapping[str, int]) -> list[str]:
    """Return the splits to take. Raises InputError if the source has no split of a given name."""
    available = _list_splits(source)
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
        shutil.rmtree(partial / SOURCE_INDEX, ignore_errors=True)
        for temporary in (*partial.glob(f"*{_COMPLETE}"), partial / ".lock"):
            temporary.unlink()
        partial.rename(dest)


def _identity(images: Index | ArraySplit) -> str:
    """Return a text that is equal only for the same images, order and labels."""
    if isinstance(images, Index):
        return images.fingerprint
    content = images.images.tobytes() + images.labels.tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _is_complete(partial: Path, split: str, settings: str) -> bool:
    """Return whether an earlier call completed the split with the same settings; if not, delete its shards."""
    mark = partial / f"{split}{_COMPLETE}"
    if mark.exists() and mark.read_text() == settings:
        _log.info("split %s: an earlier call completed it", split)
        return True
    for remainder in (mark, *list_shards(partial, split)):
        remainder.unlink(missing_ok=True)
    return False


def _list_splits(source: str) -> list[str]:
    """Return the splits of the source. Raises InputError if it is no image folder and no known data set."""
    if source in SETS:
        return list(SETS[source].splits)
    root = Path(source).expanduser()
    if not root.is_dir():
        raise InputError(f"{source}: neither a folder nor a known set ({', '.join(SETS)}); {LAYOUT}")
    # Tell the user about tar shards instead of complaining about missing class folders.
    if any(SHARD_NAME.fullmatch(path.name) for path in root.iterdir()):
        raise InputError(f"{root}: holds tar shards, which can be trained on as they are; prepare takes image folders")
    if not (splits := list_class_folders(root)):
        raise InputError(f"{root}: no folders in it; {LAYOUT}")
    return splits


def _open_source(
    source: str,
    split: str,
    partial: Path,
    download_dir: Path,
    classes: Path | None,
    progress: bool,
) -> tuple[Index | ArraySplit, list[tuple[str, str]]]:
    """Open a split; return its images, and (name, problem) of each file that cannot be used."""
    if source in SETS:
        # A published data set is loaded as arrays and has no files to skip.
        download_dir.mkdir(parents=True, exist_ok=True)
        return load_split(source, split, download_dir), []
    root = Path(source).expanduser()
    listed = None
    if classes is not None:
        listed = read_class_list(classes, find_class_names(root, split))
    # Inspect all files of the split and skip those that are not images.
    content, notes = build_folder(root, split, progress, listed)
    for note in notes:
        _log.warning("%s", note)
    # The index of the source is temporary: it is deleted with the partial folder's other files.
    path = partial / SOURCE_INDEX / f"{split}.index"
    path.parent.mkdir(exist_ok=True)
    write_index(path, content)
    return Index(path, root), content.skipped


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
