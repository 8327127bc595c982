"""Write one split as tar shards: choose the images and their order, and convert or downscale the bytes of each."""

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
from trainer.data.array_split import SplitImages
from trainer.data.image_probe import decode_rgb, inspect_image, to_direct
from trainer.data.index_build import READ_THREADS
from trainer.data.index_file import IndexContent
from trainer.data.tar_shards import build_shards, list_shards
from trainer.errors import InputError
from trainer.files import refuse_machine_fault
from trainer.progress import with_progress

SHUFFLE_SEED = 0
READ_AHEAD = 256  # images held in memory between the readers and the tar file


class Sample(NamedTuple):
    """One image as it is stored in a tar: its bytes in the member KEY.SUFFIX, and its label in KEY.cls."""

    key: str
    suffix: str
    data: bytes
    label: int


class Shrink(NamedTuple):
    """Rule for downscaling images with a side above `max_side` pixels: to JPEGs of `quality`, keeping the aspect ratio."""

    max_side: int
    quality: int = 90


def choose_images(labels: npt.NDArray[np.int32], limit: int) -> npt.NDArray[np.int64]:
    """Choose at most `limit` images and return their ids, shuffled: (n,) labels -> (min(n, limit),) ids.

    Every class gets the same number of images, or all of its images if it has fewer. The random order comes from sorting raw
    Philox output, because numpy's own shuffles may change between versions.
    """
    random_keys = np.random.Philox(SHUFFLE_SEED).random_raw(len(labels))
    order = np.argsort(random_keys, kind="stable")
    # Number the images of each class in random order: rank_in_class[i] images of its class precede image order[i].
    by_class = np.argsort(labels[order], kind="stable")
    sorted_labels = labels[order][by_class]
    first_of_class = np.searchsorted(sorted_labels, sorted_labels)
    rank_in_class = np.empty(len(labels), np.int64)
    rank_in_class[by_class] = np.arange(len(labels)) - first_of_class
    # Take the first image of each class, then the second of each, ...; then restore the random order.
    chosen = np.argsort(rank_in_class, kind="stable")[:limit]
    return order[np.sort(chosen)]


def write_shards(
    images: SplitImages,
    folder: Path,
    *,
    split: str,
    class_names: list[str],
    skipped: list[tuple[str, str]],
    limit: int,
    images_per_shard: int,
    shrink: Shrink | None,
    progress: bool,
) -> IndexContent:
    """Write FOLDER/SPLIT-000000.tar, ... with at most `limit` images, and return the content of their index.

    skipped: (name, problem) of the files that are skipped already; the index lists these and those that are skipped here.
    Raises InputError if no image can be used.
    """
    skipped = list(skipped)
    ids = choose_images(images.labels, limit).tolist()
    # The samples are read lazily, while the shards are written.
    samples = _read_samples(images, ids, shrink, skipped)
    # Samples are read while the shards are written, so at most READ_AHEAD images are in memory.
    numbered = enumerate(with_progress(samples, limit, f"write {split}", progress))
    # Cut the stream of samples into shards of `images_per_shard`.
    for number, shard in itertools.groupby(numbered, lambda item: item[0] // images_per_shard):
        path = folder / f"{split}-{number:06d}.tar"
        with tarfile.open(path, "w", encoding="utf-8") as tar:
            for _, sample in shard:
                # Image and label of a sample must be adjacent.
                _add_member(tar, f"{sample.key}.{sample.suffix}", sample.data)
                _add_member(tar, f"{sample.key}.cls", str(sample.label).encode())
    shards = list_shards(folder, split, exact=True)
    if not shards:
        raise InputError(f"split {split}: none of its images can be used; the first: {': '.join(skipped[0])}")
    # Index the shards that were written, not the source: the index must match their bytes.
    content, _ = build_shards(shards, split, class_names, progress)
    content.skipped = skipped
    return content


def _read_samples(
    images: SplitImages,
    ids: list[int],
    shrink: Shrink | None,
    skipped: list[tuple[str, str]],
) -> Iterator[Sample]:
    """Yield the usable images in the order of `ids` and append the others to `skipped`. Many threads read the images."""
    keys: set[str] = set()  # keys in use
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for start in range(0, len(ids), READ_AHEAD):
            window = ids[start : start + READ_AHEAD]
            # map keeps the order of the ids.
            found = pool.map(lambda i: _read_image(images, i, shrink), window)
            for i, (data, suffix, problem) in zip(window, found, strict=True):
                name = images.name(i)
                if problem:
                    skipped.append((name, problem))
                else:
                    key = _new_key(name, keys)
                    yield Sample(key, suffix, data, int(images.labels[i]))


def _read_image(images: SplitImages, i: int, shrink: Shrink | None) -> tuple[bytes, str, str]:
    """Return (bytes for the tar, suffix, problem) of image i; the problem is empty if the image can be used.

    Raises InputError if the machine is at fault and not the image.
    """
    try:
        data = images.read(i)
        info = inspect_image(data, DataConfig.max_image_pixels)
        longer_side = max(info.height, info.width)
        if shrink is not None and info.kind != "bad" and longer_side > shrink.max_side:
            return shrunk_jpeg(data, shrink), "jpg", ""
        # DALI cannot decode the rarer kinds, so they are stored as PNG.
        if info.kind == "convert":
            return to_direct(data), "png", ""
    except OSError as error:
        refuse_machine_fault(error)
        return b"", "", str(error)
    except InputError as error:
        return b"", "", str(error)
    suffix = "jpg" if info.format == "JPEG" else "png"
    return data, suffix, info.problem


def shrunk_jpeg(data: bytes, shrink: Shrink) -> bytes:
    """Resize an image (Lanczos) so that its longer side is max_side, and return it as JPEG without EXIF data.

    Raises InputError for damaged bytes.
    """
    image = decode_rgb(data)
    # Keep the aspect ratio; no side may become 0.
    factor = shrink.max_side / max(image.size)
    width = max(1, round(image.width * factor))
    height = max(1, round(image.height * factor))
    resized = image.resize((width, height), Image.Resampling.LANCZOS)
    jpeg = io.BytesIO()
    resized.save(jpeg, "JPEG", quality=shrink.quality)
    return jpeg.getvalue()


def _new_key(name: str, keys: set[str]) -> str:
    """Return the file's base name without suffix as a key that is not in `keys` yet, and add it to `keys`.

    Dots are replaced, because a key ends at the first dot in the WebDataset convention.
    """
    # Only the last part of the path is used.
    base = name.rpartition("/")[2]
    stem = base.rpartition(".")[0] or base
    stem = stem.replace(".", "_")
    # Files in different folders may have the same name.
    key = stem
    while key in keys:
        key = f"{stem}_{len(keys)}"
        stem = key
    keys.add(key)
    return key


def _add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Append a regular file to the tar."""
    info = tarfile.TarInfo(name)  # owner and time stay 0, so that the same input gives the same bytes
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
