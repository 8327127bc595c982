"""A cache of decoded images in memory that all ranks of a node share; the first epoch fills it.

The memory is an unlinked file in /dev/shm: the system frees it when the last process that has it open ends, however it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.index import Index
from trainer.data.printable import size_text
from trainer.errors import InputError

SHARED_MEMORY = Path("/dev/shm")
_GIB = 2**30


def decoded_bytes(index: Index) -> int:
    """Return the total size of the decoded images of a data set in bytes, 3 for each pixel."""
    return int(_image_bytes(index).sum())


def check_cache_size(index: Index, max_gib: float) -> None:
    """Raise InputError if the decoded images need more than `max_gib` GiB."""
    needed = decoded_bytes(index)
    if needed > max_gib * _GIB:
        raise InputError(
            f"data.decode_cache_gib is {max_gib:g}, but the {len(index)} images take {size_text(needed)} decoded: set it to "
            "that if the node has enough memory, or to 0 for no cache; `wmse prepare --max_side` makes images smaller"
        )


class DecodeCache:
    """A cache of decoded images.

    It is safe to use from many threads and processes: two that decode the same image at the same time write the same pixels.
    """

    # Layout of the memory: one byte for each image (1 if its pixels are stored), then the pixels of image 0, 1, ...

    def __init__(self, index: Index, path: Path, *, create: bool) -> None:
        """Open the shared memory at `path`.

        create: create the file. One rank of the node does so before the others open it. Call `forget_name` when all ranks
        have opened it. Raises InputError if the node lacks the memory.
        """
        self._path = path
        # Height and width of each image, to restore the shape of its pixels.
        self._shapes = np.stack([index.heights, index.widths], axis=1)
        # Image i's pixels lie at starts[i] to starts[i + 1], behind the flags of all images.
        ends = np.cumsum(_image_bytes(index))
        self._starts = len(index) + np.concatenate([[0], ends])
        total = int(self._starts[-1])
        try:
            if create:
                self.forget_name()  # a run that was killed may have left a file of this name
            self._memory = _map_file(path, total, create)
        except OSError as error:
            # Do not leave a partly allocated file behind.
            with contextlib.suppress(OSError):
                self.forget_name()
            raise InputError(
                f"data.decode_cache_gib: cannot get {size_text(total)} of shared memory in {path.parent} ({error.strerror}): "
                "give the node or container more, or set it to 0"
            ) from error

    def forget_name(self) -> None:
        """Remove the file's name, so that no later process finds the memory."""
        self._path.unlink(missing_ok=True)

    def get(self, image_id: int) -> NDArray[np.uint8] | None:
        """Return an image's pixels (H, W, 3), which must not be written to, or None if it has not been decoded yet."""
        is_stored = self._memory[image_id]
        return self._pixels(image_id) if is_stored else None

    def put(self, image_id: int, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Store an image's pixels (H, W, 3) and return the stored copy."""
        # Two processes may store the same image at the same time; both write the same bytes.
        stored = self._pixels(image_id)
        stored[...] = pixels
        self._memory[image_id] = 1  # set last: a reader that sees the flag finds all pixels
        return stored

    def _pixels(self, image_id: int) -> NDArray[np.uint8]:
        # The cache is one flat array: cut out the image and restore its shape.
        height, width = self._shapes[image_id]
        start = self._starts[image_id]
        end = self._starts[image_id + 1]
        return self._memory[start:end].reshape(height, width, 3)


def _image_bytes(index: Index) -> NDArray[np.int64]:
    """Return the size of each decoded image in bytes, (n,)."""
    return 3 * index.heights.astype(np.int64) * index.widths


def _map_file(path: Path, num_bytes: int, create: bool) -> NDArray[np.uint8]:
    """Map a file of shared memory as an array (num_bytes,). Raises OSError."""
    # O_NOFOLLOW: another user may have put a symbolic link there. O_EXCL: the file must be new.
    flags = os.O_RDWR | os.O_NOFOLLOW
    if create:
        flags |= os.O_CREAT | os.O_EXCL
    descriptor = os.open(path, flags, 0o600)
    try:
        # Allocate all pages now: a page that cannot be allocated later would kill the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
        return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
    finally:
        os.close(descriptor)
