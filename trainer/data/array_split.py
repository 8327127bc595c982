"""Interface of a split that is written as shards, and splits that are arrays, parts of each other or joined."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainer.data.image_probe import encode_png

_IMAGES_PER_PIECE = 1000  # images that are hashed at a time, so that a mapped file is never in memory as a whole

# Images or labels as bytes.
Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int32]


class SplitImages(Protocol):
    """The images of a split, with the methods of `Index` that the writer of shards needs. Many threads call `read`."""

    @property
    def labels(self) -> Labels:
        """Return the labels, (n,); -1: no label."""

    @property
    def class_names(self) -> list[str]:
        """Return the name of each label."""

    @property
    def fingerprint(self) -> str:
        """Return a text that is equal only for the same images in the same order with the same labels."""

    def __len__(self) -> int: ...

    def name(self, i: int) -> str:
        """Return a file name for image i."""

    def read(self, i: int) -> bytes:
        """Return image i as the bytes of an image file."""


@dataclass(frozen=True)
class ArraySplit:
    """One split as an array in memory or in a mapped file."""

    images: Pixels
    """(n, H, W) or (n, H, W, 3)."""
    labels: Labels
    """(n,); -1: no label."""
    class_names: list[str]

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of pixels, labels and class names."""
        digest = _start_hash(self.labels, self.class_names)
        for start in range(0, len(self), _IMAGES_PER_PIECE):
            digest.update(self.images[start : start + _IMAGES_PER_PIECE].tobytes())
        return digest.hexdigest()

    def name(self, i: int) -> str:
        """Return a file name for image i."""
        return f"{i:06d}.png"

    def read(self, i: int) -> bytes:
        """Return image i encoded as PNG."""
        # The pixels may lie in another order in a mapped file.
        pixels = np.ascontiguousarray(self.images[i])
        return encode_png(Image.fromarray(pixels))


class JoinedSplits:
    """Several splits one after the other, as in `train+unlabeled` of STL-10. The first one names the classes."""

    def __init__(self, parts: Sequence[ArraySplit]) -> None:
        self.class_names = parts[0].class_names
        self.labels: Labels = np.concatenate([part.labels for part in parts])
        self._parts = parts
        # Number of images up to the end of each part.
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the parts."""
        return " ".join(part.fingerprint for part in self._parts)

    def name(self, i: int) -> str:
        """Return a file name for image i."""
        return f"{i:06d}.png"

    def read(self, i: int) -> bytes:
        """Return image i encoded as PNG."""
        # The first part that ends behind image i holds it.
        number = int(np.searchsorted(self._ends, i, "right"))
        part = self._parts[number]
        start = int(self._ends[number]) - len(part)
        return part.read(i - start)


class ClassSubset:
    """The images of some classes of a split."""

    def __init__(self, whole: SplitImages, classes: list[str]) -> None:
        """classes: the names of the classes to keep, in the order of their new labels."""
        self.class_names = classes
        # New label of each old label; the last entry is for -1, no label.
        new_labels = np.full(len(whole.class_names) + 1, -1, np.int32)
        for label, name in enumerate(classes):
            new_labels[whole.class_names.index(name)] = label
        labels = new_labels[whole.labels]
        # Images without a label are in no class, so they are left out too.
        self._ids = np.flatnonzero(labels >= 0)
        self.labels: Labels = labels[self._ids]
        self._whole = whole

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the whole split and of the classes that are kept."""
        return self._whole.fingerprint + _start_hash(self.labels, self.class_names).hexdigest()

    def name(self, i: int) -> str:
        """Return the file name of image i."""
        return self._whole.name(int(self._ids[i]))

    def read(self, i: int) -> bytes:
        """Return image i as the bytes of an image file."""
        return self._whole.read(int(self._ids[i]))


def _start_hash(labels: Labels, class_names: list[str]) -> Any:
    """Return a hash object that has taken in the labels and the class names."""
    # Names of folders may hold bytes that are not UTF-8.
    digest = hashlib.blake2b(repr(class_names).encode("utf-8", "surrogateescape"), digest_size=16)
    digest.update(labels.tobytes())
    return digest
