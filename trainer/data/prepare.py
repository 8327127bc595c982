"""Turn an image folder or a published set into tar shards (WebDataset convention) with index and class names.

DEST holds SPLIT-000000.tar, ..., SPLIT.index, dataset.json and, where files were left out, SPLIT.bad.txt. The same input gives
the same bytes. Within a split the images are shuffled once, for programs that read shards in order (this one does not).
"""

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.data.cache_folder import user_cache
from trainer.data.class_list import read_class_list
from trainer.data.index import Index
from trainer.data.index_build import (
    LAYOUT,
    build_folder,
    find_class_names,
    list_class_folders,
    log_left_out,
)
from trainer.data.index_file import write_index
from trainer.data.named_datasets import SETS, ArraySplit, load_split
from trainer.data.shard_writer import Shrink, write_shards
from trainer.data.tar_shards import SHARD_NAME, list_shards
from trainer.errors import InputError
from trainer.files import write_text

SOURCE_INDEX = "source_index"
_COMPLETE = ".complete"  # suffix of the file that records the settings with which a split was written

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
    """Write SOURCE, an image folder (ROOT/SPLIT/CLASS/IMAGE) or a name in `sets.SETS`, as a prepared set to DEST.

    splits: which to take; None: all. max_images: largest number of images of a split, spread evenly over its classes. shrink:
    how to shrink large images; None: store all byte for byte. classes: a file that lists the only classes of an image folder to
    take (`class_list`). DEST must be missing or empty and appears only when complete; after an interruption the same call keeps
    the splits that were complete. SPLIT.bad.txt lists the bad files. Raises InputError before anything is written if the sizes,
    splits or folders are wrong.
    """
    dest = dest.expanduser().absolute()
    _check_arguments(source, dest, images_per_shard, shrink, classes)
    available = _list_splits(source)
    splits = list(splits) if splits else available
    if unknown := sorted({*splits, *(max_images or {})} - set(available)):
        raise InputError(f"{source}: no split {', '.join(unknown)}; it has {', '.join(available)}")
    download_to = download_dir or user_cache() / "downloads"
    with _partial_folder(dest) as partial:
        sources = {split: _open_source(source, split, partial, download_to, classes, progress) for split in splits}
        class_names = _agree(source, {split: images.class_names for split, (images, _) in sources.items()})
        counts = {}
        for split, (images, bad) in sources.items():
            limit = min((max_images or {}).get(split, len(images)), len(images))
            recipe = json.dumps([_identity(images), class_names, limit, images_per_shard, shrink])
            if not _is_complete(partial, split, recipe):
                content = write_shards(
                    images,
                    partial,
                    split=split,
                    class_names=class_names,
                    bad=bad,
                    limit=limit,
                    images_per_shard=images_per_shard,
                    shrink=shrink,
                    progress=progress,
                )
                write_index(partial / f"{split}.index", content)
                log_left_out(content, dest / f"{split}.bad.txt")
                write_text(partial / f"{split}{_COMPLETE}", recipe)
            counts[split] = len(Index(partial / f"{split}.index", partial, list_shards(partial, split)))
        description = {"source": Path(source).name, "images": counts, "class_names": class_names}
        if shrink is not None:
            description |= shrink._asdict()
        write_text(partial / "dataset.json", json.dumps(description, indent=1) + "\n")  # ASCII: names need not be UTF-8


def _check_arguments(
    source: str, dest: Path, images_per_shard: int, shrink: Shrink | None, classes: Path | None
) -> None:
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise InputError(f"{dest}: is not empty; name a new folder, or remove it first")
    if shrink is not None and (shrink.max_side < 8 or not 1 <= shrink.quality <= 100):
        raise InputError(
            f"max_side is {shrink.max_side} and quality {shrink.quality}: max_side must be at least 8 pixels, quality 1 to 100"
        )
    if images_per_shard < 1:
        raise InputError(f"images_per_shard is {images_per_shard}, must be at least 1")
    if classes is not None and source in SETS:
        raise InputError(f"--classes is for image folders, not for {source}, whose classes are all taken")


@contextmanager
def _partial_folder(dest: Path) -> Iterator[Path]:
    """Yield the folder in which DEST is written; rename it to DEST after the block. Complete splits survive an error."""
    partial = dest.with_name(f".{dest.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{dest}: another `wmse prepare` is writing it: wait for it, or name another folder"
            ) from error
        try:
            yield partial
        except BaseException:
            if any(partial.glob(f"*{_COMPLETE}")):
                _log.warning("the completed splits stay in %s: the same command continues with them", partial)
            else:
                shutil.rmtree(partial)
            raise
        shutil.rmtree(partial / SOURCE_INDEX, ignore_errors=True)
        for left in (*partial.glob(f"*{_COMPLETE}"), partial / ".lock"):
            left.unlink()
        partial.rename(dest)


def _identity(images: Index | ArraySplit) -> str:
    """Return a text that is equal only for the same images, order and labels."""
    if isinstance(images, Index):
        return images.fingerprint
    return hashlib.blake2b(images.images.tobytes() + images.labels.tobytes(), digest_size=16).hexdigest()


def _is_complete(partial: Path, split: str, recipe: str) -> bool:
    """Whether an earlier start completed the split with the same recipe; if not, remove what it left of the split."""
    mark = partial / f"{split}{_COMPLETE}"
    if mark.exists() and mark.read_text() == recipe:
        _log.info("split %s: completed by an earlier start", split)
        return True
    for left in (mark, *list_shards(partial, split)):
        left.unlink(missing_ok=True)
    return False


def _list_splits(source: str) -> list[str]:
    if source in SETS:
        return list(SETS[source].splits)
    root = Path(source).expanduser()
    if not root.is_dir():
        raise InputError(f"{source}: neither a folder nor a known set ({', '.join(SETS)}); {LAYOUT}")
    if any(SHARD_NAME.fullmatch(path.name) for path in root.iterdir()):
        raise InputError(f"{root}: holds tar shards, which can be trained on as they are; prepare takes image folders")
    if not (splits := list_class_folders(root)):
        raise InputError(f"{root}: no folders in it; {LAYOUT}")
    return splits


def _open_source(
    source: str, split: str, partial: Path, download_dir: Path, classes: Path | None, progress: bool
) -> tuple[Index | ArraySplit, list[tuple[str, str]]]:
    """Open a split: its images, and (name, problem) of each file that can't be used."""
    if source in SETS:
        download_dir.mkdir(parents=True, exist_ok=True)
        return load_split(source, split, download_dir), []
    root = Path(source).expanduser()
    listed = None if classes is None else read_class_list(classes, find_class_names(root, split))
    content, notes = build_folder(root, split, progress, listed)
    for note in notes:
        _log.warning("%s", note)
    path = partial / SOURCE_INDEX / f"{split}.index"
    path.parent.mkdir(exist_ok=True)
    write_index(path, content)
    return Index(path, root), content.bad


def _agree(source: str, names_by_split: dict[str, list[str]]) -> list[str]:
    """Return the one list of class names of all splits that have classes; the lists can differ only if train has none."""
    with_classes = [names for names in names_by_split.values() if names]
    if any(names != with_classes[0] for names in with_classes):
        splits = ", ".join(names_by_split)
        raise InputError(
            f"{source}: the split train has no class folders, so all others need the same ones, but they differ: {splits}"
        )
    return with_classes[0] if with_classes else []
