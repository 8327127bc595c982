"""Decoded images of a set in memory that the ranks of a node share; the first epoch fills it.

The memory is an unlinked file of /dev/shm: the system frees it when the last process that holds it ends, however it ends.
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
    """Return the size of all images of a set when decoded, in bytes: 3 a pixel."""
    return int(3 * (index.heights.astype(np.int64) * index.widths).sum())


def check_cache_size(index: Index, max_gib: float) -> None:
    """Raise InputError if the decoded set does not fit into `max_gib`."""
    needed = decoded_bytes(index)
    if needed > max_gib * _GIB:
        raise InputError(
            f"data.decode_cache_gib is {max_gib:g}, but the {len(index)} images take {size_text(needed)} decoded: set it to "
            "that, if the node has the memory, or to 0 for no cache; `wmse prepare --max_side` makes images smaller"
        )


class DecodeCache:
    """The cache. Safe to use from many threads and processes: two that decode one image at once write the same pixels."""

    def __init__(self, index: Index, path: Path, *, create: bool) -> None:
        """path: file of shared memory, which one rank of the node makes (create) before the others open it. Call `forget_name`
        when all have opened it. Raises InputError if the node lacks the memory."""
        self._path = path
        self._shapes = np.stack([index.heights, index.widths], axis=1)
        sizes = 3 * index.heights.astype(np.int64) * index.widths
        self._starts = len(index) + np.concatenate([[0], np.cumsum(sizes)])
        total = int(self._starts[-1])
        try:
            if create:
                self.forget_name()  # left by a run that was killed before it removed the name
            flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
            descriptor = os.open(path, flags, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, total)  # a page that is missing later would kill the process
                self._memory = np.frombuffer(mmap.mmap(descriptor, total), np.uint8)
            finally:
                os.close(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.forget_name()
            raise InputError(
                f"data.decode_cache_gib: can't get {size_text(total)} of shared memory in {path.parent} ({error.strerror}): "
                "give the node or container more, or set it to 0"
            ) from error

    def forget_name(self) -> None:
        """Remove the file's name, so that no later process finds the memory."""
        self._path.unlink(missing_ok=True)

    def get(self, image_id: int) -> NDArray[np.uint8] | None:
        """Return (H, W, 3) pixels, not to be written to; None if no process has decoded the image yet."""
        return self._place(image_id) if self._memory[image_id] else None

    def put(self, image_id: int, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Store (H, W, 3) pixels and return them as stored."""
        place = self._place(image_id)
        place[...] = pixels
        self._memory[image_id] = 1  # set last: a reader that sees it finds the pixels
        return place

    def _place(self, image_id: int) -> NDArray[np.uint8]:
        height, width = self._shapes[image_id]
        return self._memory[self._starts[image_id] : self._starts[image_id + 1]].reshape(height, width, 3)
