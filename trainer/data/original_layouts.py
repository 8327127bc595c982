"""The layouts in which data sets are downloaded, as one table. To add one, write a function that opens it and add a line."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trainer.data import cifar, fashion_mnist, imagenet_tars, stl10
from trainer.data.array_split import SplitImages
from trainer.data.index_build import SPLIT_NAMES
from trainer.errors import InputError


class Layout(NamedTuple):
    """One layout: how to recognise and open it. `locate` gets the path of the user, the others what `locate` returned."""

    title: str
    holds: str  # for messages and --help
    locate: Callable[[Path], Path | None]  # the folder or archive, or None if the path is not in this layout
    list_splits: Callable[[Path], list[str]]
    # With (located, split, folder for scratch files, show progress).
    open_split: Callable[[Path, str, Path, bool], SplitImages]


def find_layout(path: Path) -> tuple[Layout, Path] | None:
    """Return the layout of a folder or archive, and where it is; None if it has none of them.

    Raises InputError if a folder holds several data sets.
    """
    found = []
    for layout in LAYOUTS:
        located = layout.locate(path)
        if located:
            found.append((layout, located))
    # Taking the first one would ignore the others silently.
    if len(found) > 1:
        places = ", ".join(str(located) for _, located in found)
        raise InputError(f"{path}: holds several data sets: give one of them: {places}")
    return found[0] if found else None


def describe_layouts() -> str:
    """List what `wmse prepare` recognises, one line each."""
    rows = [(layout.title, layout.holds) for layout in LAYOUTS] + list(_FOLDERS.items())
    return "\n".join(f"  {title:<22} {holds}" for title, holds in rows)


def _locate_download(folder: str, archive: str, marker: str, path: Path) -> Path | None:
    """Return the folder or archive of a download: PATH, or below PATH by its usual name; the folder counts first.

    marker: a file that the folder always has.
    """
    # Somebody may have uncompressed the archive.
    archives = (archive, archive.removesuffix(".gz"))
    if path.is_file():
        return path if path.name in archives else None
    for candidate in (path, path / folder):
        if (candidate / marker).is_file():
            return candidate
    for name in archives:
        if (path / name).is_file():
            return path / name
    return None


def _locate_imagenet(path: Path) -> Path | None:
    """Return PATH if it holds ImageNet's tars, and not also the folders that somebody has unpacked them to."""
    is_unpacked = any((path / split).is_dir() for split in SPLIT_NAMES)
    return path if imagenet_tars.list_splits(path) and not is_unpacked else None


def _locate_fashion_mnist(path: Path) -> Path | None:
    """Return the folder of the IDX files, which torchvision keeps in FashionMNIST/raw/."""
    # The folder itself, and those in which torchvision keeps the files.
    candidates = (path, path / "raw", path / "FashionMNIST" / "raw")
    return next((folder for folder in candidates if fashion_mnist.list_splits(folder)), None)


def _cifar(
    title: str,
    folder: str,
    archive: str,
    marker: str,
    open_split: Callable[[Path, str, Path], SplitImages],
) -> Layout:
    """Return one of the four layouts of CIFAR, which differ in names only. open_split: its function in `cifar`."""
    return Layout(
        title,
        f"{folder}/ or {archive}",
        partial(_locate_download, folder, archive, marker),
        lambda located: list(cifar.SPLITS),
        lambda located, split, scratch, progress: open_split(located, split, scratch),
    )


LAYOUTS = (
    Layout(
        "ImageNet",
        f"{imagenet_tars.TRAIN_TAR}, {imagenet_tars.VAL_TAR} and, for val, {imagenet_tars.DEVKIT}",
        _locate_imagenet,
        imagenet_tars.list_splits,
        lambda located, split, scratch, progress: imagenet_tars.open_split(located, split, progress),
    ),
    _cifar(
        "CIFAR-10, Python", "cifar-10-batches-py", "cifar-10-python.tar.gz", "batches.meta", cifar.open_cifar10_python
    ),
    _cifar(
        "CIFAR-10, binary",
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        "batches.meta.txt",
        cifar.open_cifar10_binary,
    ),
    _cifar("CIFAR-100, Python", "cifar-100-python", "cifar-100-python.tar.gz", "train", cifar.open_cifar100_python),
    _cifar(
        "CIFAR-100, binary",
        "cifar-100-binary",
        "cifar-100-binary.tar.gz",
        "fine_label_names.txt",
        cifar.open_cifar100_binary,
    ),
    Layout(
        "STL-10",
        "stl10_binary/ or stl10_binary.tar.gz",
        partial(_locate_download, "stl10_binary", "stl10_binary.tar.gz", "train_X.bin"),
        stl10.list_splits,
        lambda located, split, scratch, progress: stl10.open_split(located, split, scratch),
    ),
    Layout(
        "Fashion-MNIST",
        "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same of t10k, gzipped or not",
        _locate_fashion_mnist,
        fashion_mnist.list_splits,
        lambda located, split, scratch, progress: fashion_mnist.open_split(located, split),
    ),
)
# What `sources` reads without a download's own format.
_FOLDERS = {
    "Tiny ImageNet": "tiny-imagenet-200/ with wnids.txt, train/, val/val_annotations.txt and test/",
    "image folder": "SPLIT/CLASS/IMAGE; also CLASS/IMAGE or only images, which become the split train",
}
