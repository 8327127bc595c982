"""Published data sets by name, which torchvision downloads.

To add another one, write a function that loads it, and a line in SETS.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torchvision

from trainer.data import fashion_mnist
from trainer.data.array_split import ArraySplit
from trainer.errors import InputError

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # from the package dataset-fashion-mnist


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
    # Use the files of the Debian package if they are installed: no download is needed then.
    if DEBIAN_FASHION_MNIST.is_dir():
        return fashion_mnist.open_split(DEBIAN_FASHION_MNIST, split)
    found = torchvision.datasets.FashionMNIST(str(download_dir), train=split == "train", download=True)
    return ArraySplit(found.data.numpy(), found.targets.numpy().astype("i4"), list(found.classes))


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
