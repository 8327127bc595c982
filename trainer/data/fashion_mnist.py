"""Fashion-MNIST as downloaded: four IDX files, the format of MNIST, gzipped or not."""

import gzip
import zlib
from pathlib import Path

import numpy as np

from trainer.data.array_split import ArraySplit, Pixels
from trainer.data.download_files import check_labels
from trainer.errors import InputError

SPLITS = ["train", "test"]
# The files do not hold the names of the classes.
CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
# MNIST's own name for its test images is t10k.
_STEMS = {"train": "train", "test": "t10k"}


def list_splits(folder: Path) -> list[str]:
    """Return the splits whose images are in a folder."""
    found = []
    for split, stem in _STEMS.items():
        if _find(folder, f"{stem}-images-idx3-ubyte"):
            found.append(split)
    return found


def open_split(folder: Path, split: str) -> ArraySplit:
    """Read a split from a folder of IDX files. Raises InputError for a file that is missing or damaged."""
    stem = _STEMS[split]
    images = _read_idx(folder, f"{stem}-images-idx3-ubyte")
    labels = _read_idx(folder, f"{stem}-labels-idx1-ubyte")
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise InputError(f"{folder}: split {split} has images {images.shape} and labels {labels.shape}: get it again")
    class_names = list(CLASS_NAMES)
    checked_labels = check_labels(labels, class_names, folder)
    return ArraySplit(images, checked_labels, class_names)


def _find(folder: Path, name: str) -> Path | None:
    """Return the path of an IDX file, gzipped or not, or None if it is not there."""
    paths = (folder / f"{name}.gz", folder / name)
    return next((path for path in paths if path.is_file()), None)


def _read_idx(folder: Path, name: str) -> Pixels:
    """Read an IDX file of bytes: 0, 0, 8, the number of dimensions, each dimension in four bytes, then the bytes."""
    path = _find(folder, name)
    if path is None:
        raise InputError(f"{folder}: {name}.gz is missing: get it as well")
    content = path.read_bytes()
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: damaged or cut off: {error}; get it again") from error
    # Without this beginning it is no IDX file of bytes, and gets the empty shape that is refused below.
    num_dimensions = 0
    if len(content) > 3 and content[:3] == b"\0\0\x08":
        num_dimensions = content[3]
    start = 4 + 4 * num_dimensions
    shape = []
    for at in range(4, start, 4):
        length = int.from_bytes(content[at : at + 4], "big")
        shape.append(length)
    if not shape or len(content) != start + int(np.prod(shape)):
        raise InputError(f"{path}: no IDX file of bytes, or cut off: get it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
