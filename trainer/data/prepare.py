"""Image folder or published set -> tar shards (WebDataset convention) with index and class names.

DEST holds SPLIT-000000.tar, ..., SPLIT.index, dataset.json and, where files were left out, SPLIT.bad.txt. The same input gives
the same bytes. Within a split the images are shuffled once, for programs that read shards in order (this one does not).
"""

import fcntl
import hashlib
import io
import itertools
import json
import logging
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainer.data.formats import decode_rgb, inspect_image, to_direct
from trainer.data.index import Index, user_cache
from trainer.data.index_build import LAYOUT, READ_THREADS, build_folder, list_class_folders, log_left_out
from trainer.data.index_file import IndexContent, write_index
from trainer.data.sets import SETS, ArraySplit, load_split
from trainer.data.shards import build_shards, list_shards
from trainer.errors import InputError, refuse_machine_fault
from trainer.files import write_text
from trainer.progress import with_progress

SHUFFLE_SEED = 0
READ_AHEAD = 256  # images held in memory between the readers and the tar
SOURCE_INDEX = "source_index"
_COMPLETE = ".complete"  # ending of the file that says by which recipe a split was written

_log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One image as it goes into a tar: KEY.SUFFIX with its bytes, and its label."""

    key: str
    suffix: str
    data: bytes
    label: int


class Shrink(NamedTuple):
    """Pictures with a side above `max_side` pixels are made smaller, keeping their shape, and stored as JPEG of `quality`."""

    max_side: int
    quality: int = 90


def prepare(
    source: str,
    dest: Path,
    *,
    splits: Sequence[str] | None = None,
    max_images: Mapping[str, int] | None = None,
    images_per_shard: int = 10_000,
    shrink: Shrink | None = None,
    download_dir: Path | None = None,
    progress: bool = True,
) -> None:
    """Write SOURCE, an image folder (ROOT/SPLIT/CLASS/IMAGE) or a name in `sets.SETS`, as a prepared set to DEST.

    splits: which to take, else all. max_images: at most so many of a split, spread evenly over its classes. shrink: what is
    done to large pictures; None: all are stored byte for byte. DEST must be missing or empty and appears only when complete;
    a start that was ended goes on with the splits that it had completed. Bad files are named in SPLIT.bad.txt. Raises
    InputError, before anything is written where the sizes, splits or folders can't be right.
    """
    dest = dest.expanduser().absolute()
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise InputError(f"{dest}: is not empty; name a new folder, or remove it first")
    if shrink is not None and (shrink.max_side < 8 or not 1 <= shrink.quality <= 100):
        raise InputError(
            f"max_side is {shrink.max_side} and quality {shrink.quality}: a side has at least 8 pixels, a quality is 1 to 100"
        )
    if images_per_shard < 1:
        raise InputError(f"images_per_shard is {images_per_shard}, must be at least 1")
    available = _list_splits(source)
    splits = list(splits) if splits else available
    if unknown := sorted({*splits, *(max_images or {})} - set(available)):
        raise InputError(f"{source}: no split {', '.join(unknown)}; it has {', '.join(available)}")
    with _partial_folder(dest) as partial:
        sources = {}
        for split in splits:
            download_to = download_dir or user_cache() / "downloads"
            sources[split] = _open_source(source, split, partial, download_to, progress)
        class_names = _agree(source, {split: images.class_names for split, (images, _) in sources.items()})
        counts = {}
        for split, (images, bad) in sources.items():
            limit = min((max_images or {}).get(split, len(images)), len(images))
            recipe = json.dumps([_identity(images), class_names, limit, images_per_shard, shrink])
            if not _is_complete(partial, split, recipe):
                content = _write_shards(
                    images, class_names, bad, split, limit, partial, images_per_shard, shrink, progress
                )
                write_index(partial / f"{split}.index", content)
                log_left_out(content, dest / f"{split}.bad.txt")
                write_text(partial / f"{split}{_COMPLETE}", recipe)
            counts[split] = len(Index(partial / f"{split}.index", partial, list_shards(partial, split)))
        description = {"source": Path(source).name, "images": counts, "class_names": class_names}
        if shrink is not None:
            description |= shrink._asdict()
        write_text(partial / "dataset.json", json.dumps(description, indent=1) + "\n")  # ASCII: names need not be UTF-8


@contextmanager
def _partial_folder(dest: Path) -> Iterator[Path]:
    """Where DEST is written; it becomes DEST when the block has run. Splits that are complete outlive an error."""
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
                _log.warning("the splits that are complete stay in %s: the same command goes on with them", partial)
            else:
                shutil.rmtree(partial)
            raise
        shutil.rmtree(partial / SOURCE_INDEX, ignore_errors=True)
        for left in (*partial.glob(f"*{_COMPLETE}"), partial / ".lock"):
            left.unlink()
        partial.rename(dest)


def _identity(images: Index | ArraySplit) -> str:
    """Equal only for the same images, order and labels."""
    if isinstance(images, Index):
        return images.fingerprint
    return hashlib.blake2b(images.images.tobytes() + images.labels.tobytes(), digest_size=16).hexdigest()


def _is_complete(partial: Path, split: str, recipe: str) -> bool:
    """Whether an earlier start wrote the split by the same recipe; if not, what it left of the split is removed."""
    mark = partial / f"{split}{_COMPLETE}"
    if mark.exists() and mark.read_text() == recipe:
        _log.info("split %s: complete since an earlier start", split)
        return True
    for left in (mark, *list_shards(partial, split)):
        left.unlink(missing_ok=True)
    return False


def choose_images(labels: npt.NDArray[np.int32], limit: int) -> npt.NDArray[np.int64]:
    """Shuffled ids of at most `limit` images, of every class equally many where it has them.

    (n,) labels -> (min(n, limit),) ids. Raw Philox output is sorted, since numpy's own shuffles may change between versions.
    """
    order = np.argsort(np.random.Philox(SHUFFLE_SEED).random_raw(len(labels)), kind="stable")
    by_class = np.argsort(labels[order], kind="stable")
    sorted_labels = labels[order][by_class]
    rank_in_class = np.empty(len(labels), np.int64)
    rank_in_class[by_class] = np.arange(len(labels)) - np.searchsorted(sorted_labels, sorted_labels)
    return order[np.sort(np.argsort(rank_in_class, kind="stable")[:limit])]


def _list_splits(source: str) -> list[str]:
    if source in SETS:
        return list(SETS[source].splits)
    root = Path(source).expanduser()
    if not root.is_dir():
        raise InputError(f"{source}: neither a folder nor a known set ({', '.join(SETS)}); {LAYOUT}")
    if not (splits := list_class_folders(root)):
        raise InputError(f"{root}: no folders in it; {LAYOUT}")
    return splits


def _open_source(
    source: str, split: str, partial: Path, download_dir: Path, progress: bool
) -> tuple[Index | ArraySplit, list[tuple[str, str]]]:
    """The images, and (name, problem) of the files that are none."""
    if source in SETS:
        download_dir.mkdir(parents=True, exist_ok=True)
        return load_split(source, split, download_dir), []
    root = Path(source).expanduser()
    content, notes = build_folder(root, split, progress)
    for note in notes:
        _log.warning("%s", note)
    path = partial / SOURCE_INDEX / f"{split}.index"
    path.parent.mkdir(exist_ok=True)
    write_index(path, content)
    return Index(path, root), content.bad


def _write_shards(
    images: Index | ArraySplit,
    class_names: list[str],
    bad: list[tuple[str, str]],
    split: str,
    limit: int,
    folder: Path,
    images_per_shard: int,
    shrink: Shrink | None,
    progress: bool,
) -> IndexContent:
    """Write one split's shards; returns the content of their index, `bad` and what was found bad here included."""
    bad = list(bad)
    samples = _read_samples(images, choose_images(images.labels, limit).tolist(), shrink, bad)
    numbered = enumerate(with_progress(samples, limit, f"write {split}", progress))
    for number, shard in itertools.groupby(numbered, lambda item: item[0] // images_per_shard):
        with tarfile.open(folder / f"{split}-{number:06d}.tar", "w", encoding="utf-8") as tar:
            for _, sample in shard:
                _add_member(tar, f"{sample.key}.{sample.suffix}", sample.data)
                _add_member(tar, f"{sample.key}.cls", str(sample.label).encode())
    if not (shards := list_shards(folder, split)):
        raise InputError(f"split {split}: none of its images can be used; the first: {': '.join(bad[0])}")
    content, _ = build_shards(shards, split, class_names, progress)
    content.bad = bad
    return content


def _read_samples(
    images: Index | ArraySplit, ids: list[int], shrink: Shrink | None, bad: list[tuple[str, str]]
) -> Iterator[Sample]:
    """The usable images in the order of `ids`, read by threads; the others are appended to `bad`."""
    keys: set[str] = set()
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for start in range(0, len(ids), READ_AHEAD):
            window = ids[start : start + READ_AHEAD]
            for i, (data, suffix, problem) in zip(
                window, pool.map(lambda i: _read_image(images, i, shrink), window), strict=True
            ):
                if problem:
                    bad.append((images.name(i), problem))
                else:
                    yield Sample(_new_key(images.name(i), keys), suffix, data, int(images.labels[i]))


def _read_image(images: Index | ArraySplit, i: int, shrink: Shrink | None) -> tuple[bytes, str, str]:
    """(bytes for the tar, suffix, problem) of image i."""
    try:
        data = images.read(i)
        info = inspect_image(data)
        if shrink is not None and info.kind != "bad" and max(info.height, info.width) > shrink.max_side:
            return shrunk_jpeg(data, shrink), "jpg", ""
        if info.kind == "convert":
            return to_direct(data), "png", ""
    except OSError as error:
        refuse_machine_fault(error)
        return b"", "", str(error)
    except InputError as error:
        return b"", "", str(error)
    return data, "jpg" if info.format == "JPEG" else "png", info.problem


def shrunk_jpeg(data: bytes, shrink: Shrink) -> bytes:
    """The picture with its longer side at max_side (Lanczos), as JPEG without EXIF. Raises InputError for damaged bytes."""
    picture = decode_rgb(data)
    factor = shrink.max_side / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    jpeg = io.BytesIO()
    picture.resize(size, Image.Resampling.LANCZOS).save(jpeg, "JPEG", quality=shrink.quality)
    return jpeg.getvalue()


def _new_key(name: str, keys: set[str]) -> str:
    """The file's base name without suffix, made unique; dots end a key in the WebDataset convention."""
    base = name.rpartition("/")[2]
    stem = (base.rpartition(".")[0] or base).replace(".", "_")
    key = stem
    while key in keys:
        key = f"{stem}_{len(keys)}"
        stem = key
    keys.add(key)
    return key


def _add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # owner and time stay 0: the same input gives the same bytes
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _agree(source: str, names_by_split: dict[str, list[str]]) -> list[str]:
    """The one list of class names of all splits that have classes (lists differ only where train has none to give)."""
    with_classes = [names for names in names_by_split.values() if names]
    if any(names != with_classes[0] for names in with_classes):
        splits = ", ".join(names_by_split)
        raise InputError(
            f"{source}: its split train has no class folders, so all others need the same ones, but they differ: {splits}"
        )
    return with_classes[0] if with_classes else []
