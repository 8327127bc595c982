"""CIFAR-10 and CIFAR-100 as downloaded: the Python version, whose files are pickles, and the binary version."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.array_split import ArraySplit, Pixels
from trainer.data.download_files import DownloadFiles, check_labels
from trainer.errors import InputError

_CHANNELS, _SIDE = 3, 32
_IMAGE_BYTES = _CHANNELS * _SIDE * _SIDE
# CIFAR-10 has its training images in five files, CIFAR-100 in one.
_TRAIN_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]

SPLITS = ["train", "test"]


def open_cifar10_python(path: Path, split: str, scratch: Path) -> ArraySplit:
    """Open a split of cifar-10-batches-py/ or its archive. Raises InputError, as the functions below do."""
    names = _TRAIN_BATCHES if split == "train" else ["test_batch"]
    return _open_pickles(DownloadFiles(path, scratch), names, "labels", "batches.meta", "label_names")


def open_cifar100_python(path: Path, split: str, scratch: Path) -> ArraySplit:
    """Open a split of cifar-100-python/ or its archive, with the 100 fine classes."""
    return _open_pickles(DownloadFiles(path, scratch), [split], "fine_labels", "meta", "fine_label_names")


def open_cifar10_binary(path: Path, split: str, scratch: Path) -> ArraySplit:
    """Open a split of cifar-10-batches-bin/ or its archive: records of a label and an image."""
    names = _TRAIN_BATCHES if split == "train" else ["test_batch"]
    return _open_records(DownloadFiles(path, scratch), names, 1, "batches.meta.txt")


def open_cifar100_binary(path: Path, split: str, scratch: Path) -> ArraySplit:
    """Open a split of cifar-100-binary/ or its archive: records of a coarse label, a fine label and an image."""
    return _open_records(DownloadFiles(path, scratch), [split], 2, "fine_label_names.txt")


def _open_records(files: DownloadFiles, names: list[str], label_bytes: int, names_file: str) -> ArraySplit:
    """Open files of records, which hold `label_bytes` labels and an image each; the last label counts."""
    record_bytes = label_bytes + _IMAGE_BYTES
    batches = [files.records(f"{name}.bin", record_bytes) for name in names]
    records = np.concatenate(batches)
    class_names = files.lines(names_file)
    # CIFAR-100 has a coarse label in front of the fine one.
    last_labels = records[:, label_bytes - 1]
    labels = check_labels(last_labels, class_names, files.path)
    images = _to_images(records[:, label_bytes:])
    return ArraySplit(images, labels, class_names)


def _open_pickles(
    files: DownloadFiles,
    names: list[str],
    labels_key: str,
    names_file: str,
    names_key: str,
) -> ArraySplit:
    """Open files that are pickled dictionaries with the pixels, (n, 3072), and the labels of n images."""
    pixels: list[Pixels] = []
    labels: list[int] = []
    # A pickle may hold values of any type, so each is checked before it is used.
    for name in names:
        batch = _unpickle(files, name)
        data: Any = batch.get("data")
        batch_labels: Any = batch.get(labels_key)
        if not _are_images(data) or not _is_list_of(int, batch_labels) or len(batch_labels) != len(data):
            raise InputError(
                f"{files.path}: {name} does not hold images of {_IMAGE_BYTES} bytes with as many {labels_key}: get the "
                "archive again"
            )
        pixels.append(data)
        labels += batch_labels
    class_names: Any = _unpickle(files, names_file).get(names_key)
    if not _is_list_of(str, class_names):
        raise InputError(f"{files.path}: {names_file} holds no list of {names_key}: get the archive again")
    images = _to_images(np.concatenate(pixels))
    all_labels = np.array(labels, np.int64)
    return ArraySplit(images, check_labels(all_labels, class_names, files.path), class_names)


def _are_images(data: object) -> bool:
    """Return whether a value is an array of images, (n, 3072) uint8."""
    if not isinstance(data, np.ndarray):
        return False
    return data.dtype == np.uint8 and data.shape[1:] == (_IMAGE_BYTES,)


def _is_list_of(kind: type, value: object) -> bool:
    """Return whether a value is a list whose items are all of one type."""
    if not isinstance(value, list):
        return False
    return all(isinstance(item, kind) for item in value)


def _to_images(rows: Pixels) -> Pixels:
    """Reorder rows of a red, a green and a blue plane: (n, 3072) -> (n, 32, 32, 3)."""
    planes = rows.reshape(-1, _CHANNELS, _SIDE, _SIDE)
    return planes.transpose(0, 2, 3, 1)


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists, dictionaries and arrays. Anything else in a pickle could run a program of its author."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the few names that a pickled array refers to."""
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        # The module has been renamed between versions of numpy.
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            # The first part of a pickled array is the function that creates it again.
            parts = np.empty(0).__reduce__()
            return parts[0]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which the original does not")


def _unpickle(files: DownloadFiles, name: str) -> dict[str, Any]:
    """Read a pickled dictionary whose keys are texts. Raises InputError."""
    data = files.read(name).tobytes()
    try:
        # The files were written by Python 2, whose texts are bytes.
        content = _PlainUnpickler(io.BytesIO(data), encoding="latin1").load()
    # A damaged pickle raises nearly any type, and all of them mean that the file cannot be read.
    except Exception as error:
        raise InputError(f"{files.path}: {name} cannot be read as a file of CIFAR: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{files.path}: {name} cannot be read as a file of CIFAR: it holds no dictionary")
    return content
