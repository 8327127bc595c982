"""STL-10 as downloaded: train_X.bin, train_y.bin, test_X.bin, test_y.bin, unlabeled_X.bin and class_names.txt."""

from pathlib import Path

import numpy as np

from trainer.data.array_split import ArraySplit, JoinedSplits, SplitImages
from trainer.data.download_files import DownloadFiles, check_labels
from trainer.errors import InputError

_CHANNELS, _SIDE = 3, 96
SPLITS = ["train", "test", "train+unlabeled"]


def list_splits(path: Path) -> list[str]:
    """Return the splits of stl10_binary/, of which the unlabelled images may be missing, or of its archive."""
    # An archive always has them, and looking into it would mean to uncompress it.
    has_unlabeled = path.is_file() or (path / "unlabeled_X.bin").is_file()
    return SPLITS if has_unlabeled else SPLITS[:2]


def open_split(path: Path, split: str, scratch: Path) -> SplitImages:
    """Open a split of stl10_binary/ or its archive. The pixels, up to 2.7 GB, stay on the disk.

    Raises InputError for a file that is missing or damaged.
    """
    files = DownloadFiles(path, scratch)
    class_names = files.lines("class_names.txt")
    if split == "train+unlabeled":
        labelled = _open_part(files, "train", class_names)
        unlabelled = _open_part(files, "unlabeled", class_names)
        return JoinedSplits([labelled, unlabelled])
    return _open_part(files, split, class_names)


def _open_part(files: DownloadFiles, part: str, class_names: list[str]) -> ArraySplit:
    """Open PART_X.bin with the labels of PART_y.bin, which begin at 1; the unlabelled images have no such file."""
    stored = files.records(f"{part}_X.bin", _CHANNELS * _SIDE * _SIDE)
    # Each channel is stored column by column.
    columns = stored.reshape(-1, _CHANNELS, _SIDE, _SIDE)
    images = columns.transpose(0, 3, 2, 1)
    if part == "unlabeled":
        no_labels = np.full(len(images), -1, np.int32)
        return ArraySplit(images, no_labels, class_names)
    # In int32 first, because 0 - 1 is 255 in bytes, which would not be found to be wrong.
    labels = files.read(f"{part}_y.bin").astype(np.int32) - 1
    if len(labels) != len(images):
        raise InputError(
            f"{files.path}: {part}_X.bin has {len(images)} images, but {part}_y.bin {len(labels)} labels: get the archive "
            "again"
        )
    checked_labels = check_labels(labels, class_names, files.path)
    return ArraySplit(images, checked_labels, class_names)
