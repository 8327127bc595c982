"""The files of a downloaded data set, in a folder or still in the archive that they came in. They are mapped, never copied."""

import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.tar_shards import uncompress_shard
from trainer.errors import InputError

Bytes = npt.NDArray[np.uint8]


class _Place(NamedTuple):
    """Place of the bytes of a file."""

    path: Path
    offset: int
    nbytes: int


class DownloadFiles:
    """The files of a folder or tar archive by base name.

    A compressed archive is uncompressed once, as a whole, into `scratch`. Raises InputError if it is damaged.
    """

    def __init__(self, path: Path, scratch: Path) -> None:
        self.path = path
        if path.is_dir():
            files = [entry for entry in path.iterdir() if entry.is_file()]
            self._places = {file.name: _Place(file, 0, file.stat().st_size) for file in files}
            return
        tar_file = uncompress_shard(path, scratch)
        # Only the headers are read here, and links and folders hold no data.
        try:
            with tarfile.open(tar_file, "r:") as tar:
                members = [member for member in tar if member.isreg()]
        except tarfile.TarError as error:
            raise InputError(f"{path}: no tar archive, or damaged: {error}; get it again") from error
        # The archives have one folder around all files, whose name does not matter.
        self._places = {}
        for member in members:
            name = Path(member.name).name
            self._places[name] = _Place(tar_file, member.offset_data, member.size)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, name: str) -> Bytes:
        """Return the bytes of a file, (nbytes,), as a read-only mapping. Raises InputError if it is missing or cut off."""
        if name not in self._places:
            raise InputError(f"{self.path}: {name} is missing: get the archive again")
        path, offset, nbytes = self._places[name]
        # A mapping can neither be empty nor reach beyond the end of the file.
        if not nbytes or path.stat().st_size < offset + nbytes:
            raise InputError(f"{self.path}: {name} is empty or cut off: get the archive again")
        return np.asarray(np.memmap(path, np.uint8, "r", offset, (nbytes,)))

    def records(self, name: str, record_bytes: int) -> Bytes:
        """Return a file of records of equal length, (n, record_bytes), as a read-only mapping. Raises InputError."""
        data = self.read(name)
        # The file has no header, so only its length shows that a part is missing.
        if len(data) % record_bytes:
            raise InputError(
                f"{self.path}: {name} has {len(data)} bytes, not a multiple of {record_bytes}: it is cut off; get the "
                "archive again"
            )
        return data.reshape(-1, record_bytes)

    def lines(self, name: str) -> list[str]:
        """Return the lines of a text file that are not empty. Raises InputError."""
        text = self.read(name).tobytes().decode("utf-8", "surrogateescape")
        lines = [line.strip() for line in text.splitlines()]
        # CIFAR's lists of classes end with an empty line.
        return [line for line in lines if line]


def check_labels(labels: npt.NDArray[np.integer], class_names: list[str], path: Path) -> npt.NDArray[np.int32]:
    """Return labels, (n,), as int32. Raises InputError if one of them is not the number of a class."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(class_names):
        raise InputError(
            f"{path}: has labels from {labels.min()} to {labels.max()}, but {len(class_names)} class names"
        )
    return labels.astype(np.int32)
