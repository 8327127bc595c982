"""Looks at an image folder as it lies (ImageNet's layout) and makes an index's content of it."""

import logging
import os
import stat
from collections.abc import Iterable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from trainer.data.formats import HEAD_BYTES, ImageInfo, inspect_head, inspect_image
from trainer.data.index_file import Columns, IndexContent
from trainer.data.printable import printable
from trainer.errors import InputError

LAYOUT = "expected ROOT/SPLIT/CLASS/IMAGE (such as train/n01440764/n01440764_18.JPEG) or shards ROOT/SPLIT-000000.tar"
READ_THREADS = min(32, 4 * (os.cpu_count() or 1))  # reading heads waits for the disk, not for the processor

_log = logging.getLogger(__name__)

Verdict = tuple[int, ImageInfo]  # (size of the file in bytes, what it is)


class Listing(NamedTuple):
    """The files of one split. `names` are below the class folder; `folders` are (path below the split, mtime in ns)."""

    labels: list[int]
    names: list[str]
    class_names: list[str]
    folders: list[tuple[str, int]]
    notes: list[str]  # what looks unintended, with counts


def list_class_folders(folder: Path) -> list[str]:
    """Names of the class folders, sorted as text ('100' before '2', as ImageNet's own lists and torchvision have it)."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def find_class_names(root: Path, split: str) -> list[str]:
    """The classes that labels count: the training split's folders, or the split's own where there is no training split."""
    train = root / "train"
    return list_class_folders(train if train.is_dir() else root / split)


def list_folder(root: Path, split: str, classes: Sequence[str] | None = None) -> Listing:
    """List ROOT/SPLIT/CLASS/**; hidden files and folders are ignored. Raises InputError naming path and expected layout.

    classes: the only ones to take, else all."""
    folder = root / split
    class_names = find_class_names(root, split) if classes is None else list(classes)
    present = [name for name in list_class_folders(folder) if classes is None or name in class_names]
    if set(present).isdisjoint(class_names):
        raise InputError(_explain_no_classes(folder, present, class_names))
    listing = Listing(
        [], [], class_names, [("", folder.stat().st_mtime_ns)], _note_oddities(folder, present, class_names)
    )
    empty = []
    for label, class_name in enumerate(class_names):
        found = _list_class(folder, class_name, listing.folders) if class_name in present else []
        listing.names.extend(found)
        listing.labels.extend([label] * len(found))
        if class_name in present and not found:
            empty.append(class_name)
    if not listing.names:
        raise InputError(f"{folder}: its class folders ({_some(present)}) hold no files; {LAYOUT}")
    if empty:
        listing.notes.append(f"{folder}: {len(empty)} class folders without a file ({_some(empty)})")
    return listing


def build_folder(
    root: Path, split: str, progress: bool, classes: Sequence[str] | None = None
) -> tuple[IndexContent, list[str]]:
    """Content of a folder's index, and notes for the user. Reads the first bytes of every file, in threads.

    classes: as for `list_folder`."""
    listing = list_folder(root, split, classes)
    names = [f"{listing.class_names[label]}/{name}" for label, name in zip(listing.labels, listing.names, strict=True)]
    with ThreadPool(READ_THREADS) as pool:
        found = pool.imap(_inspect_file, (os.path.join(root, split, name) for name in names), chunksize=256)
        verdicts = list(with_progress(found, len(names), f"index {split}", progress))
    metadata = {"split": split, "class_names": listing.class_names, "folders": listing.folders}
    columns = {"label": np.array(listing.labels, "<i4")}
    return assemble_content(columns, listing.names, verdicts, metadata, names), listing.notes


def inspect_stored(descriptor: int, offset: int, nbytes: int) -> ImageInfo:
    """Verdict on nbytes of an open file from `offset` on; reads all of them only where the first ones do not settle it."""
    if nbytes >= 2**31:
        return ImageInfo("bad", "", 0, 0, "2 GiB or larger")
    if nbytes <= HEAD_BYTES:
        return inspect_image(os.pread(descriptor, nbytes, offset))
    return inspect_head(os.pread(descriptor, HEAD_BYTES, offset)) or inspect_image(os.pread(descriptor, nbytes, offset))


def open_without_waiting(path: str, flags: int) -> int:
    """An opener for `open`: a named pipe that nobody writes to is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def assemble_content(
    columns: Columns, names: list[str], verdicts: list[Verdict], metadata: dict[str, Any], display_names: list[str]
) -> IndexContent:
    """Join columns and verdicts; bad files are left out and listed. Raises InputError where no image remains."""
    kept = np.array([info.kind != "bad" for _, info in verdicts], bool)
    bad = [
        (printable(name), info.problem)
        for name, (_, info) in zip(display_names, verdicts, strict=True)
        if info.kind == "bad"
    ]
    if not kept.any():
        first = f"; {bad[0][0]}: {bad[0][1]}" if bad else ""
        raise InputError(f"split {metadata['split']}: no image among {len(names)} files{first}; {LAYOUT}")
    columns = {name: array[kept] for name, array in columns.items()}
    columns["height"] = np.array([info.height for _, info in verdicts], "<i4")[kept]
    columns["width"] = np.array([info.width for _, info in verdicts], "<i4")[kept]
    columns["nbytes"] = np.array([nbytes for nbytes, _ in verdicts], "<u4")[kept]
    columns["kind"] = np.array([info.kind == "convert" for _, info in verdicts], "u1")[kept]
    return IndexContent(columns, [name for name, keep in zip(names, kept, strict=True) if keep], metadata, bad)


def log_left_out(content: IndexContent, bad_list: Path) -> None:
    """Say how many files were left out and name the first; all are in `bad_list`."""
    if content.bad:
        _log.warning(
            "split %s: %d of %d files are no usable pictures, left out: %s; all in %s",
            content.metadata["split"],
            len(content.bad),
            len(content.bad) + len(content.names),
            "; ".join(f"{name}: {problem}" for name, problem in content.bad[:3]),
            bad_list,
        )


def with_progress(items: Iterable[Any], total: int, title: str, progress: bool) -> Iterable[Any]:
    """The same items, with a progress bar on stderr where wanted."""
    return track(items, title, total, console=Console(stderr=True)) if progress else items


def _list_class(folder: Path, class_name: str, folders: list[tuple[str, int]]) -> list[str]:
    """Files below one class folder, also nested ones (Tiny ImageNet's CLASS/images/), as sorted paths below it."""
    found: list[str] = []
    pending = [""]
    visited = set()  # a link may lead back to a folder above
    while pending:
        below = pending.pop()
        path = os.path.join(folder, class_name, below)
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        folders.append((os.path.join(class_name, below), status.st_mtime_ns))
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (pending if _is_folder(entry) else found).append(os.path.join(below, entry.name))
    return sorted(found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: named as a file that can't be read
        return False


def _inspect_file(path: str) -> Verdict:
    try:
        with open(path, "rb", buffering=0, opener=open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return 0, ImageInfo("bad", "", 0, 0, "a pipe, socket or device")
            nbytes = status.st_size
            return nbytes, inspect_stored(file.fileno(), 0, nbytes)
    except OSError as error:
        return 0, ImageInfo("bad", "", 0, 0, f"cannot be read: {error.strerror}")


def _explain_no_classes(folder: Path, present: list[str], class_names: list[str]) -> str:
    if present:
        return (
            f"{folder}: none of its {len(present)} folders ({_some(present)}) is a class of the training split "
            f"({_some(class_names)}); sort the images into folders named like those; {LAYOUT}"
        )
    loose = len(_loose_files(folder))
    return f"{folder}: {f'{loose} files lie loose in it, without class folders' if loose else 'it is empty'}; {LAYOUT}"


def _note_oddities(folder: Path, present: list[str], class_names: list[str]) -> list[str]:
    notes = []
    if extra := sorted(set(present) - set(class_names)):
        notes.append(f"{folder}: {len(extra)} folders are no class of the training split, left out ({_some(extra)})")
    if missing := sorted(set(class_names) - set(present)):
        notes.append(f"{folder}: {len(missing)} classes of the training split have no folder ({_some(missing)})")
    if loose := _loose_files(folder):
        notes.append(f"{folder}: {len(loose)} files lie beside the class folders, left out ({_some(loose)}); {LAYOUT}")
    return notes


def _loose_files(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_file() and not entry.name.startswith("."))


def _some(names: Sequence[str]) -> str:
    return ", ".join(printable(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
