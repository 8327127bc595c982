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
    batches = [files.records(f"{name}.bin", label_bytes + _IMAGE_BYTES) for name in names]
    records = np.concatenate(batches)
    class_names = files.lines(names_file)
    labels = check_labels(records[:, label_bytes - 1], class_names, files.path)
    return ArraySplit(_to_images(records[:, label_bytes:]), labels, class_names)


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
    for name in names:
        batch = _unpickle(files, name)
        data: Any = batch.get("data")
        batch_labels: Any = batch.get(labels_key)
        if not _are_images(data) or not _are_labels(batch_labels, len(data)):
            raise InputError(
                f"{files.path}: {name} does not hold images of {_IMAGE_BYTES} bytes with as many {labels_key}: get the "
                "archive again"
            )
        pixels.append(data)
        labels += batch_labels
    class_names = _unpickle(files, names_file).get(names_key)
    if not isinstance(class_names, list) or not all(isinstance(name, str) for name in class_names):
        raise InputError(f"{files.path}: {names_file} holds no list of {names_key}: get the archive again")
    checked = check_labels(np.array(labels, np.int64), class_names, files.path)
    return ArraySplit(_to_images(np.concatenate(pixels)), checked, class_names)


def _are_images(data: object) -> bool:
    return isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (_IMAGE_BYTES,)


def _are_labels(labels: object, count: int) -> bool:
    return isinstance(labels, list) and len(labels) == count and all(isinstance(label, int) for label in labels)


def _to_images(rows: Pixels) -> Pixels:
    """Reorder rows of a red, a green and a blue plane: (n, 3072) -> (n, 32, 32, 3)."""
    return rows.reshape(-1, _CHANNELS, _SIDE, _SIDE).transpose(0, 2, 3, 1)


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists, dictionaries and arrays. Anything else in a pickle could run a program of its author."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the few names that a pickled array refers to."""
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        # The module has been renamed between versions of numpy.
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
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
