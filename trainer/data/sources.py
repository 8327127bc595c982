"""Sources that `wmse prepare` can read: a published data set by name, a download in its original layout, or an image folder."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainer.data.array_split import ClassSubset, SplitImages
from trainer.data.class_list import read_class_list
from trainer.data.index import Index
from trainer.data.index_build import (
    LAYOUT,
    SPLIT_NAMES,
    WHOLE_FOLDER,
    build_folder,
    find_class_names,
    list_class_folders,
)
from trainer.data.index_file import write_index
from trainer.data.named_datasets import SETS, load_split
from trainer.data.original_layouts import describe_layouts, find_layout
from trainer.data.tar_shards import PICTURE_SUFFIXES, list_shard_splits
from trainer.data.tiny_imagenet import is_tiny_imagenet
from trainer.errors import InputError

_log = logging.getLogger(__name__)


class OpenedSplit(NamedTuple):
    """A split of a source."""

    images: SplitImages
    skipped: list[tuple[str, str]]  # (name, problem) of each file that cannot be used


class Source(NamedTuple):
    """A data set: its splits, and a function that opens one of them with (split, folder for scratch files)."""

    splits: list[str]
    open_split: Callable[[str, Path], OpenedSplit]


def find_source(source: str, dest: Path, classes: Path | None, download_dir: Path, progress: bool) -> Source:
    """Find out what a source is.

    dest: where it will be written. classes: a file that lists the classes to take (`class_list`); None: all.
    Raises InputError with the layouts that are recognised if it is none of them, and for a `dest` inside an image folder.
    """
    if source in SETS:
        return Source(list(SETS[source].splits), lambda split, _: _open_named(source, split, download_dir))
    # Anything that is not the name of a set is a path.
    path = Path(source).expanduser()
    known = f"It must be a folder or archive in one of these layouts:\n{describe_layouts()}"
    if not path.exists():
        raise InputError(f"{source}: neither a folder nor a known set ({', '.join(SETS)}). {known}")
    if found := find_layout(path):
        layout, located = found
        _log.info("%s: reading it as %s (%s)", located, layout.title, layout.holds)

        def open_layout(split: str, scratch: Path) -> OpenedSplit:
            images = layout.open_split(located, split, scratch, progress)
            return OpenedSplit(images if classes is None else _select(images, split, classes), [])

        return Source(layout.list_splits(located), open_layout)
    if not path.is_dir():
        raise InputError(f"{path}: is not the archive of a known set (for ImageNet's tars, give their folder). {known}")
    # Tell the user about tar shards instead of complaining about missing class folders.
    if list_shard_splits(path):
        raise InputError(f"{path}: holds tar shards, which can be trained on as they are; prepare takes image folders")
    return _find_folder(path, dest, classes, known, progress)


def _find_folder(path: Path, dest: Path, classes: Path | None, known: str, progress: bool) -> Source:
    """Find out what the folders of an image folder are: splits, classes or neither. Raises InputError if it is empty."""
    if is_tiny_imagenet(path / "tiny-imagenet-200"):
        path = path / "tiny-imagenet-200"
    folders = list_class_folders(path)
    if not folders and not _holds_images(path):
        raise InputError(f"{path}: no folders in it, and no images; {LAYOUT}. {known}")
    # Later the shards would count as a split or a class of the folder.
    if dest.resolve().is_relative_to(path.resolve()):
        raise InputError(f"{dest}: lies inside {path}, whose images it is made of: give a folder outside")
    # One folder with the name of a split is enough: the others are then splits too.
    if any(name in SPLIT_NAMES for name in folders):
        return Source(folders, lambda split, scratch: _open_folder(path, split, None, classes, scratch, progress))
    if _holds_images(path):
        _log.info("%s: has images of its own, so all images below it become the split train, without labels", path)
        if classes is not None:
            raise InputError(f"{path}: --classes takes class folders, but its images are in none")
        # An empty list of classes means no labels.
        return Source(["train"], lambda split, scratch: _open_folder(path, WHOLE_FOLDER, [], None, scratch, progress))
    # Without such a name, folders that hold images themselves can only be classes.
    if any(_holds_images(path / name) for name in folders):
        _log.info(
            "%s: has no folder named like a split (%s), so its %d folders are classes and become the split train",
            path,
            ", ".join(SPLIT_NAMES),
            len(folders),
        )
        return Source(
            ["train"], lambda split, scratch: _open_folder(path, WHOLE_FOLDER, None, classes, scratch, progress)
        )
    return Source(folders, lambda split, scratch: _open_folder(path, split, None, classes, scratch, progress))


def _holds_images(folder: Path) -> bool:
    """Return whether a folder has a file with the suffix of an image."""
    names = (entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    return any(name.rpartition(".")[2].lower() in PICTURE_SUFFIXES for name in names)


def _open_named(source: str, split: str, download_dir: Path) -> OpenedSplit:
    # A published data set is loaded as arrays and has no files to skip.
    download_dir.mkdir(parents=True, exist_ok=True)
    return OpenedSplit(load_split(source, split, download_dir), [])


def _open_folder(
    root: Path,
    split: str,
    listed: list[str] | None,
    classes: Path | None,
    scratch: Path,
    progress: bool,
) -> OpenedSplit:
    """Index a split of an image folder. listed: as `classes` of `list_folder`; the file `classes` replaces it."""
    if classes is not None:
        listed = read_class_list(classes, find_class_names(root, split))
    # Inspect all files of the split and skip those that are not images.
    content, notes = build_folder(root, split, progress, listed)
    for note in notes:
        _log.warning("%s", note)
    # The index of the source is temporary: it is deleted with the other scratch files.
    path = scratch / f"{split}.index"
    write_index(path, content)
    return OpenedSplit(Index(path, root), content.skipped)


def _select(images: SplitImages, split: str, classes: Path) -> SplitImages:
    """Return the images of the classes that a file lists. Raises InputError if the split has none of them."""
    subset = ClassSubset(images, read_class_list(classes, images.class_names))
    if not len(subset):
        raise InputError(
            f"split {split}: has no image of the listed classes: exclude it by naming the others with --splits"
        )
    return subset
