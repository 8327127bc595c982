"""ImageNet (ILSVRC2012) as downloaded. The tars are never unpacked: images are read at their offsets.

ILSVRC2012_img_train.tar       a tar of the tars n01440764.tar, ..., one for each class, of images n01440764_18.JPEG
ILSVRC2012_img_val.tar         images ILSVRC2012_val_00000001.JPEG, ...
ILSVRC2012_devkit_t12.tar.gz   the labels of val, and meta.mat, which says what they mean
"""

import hashlib
import importlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.printable import printable
from trainer.data.tar_shards import list_members
from trainer.errors import InputError
from trainer.progress import with_progress

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
_TARS = {"train": TRAIN_TAR, "val": VAL_TAR}
_META = "data/meta.mat"
_VAL_IDS = "data/ILSVRC2012_validation_ground_truth.txt"
# The members may lie in a folder.
_CLASS_TAR = re.compile(r"(?:.*/)?(n\d{8})\.tar")
_VAL_IMAGE = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")


class _StoredImage(NamedTuple):
    """One image: bytes [offset, offset + nbytes) of the tar."""

    name: str
    label: int
    offset: int
    nbytes: int


class TarImages:
    """Images at their places in a tar, with the methods of `Index` that the writer of shards needs."""

    def __init__(self, path: Path, images: list[_StoredImage], class_names: list[str]) -> None:
        self.class_names = class_names
        self.labels: npt.NDArray[np.int32] = np.array([image.label for image in images], np.int32)
        self._path = path
        self._images = images
        # The file stays open. Threads can share it, because pread does not use its position.
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return len(self._images)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of names, labels, places and class names."""
        digest = hashlib.blake2b(repr(self.class_names).encode(), digest_size=16)
        for image in self._images:
            digest.update(repr(image).encode())
        return digest.hexdigest()

    def name(self, i: int) -> str:
        """Return the name of image i for messages: CLASS/FILE, or FILE for an image without a label."""
        image = self._images[i]
        file_name = image.name.rpartition("/")[2]
        if image.label < 0:
            return printable(file_name)
        class_name = self.class_names[image.label]
        return printable(f"{class_name}/{file_name}")

    def read(self, i: int) -> bytes:
        """Return the bytes of image i. Raises OSError."""
        image = self._images[i]
        data = os.pread(self._file.fileno(), image.nbytes, image.offset)
        if len(data) != image.nbytes:
            raise OSError(f"{self._path}: cut off: {image.name} has {len(data)} of {image.nbytes} bytes")
        return data


def list_splits(root: Path) -> list[str]:
    """Return the splits whose tars are in ROOT."""
    return [split for split, name in _TARS.items() if (root / name).is_file()]


def open_split(root: Path, split: str, progress: bool) -> TarImages:
    """List the images of a split: it reads the tar headers, which takes minutes for the 138 GB of train.

    Raises InputError for a damaged tar, and for val without the labels in the devkit.
    """
    path = root / _TARS[split]
    try:
        with path.open("rb") as file:
            if split == "train":
                images, class_names = _list_train(file, progress)
            else:
                images, class_names = _list_val(file, root / DEVKIT, _classes_of_train(root))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return TarImages(path, images, class_names)


def _classes_of_train(root: Path) -> list[str] | None:
    """Return the classes of the tar of train, or None without this tar.

    Both splits number the classes in the same way, even if the tar of train lacks some.
    """
    path = root / TRAIN_TAR
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return [name for name, _ in _list_class_tars(file)]


def _list_class_tars(file: IO[bytes]) -> list[tuple[str, tarfile.TarInfo]]:
    """Return (class, member) of each tar in the tar of train, sorted by class. Raises InputError."""
    found = []
    for member in list_members(file):
        name = _CLASS_TAR.fullmatch(member.name)
        if name and member.isreg():
            found.append((name[1], member))
    if not found:
        raise InputError("holds no tars of classes such as n01440764.tar: get the original file")
    found.sort(key=lambda item: item[0])
    return found


def _list_train(file: IO[bytes], progress: bool) -> tuple[list[_StoredImage], list[str]]:
    """Return the images of all classes and the class names."""
    class_tars = _list_class_tars(file)
    images: list[_StoredImage] = []
    shown = with_progress(class_tars, len(class_tars), "list train", progress)
    # The classes are sorted, so the position of a class is its label.
    for label, (_, class_tar) in enumerate(shown):
        part = _Part(file, class_tar.offset_data, class_tar.size)
        try:
            images += _list_images(part, label)
        except InputError as error:
            raise InputError(f"{printable(class_tar.name)}: {error}") from error
    return images, [name for name, _ in class_tars]


def _list_images(part: "_Part", label: int) -> Iterator[_StoredImage]:
    """Yield the images of one class in the order of their names."""
    # The buffer joins the many small reads of headers.
    file = io.BufferedReader(part)
    members = [member for member in list_members(file) if member.isreg()]
    members.sort(key=lambda member: member.name)
    for member in members:
        # Offsets in the tar of the class become offsets in the tar around it.
        offset = part.start + member.offset_data
        yield _StoredImage(member.name, label, offset, member.size)


class _Part(io.RawIOBase):
    """Some bytes of a file as a file of its own, so that a tar in a tar can be read in place."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        super().__init__()
        self.start = start
        self._file = file
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: self._size,
        }
        self._position = starts[whence] + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        # A position behind the end is allowed, and nothing can be read there.
        rest = max(0, self._size - self._position)
        wanted = min(len(buffer), rest)
        # Other parts of the same file may have moved its position.
        self._file.seek(self.start + self._position)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _list_val(
    file: IO[bytes],
    devkit: Path,
    class_names: list[str] | None,
) -> tuple[list[_StoredImage], list[str]]:
    """Return the images of val and the class names, which are those of the devkit if `class_names` is None."""
    classes, class_of_image = _read_devkit(devkit)
    if class_names is None:
        class_names = classes
    labels = {name: label for label, name in enumerate(class_names)}
    images = []
    # Anything else in the tar is not an image of val.
    for member in list_members(file):
        found = _VAL_IMAGE.fullmatch(member.name)
        if not found or not member.isreg():
            continue
        number = int(found[1])
        if not 1 <= number <= len(class_of_image):
            raise InputError(f"{member.name}: {devkit} has labels of {len(class_of_image)} images only")
        # The images are numbered from 1.
        class_name = class_of_image[number - 1]
        if class_name not in labels:
            raise InputError(f"{member.name}: its class {class_name} is not in {TRAIN_TAR}: get all of that file")
        images.append(
            _StoredImage(
                name=member.name,
                label=labels[class_name],
                offset=member.offset_data,
                nbytes=member.size,
            )
        )
    if not images:
        raise InputError("holds no images such as ILSVRC2012_val_00000001.JPEG: get the original file")
    # By name, so that the order does not depend on the program that wrote the tar.
    images.sort()
    return images, class_names


def _read_devkit(path: Path) -> tuple[list[str], list[str]]:
    """Return the WNIDs of the classes, sorted, and the WNID of each image of val. Raises InputError."""
    if not path.is_file():
        raise InputError(
            f"its labels are in {path.name}, which is missing in {path.parent}: put it there, or prepare only the images "
            "of train with --splits train"
        )
    try:
        with tarfile.open(path, "r:gz") as tar:
            files = _read_members(tar, (_META, _VAL_IDS))
        ids = [int(line) for line in files[_VAL_IDS].split()]
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; get it again") from error
    wnids = _read_wnids(files[_META], path)
    # A number without a class means that the two files do not belong together.
    unknown = sorted(set(ids) - wnids.keys())
    if unknown:
        raise InputError(f"{path}: {_VAL_IDS} has the class {unknown[0]}, which {_META} lacks")
    class_of_image = [wnids[number] for number in ids]
    return sorted(wnids.values()), class_of_image


def _read_members(tar: tarfile.TarFile, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the contents of FOLDER/NAME in the devkit for each name. Raises InputError."""
    found = {}
    for member in tar:
        # The archive holds one folder around all files.
        name = member.name.partition("/")[2]
        if name not in names or not member.isreg():
            continue
        stream = tar.extractfile(member)
        if stream:
            found[name] = stream.read()
    missing = sorted(set(names) - found.keys())
    if missing:
        raise InputError(f"{DEVKIT}: has no {missing[0]}: get it again")
    return found


def _read_wnids(meta: bytes, devkit: Path) -> dict[int, str]:
    """Return the WNID of each ILSVRC2012_ID. The file also has the synsets above the classes, which have children."""
    # Only this file needs scipy, so it is not a requirement of the program.
    try:
        scipy_io = importlib.import_module("scipy.io")
    except ImportError as error:
        raise InputError(f"{devkit}: reading {_META} needs the package scipy: pip install scipy") from error
    wnids = {}
    try:
        content = scipy_io.loadmat(io.BytesIO(meta), squeeze_me=True)
        for synset in np.atleast_1d(content["synsets"]):
            is_class = int(synset["num_children"]) == 0
            if is_class:
                number = int(synset["ILSVRC2012_ID"])
                wnids[number] = str(synset["WNID"])
    # A damaged file raises nearly any type.
    except Exception as error:
        raise InputError(f"{devkit}: {_META} cannot be read: {error}; get it again") from error
    return wnids
