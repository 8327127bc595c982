"""Write one split as tar shards: which images, in which order, and the bytes of each."""

import io
import itertools
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainer.config.schema import DataConfig
from trainer.data.image_probe import decode_rgb, inspect_image, to_direct
from trainer.data.index import Index
from trainer.data.index_build import READ_THREADS
from trainer.data.index_file import IndexContent
from trainer.data.named_datasets import ArraySplit
from trainer.data.tar_shards import build_shards, list_shards
from trainer.errors import InputError
from trainer.files import refuse_machine_fault
from trainer.progress import with_progress

SHUFFLE_SEED = 0
READ_AHEAD = 256  # images held in memory between the readers and the tar


class Sample(NamedTuple):
    """One image as it goes into a tar: KEY.SUFFIX with its bytes, and its label."""

    key: str
    suffix: str
    data: bytes
    label: int


class Shrink(NamedTuple):
    """How to shrink images with a side above `max_side` pixels: they keep their aspect ratio and become JPEGs of `quality`."""

    max_side: int
    quality: int = 90


def choose_images(labels: npt.NDArray[np.int32], limit: int) -> npt.NDArray[np.int64]:
    """Choose at most `limit` images, equally many of each class as far as it has them; return their ids, shuffled.

    (n,) labels -> (min(n, limit),) ids. Raw Philox output is sorted, since numpy's own shuffles may change between versions.
    """
    order = np.argsort(np.random.Philox(SHUFFLE_SEED).random_raw(len(labels)), kind="stable")
    by_class = np.argsort(labels[order], kind="stable")
    sorted_labels = labels[order][by_class]
    rank_in_class = np.empty(len(labels), np.int64)
    rank_in_class[by_class] = np.arange(len(labels)) - np.searchsorted(sorted_labels, sorted_labels)
    return order[np.sort(np.argsort(rank_in_class, kind="stable")[:limit])]


def write_shards(
    images: Index | ArraySplit,
    folder: Path,
    *,
    split: str,
    class_names: list[str],
    bad: list[tuple[str, str]],
    limit: int,
    images_per_shard: int,
    shrink: Shrink | None,
    progress: bool,
) -> IndexContent:
    """Write FOLDER/SPLIT-000000.tar, ... with at most `limit` images; returns the content of their index.

    bad: (name, problem) of the files known to be unusable; those found here are added in the index's own list. Raises
    InputError if no image can be used."""
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
    """Yield the usable images in the order of `ids`, read by threads; append the others to `bad`."""
    keys: set[str] = set()
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for start in range(0, len(ids), READ_AHEAD):
            window = ids[start : start + READ_AHEAD]
            found = pool.map(lambda i: _read_image(images, i, shrink), window)
            for i, (data, suffix, problem) in zip(window, found, strict=True):
                if problem:
                    bad.append((images.name(i), problem))
                else:
                    yield Sample(_new_key(images.name(i), keys), suffix, data, int(images.labels[i]))


def _read_image(images: Index | ArraySplit, i: int, shrink: Shrink | None) -> tuple[bytes, str, str]:
    """Return (bytes for the tar, suffix, problem) of image i; the problem is empty if it can be used."""
    try:
        data = images.read(i)
        info = inspect_image(data, DataConfig.max_image_pixels)
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
    """Resize the image so that its longer side is max_side (Lanczos); return it as JPEG without EXIF.

    Raises InputError for damaged bytes."""
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
