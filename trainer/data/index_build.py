"""Build the content of an index from an image folder in ImageNet's layout."""

import logging
import os
import stat
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.data.image_probe import HEAD_BYTES, ImageInfo, inspect_head, inspect_image
from trainer.data.index_file import Columns, IndexContent
from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.files import refuse_machine_fault
from trainer.progress import with_progress

LAYOUT = "expected ROOT/SPLIT/CLASS/IMAGE (such as train/n01440764/n01440764_18.JPEG) or shards ROOT/SPLIT-000000.tar"
WHOLE_FOLDER = "."  # the split of a folder that is not divided into splits
TOO_LARGE_BYTES, TOO_LARGE = 2**31, "2 GiB or larger"
READ_THREADS = min(
    32, 4 * (os.cpu_count() or 1)
)  # reading the first bytes of files waits for the disk, not for the processor

_log = logging.getLogger(__name__)

Verdict = tuple[int, ImageInfo]  # (size of the file in bytes, what it is)


class Listing(NamedTuple):
    """The files of one split. `names` are relative to the class folder, or to the split if the label is -1; `folders` are
    (path below the split, mtime in ns)."""

    labels: list[int]
    names: list[str]
    class_names: list[str]
    folders: list[tuple[str, int]]
    notes: list[str]  # what looks unintended, with counts


class _Entries(NamedTuple):
    """The entries of a folder except hidden ones, each list sorted as text."""

    folders: list[str]
    files: list[str]
    broken_links: list[str]


def _list_entries(folder: Path) -> _Entries:
    found = _Entries([], [], [])
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            is_broken = entry.is_symlink() and not os.path.exists(entry.path)
            kind = found.broken_links if is_broken else found.folders if entry.is_dir() else found.files
            kind.append(entry.name)
    return found


def list_class_folders(folder: Path) -> list[str]:
    """List the class folders, sorted as text ('100' before '2', as in ImageNet's own lists and torchvision)."""
    return _list_entries(folder).folders


def find_class_names(root: Path, split: str) -> list[str]:
    """Return the class names by label: the folders of the training split, or the split's own if that has none."""
    train = root / "train"
    names = list_class_folders(train) if split != WHOLE_FOLDER and train.is_dir() else []
    return names or list_class_folders(root / split)


def list_folder(root: Path, split: str, classes: Sequence[str] | None = None) -> Listing:
    """List ROOT/SPLIT/CLASS/**, or everything below ROOT/SPLIT without labels if no folder in it is a class.

    Hidden files and folders are ignored. classes: the only ones to take; None: all. Raises InputError naming path and expected
    layout if there are no files."""
    folder = root / split
    class_names = find_class_names(root, split) if classes is None else list(classes)
    entries = _list_entries(folder)
    if classes is not None:
        entries = entries._replace(folders=[name for name in entries.folders if name in classes])
        if not entries.folders:
            raise InputError(
                f"{folder}: has no folder of the listed classes: leave this split out by naming the others with --splits"
            )
    listing = Listing([], [], class_names, [("", folder.stat().st_mtime_ns)], [])
    if set(entries.folders).isdisjoint(class_names):
        listing.folders.clear()  # `_list_files` adds the folder itself, too
        listing.names.extend(_list_files(folder, "", listing.folders))
        listing.labels.extend([-1] * len(listing.names))
        listing.notes.extend(_note_unlabelled(folder, entries, class_names, len(listing.names)))
    else:
        listing.notes.extend(_note_oddities(folder, entries, class_names))
        for label in sorted(map(class_names.index, set(entries.folders) & set(class_names))):
            found = _list_files(folder, class_names[label], listing.folders)
            listing.names.extend(found)
            listing.labels.extend([label] * len(found))
            if not found:
                listing.notes.append(f"{folder}: the class folder {printable(class_names[label])} holds no files")
    if not listing.names:
        raise InputError(f"{folder}: there are no files in it; {LAYOUT}")
    return listing


def build_folder(
    root: Path, split: str, progress: bool, classes: Sequence[str] | None = None
) -> tuple[IndexContent, list[str]]:
    """Build the content of a folder's index, and notes for the user. Reads the first bytes of every file, in threads.

    classes: as for `list_folder`, which also raises its InputError."""
    listing = list_folder(root, split, classes)
    names = [
        file_name(listing.class_names, label, name) for label, name in zip(listing.labels, listing.names, strict=True)
    ]
    with ThreadPool(READ_THREADS) as pool:
        found = pool.imap(_inspect_file, (os.path.join(root, split, name) for name in names), chunksize=256)
        verdicts = list(with_progress(found, len(names), f"index {split}", progress))
    metadata = {"split": split, "class_names": listing.class_names, "folders": listing.folders}
    columns = {"label": np.array(listing.labels, "<i4")}
    return assemble_content(columns, listing.names, verdicts, metadata, names), listing.notes


def file_name(class_names: Sequence[str], label: int, name: str) -> str:
    """Return the path of an image below its split: CLASS/NAME, or NAME if it has no label."""
    return name if label < 0 else f"{class_names[label]}/{name}"


def inspect_stored(descriptor: int, offset: int, nbytes: int) -> ImageInfo:
    """Judge the image in nbytes of an open file from `offset` on; read all of them only if the first ones are not enough."""
    if nbytes >= TOO_LARGE_BYTES:
        return ImageInfo("bad", "", 0, 0, TOO_LARGE)
    if nbytes <= HEAD_BYTES:
        return inspect_image(os.pread(descriptor, nbytes, offset))
    return inspect_head(os.pread(descriptor, HEAD_BYTES, offset)) or inspect_image(os.pread(descriptor, nbytes, offset))


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting for a writer, if it is a named pipe. An opener for `open`."""
    return os.open(path, flags | os.O_NONBLOCK)


def assemble_content(
    columns: Columns, names: list[str], verdicts: list[Verdict], metadata: dict[str, Any], display_names: list[str]
) -> IndexContent:
    """Join columns and verdicts; leave out bad files and list them. Raises InputError if no image remains."""
    kept = np.array([info.kind != "bad" for _, info in verdicts], bool)
    bad = [
        (printable(name), info.problem)
        for name, (_, info) in zip(display_names, verdicts, strict=True)
        if info.kind == "bad"
    ]
    if not kept.any():
        first = f"; {bad[0][0]}: {bad[0][1]}" if bad else ""
        raise InputError(f"split {metadata['split']}: no image among {len(names)} files{first}; {LAYOUT}")
    infos = [(nbytes, info) for nbytes, info in verdicts if info.kind != "bad"]
    columns = {name: array[kept] for name, array in columns.items()}
    columns["height"] = np.array([info.height for _, info in infos], "<i4")
    columns["width"] = np.array([info.width for _, info in infos], "<i4")
    columns["nbytes"] = np.array([nbytes for nbytes, _ in infos], "<u4")
    columns["kind"] = np.array([info.kind == "convert" for _, info in infos], "u1")
    return IndexContent(columns, [name for name, keep in zip(names, kept, strict=True) if keep], metadata, bad)


def log_left_out(content: IndexContent, bad_list: Path) -> None:
    """Log how many files were left out, and the first of them; all are in `bad_list`."""
    if content.bad:
        _log.warning(
            "split %s: %d of %d files are not usable images and were left out: %s; %s lists all",
            content.metadata["split"],
            len(content.bad),
            len(content.bad) + len(content.names),
            "; ".join(f"{name}: {problem}" for name, problem in content.bad[:3]),
            bad_list,
        )


def _list_files(folder: Path, below_folder: str, folders: list[tuple[str, int]]) -> list[str]:
    """List all files below FOLDER/BELOW_FOLDER, nested ones as well (Tiny ImageNet's CLASS/images/), as sorted relative
    paths."""
    found: list[str] = []
    pending = [""]
    visited = set()  # a link may lead back to a folder above
    while pending:
        below = pending.pop()
        path = folder / below_folder / below
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        folders.append((os.path.join(below_folder, below), status.st_mtime_ns))
        entries = _list_entries(path)
        pending += [os.path.join(below, name) for name in entries.folders]
        # a broken link is named as a file that can't be read
        found += [os.path.join(below, name) for name in (*entries.files, *entries.broken_links)]
    return sorted(found)


def _inspect_file(path: str) -> Verdict:
    try:
        with open(path, "rb", buffering=0, opener=open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return 0, ImageInfo("bad", "", 0, 0, "a pipe, socket or device")
            nbytes = status.st_size
            return nbytes, inspect_stored(file.fileno(), 0, nbytes)
    except OSError as error:
        refuse_machine_fault(error)
        return 0, ImageInfo("bad", "", 0, 0, f"cannot be read: {error.strerror}")


def _note_unlabelled(folder: Path, entries: _Entries, class_names: list[str], count: int) -> list[str]:
    if not entries.folders:
        return [f"{folder}: has no class folders: its {count} files are used without labels"]
    return [
        f"{folder}: none of its {len(entries.folders)} folders ({some_names(entries.folders)}) is a class of the training "
        f"split ({some_names(class_names)}): its {count} files are used without labels; for labels, sort them into "
        "folders with those names"
    ]


def _note_oddities(folder: Path, entries: _Entries, class_names: list[str]) -> list[str]:
    notes = []
    if extra := sorted(set(entries.folders) - set(class_names)):
        notes.append(
            f"{folder}: {len(extra)} folders are not classes of the training split and are left out ({some_names(extra)})"
        )
    if missing := sorted(set(class_names) - set(entries.folders)):
        notes.append(f"{folder}: {len(missing)} classes of the training split have no folder ({some_names(missing)})")
    if entries.files:
        loose = entries.files
        notes.append(
            f"{folder}: {len(loose)} files beside the class folders are left out ({some_names(loose)}); {LAYOUT}"
        )
    if broken := entries.broken_links:
        notes.append(f"{folder}: {len(broken)} links are broken and are left out ({some_names(broken)})")
    return notes


def some_names(names: Sequence[str]) -> str:
    """Join the first five names, for a message."""
    return ", ".join(printable(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
