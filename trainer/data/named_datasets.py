"""Published data sets by name. To add another one, write a function that loads it and a line in SETS."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torchvision
from PIL import Image

from trainer.data.image_probe import encode_png
from trainer.errors import InputError

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # from the package dataset-fashion-mnist

# Images or labels as bytes.
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ArraySplit:
    """One split held in memory, with the methods of `Index` that a shard writer needs."""

    images: Pixels
    """(n, H, W) or (n, H, W, 3)."""
    labels: npt.NDArray[np.int32]
    """(n,); -1: no label."""
    class_names: list[str]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, i: int) -> str:
        """Return a file name for image i."""
        return f"{i:06d}.png"

    def read(self, i: int) -> bytes:
        """Return image i encoded as PNG."""
        return encode_png(Image.fromarray(self.images[i]))


class KnownSet(NamedTuple):
    """The splits of a published data set and the function that loads one of them."""

    splits: tuple[str, ...]
    load: Callable[[str, Path], ArraySplit]  # (split, folder for downloads)


def load_split(name: str, split: str, download_dir: Path) -> ArraySplit:
    """Load one split of a data set in SETS; torchvision downloads it if it is not in `download_dir`.

    Raises InputError with the remedy if the data set cannot be downloaded or read.
    """
    try:
        return SETS[name].load(split, download_dir)
    except (OSError, RuntimeError) as error:  # torchvision raises them without a network or for a broken archive
        raise InputError(
            f"cannot get {name} ({split}): {error}. Check the network, or put the files that torchvision would download "
            f"into {download_dir} yourself; delete broken ones there"
        ) from error


def _fashion_mnist(split: str, download_dir: Path) -> ArraySplit:
    # torchvision has the class names, the files have not.
    class_names = list(torchvision.datasets.FashionMNIST.classes)
    # Use the files of the Debian package if they are installed: no download is needed then.
    if DEBIAN_FASHION_MNIST.is_dir():
        stem = DEBIAN_FASHION_MNIST / {"train": "train", "test": "t10k"}[split]
        pixels = _read_idx(Path(f"{stem}-images-idx3-ubyte.gz"), header_bytes=16)
        labels = _read_idx(Path(f"{stem}-labels-idx1-ubyte.gz"), header_bytes=8)
        return ArraySplit(pixels.reshape(-1, 28, 28), labels.astype("i4"), class_names)
    found = torchvision.datasets.FashionMNIST(str(download_dir), train=split == "train", download=True)
    return ArraySplit(found.data.numpy(), found.targets.numpy().astype("i4"), class_names)


def _read_idx(path: Path, header_bytes: int) -> Pixels:
    """Read the bytes behind the header of a gzipped IDX file, the format of MNIST."""
    content = gzip.decompress(path.read_bytes())
    return np.frombuffer(content, np.uint8, offset=header_bytes)


def _cifar10(split: str, download_dir: Path) -> ArraySplit:
    found = torchvision.datasets.CIFAR10(str(download_dir), train=split == "train", download=True)
    return _from_cifar(found)


def _cifar100(split: str, download_dir: Path) -> ArraySplit:
    found = torchvision.datasets.CIFAR100(str(download_dir), train=split == "train", download=True)
    return _from_cifar(found)


def _from_cifar(found: Any) -> ArraySplit:
    return ArraySplit(found.data, np.array(found.targets, "i4"), list(found.classes))


def _stl10(split: str, download_dir: Path) -> ArraySplit:
    found = torchvision.datasets.STL10(str(download_dir), split=split, download=True)
    images = found.data.transpose(0, 2, 3, 1)  # stored as (n, 3, H, W)
    return ArraySplit(images, found.labels.astype("i4"), list(found.classes))


# Name on the command line -> splits and loader.
SETS = {
    "fashion-mnist": KnownSet(("train", "test"), _fashion_mnist),
    "cifar10": KnownSet(("train", "test"), _cifar10),
    "cifar100": KnownSet(("train", "test"), _cifar100),
    "stl10": KnownSet(("train", "test", "train+unlabeled"), _stl10),
}
