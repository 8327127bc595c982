"""Build the content of an index from an image folder in ImageNet's layout."""

import logging
import os
import stat
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.data import tiny_imagenet
from trainer.data.image_probe import HEAD_BYTES, ImageInfo, inspect_head, inspect_image
from trainer.data.index_file import Columns, IndexContent
from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.files import refuse_machine_fault
from trainer.progress import with_progress

LAYOUT = "expected ROOT/SPLIT/CLASS/IMAGE (such as train/n01440764/n01440764_18.JPEG) or shards ROOT/SPLIT-000000.tar"
SPLIT_NAMES = ("train", "val", "valid", "validation", "test")  # usual names of splits
WHOLE_FOLDER = "."  # the split of a folder that is not divided into splits
TOO_LARGE_BYTES = 2**31
TOO_LARGE = "2 GiB or larger"
# Reading the first bytes of files waits for the disk, not for the processor, so there are more threads than cores.
READ_THREADS = min(32, 4 * (os.cpu_count() or 1))

_log = logging.getLogger(__name__)

Verdict = tuple[int, ImageInfo]  # size of the file in bytes, and what the file is


class Listing(NamedTuple):
    """The files of one split."""

    labels: list[int]  # -1: no label
    names: list[str]  # relative to the class folder, or to the split for a file without a label
    class_names: list[str]
    folders: list[tuple[str, int]]  # path below the split, modification time in nanoseconds
    notes: list[str]  # what looks unintended, with counts
    is_flat: bool = False  # all names are relative to the split, because a file of the split holds the labels

    def paths(self) -> list[str]:
        """Return the path of each file below the split."""
        if self.is_flat:
            return self.names
        labelled_names = zip(self.labels, self.names, strict=True)
        return [file_name(self.class_names, label, name) for label, name in labelled_names]


# Sorted names make the index the same on every file system.
class _Entries(NamedTuple):
    """The names of a folder's entries except hidden ones; each list is sorted as text."""

    folders: list[str]
    files: list[str]
    broken_links: list[str]


def _list_entries(folder: Path) -> _Entries:
    """List a folder. A broken link leads to a file that does not exist, or to itself."""
    found = _Entries([], [], [])
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            # Hidden files belong to the system or to other programs.
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not os.path.exists(entry.path):
                found.broken_links.append(entry.name)
            elif entry.is_dir():
                found.folders.append(entry.name)
            else:
                found.files.append(entry.name)
    return found


def list_class_folders(folder: Path) -> list[str]:
    """Return the names of the class folders, sorted as text: '100' before '2', as in ImageNet's own lists and torchvision."""
    return _list_entries(folder).folders


def find_class_names(root: Path, split: str) -> list[str]:
    """Return the class names by label: the folders of the training split or, if it has none, those of the split itself.

    Tiny ImageNet lists its classes in files, which count if there is no training split.
    """
    # All splits take their labels from the training split, so that a class has the same label everywhere.
    train = root / "train"
    names = []
    if split != WHOLE_FOLDER and train.is_dir():
        names = list_class_folders(train)
    # Otherwise the folder images/ would be taken for a class.
    if not names and tiny_imagenet.has_annotations(root / split):
        annotated = tiny_imagenet.read_annotations(root / split).values()
        names = tiny_imagenet.read_classes(root) or sorted(set(annotated))
    return names or list_class_folders(root / split)


def list_folder(root: Path, split: str, classes: Sequence[str] | None = None) -> Listing:
    """List ROOT/SPLIT/CLASS/**, or everything below ROOT/SPLIT without labels if none of its folders is a class.

    Hidden files and folders are ignored. classes: list only these classes; None: all; none: list everything without labels.
    Raises InputError naming path and expected layout if there are no files.
    """
    folder = root / split
    # Labels follow the class list if there is one, otherwise the folders of the training split.
    class_names = find_class_names(root, split) if classes is None else list(classes)
    entries = _list_entries(folder)
    is_flat = tiny_imagenet.has_annotations(folder) and set(entries.folders).isdisjoint(class_names)
    if classes and not is_flat:
        entries = _keep_classes(entries, folder, classes)
    # The folder itself belongs to the listing: its modification time changes when a class is added.
    listing = Listing([], [], class_names, [("", folder.stat().st_mtime_ns)], [])
    if is_flat:
        listing = _list_annotated(listing, folder)
    # Without class folders, every file below the split is an image without a label.
    elif set(entries.folders).isdisjoint(class_names):
        _add_unlabelled(listing, folder, entries)
    else:
        _add_classes(listing, folder, entries, has_boxes=tiny_imagenet.is_tiny_imagenet(root))
    if not listing.names:
        raise InputError(f"{folder}: there are no files in it; {LAYOUT}")
    return listing


def _keep_classes(entries: _Entries, folder: Path, classes: Sequence[str]) -> _Entries:
    """Drop the folders that are not in `classes`. Raises InputError if no folder remains."""
    kept = [name for name in entries.folders if name in classes]
    if not kept:
        raise InputError(
            f"{folder}: has no folder of the listed classes: exclude this split by naming the others with --splits"
        )
    return entries._replace(folders=kept)


def _add_unlabelled(listing: Listing, folder: Path, entries: _Entries) -> None:
    """Add all files below the folder to the listing, without labels."""
    listing.folders.clear()  # `_list_files` adds the folder itself as well
    names = _list_files(folder, "", listing.folders)
    listing.names.extend(names)
    listing.labels.extend([-1] * len(names))
    listing.notes.extend(_note_unlabelled(folder, entries, listing.class_names, len(names)))


def _list_annotated(listing: Listing, folder: Path) -> Listing:
    """Return a listing of Tiny ImageNet's split val, whose images lie in one folder and whose classes lie in a file."""
    annotations = tiny_imagenet.read_annotations(folder)
    # The listing is outdated as well when the file of labels changes.
    modified = (folder / tiny_imagenet.ANNOTATIONS).stat().st_mtime_ns
    listing.folders.append((tiny_imagenet.ANNOTATIONS, modified))
    numbers = {name: label for label, name in enumerate(listing.class_names)}
    unknown = []
    for name in _list_files(folder, tiny_imagenet.IMAGES, listing.folders):
        # No class has an empty name, so an image without an annotation is unknown as well.
        label = numbers.get(annotations.get(name, ""))
        if label is None:
            unknown.append(name)
            continue
        listing.names.append(f"{tiny_imagenet.IMAGES}/{name}")
        listing.labels.append(label)
    if unknown:
        note = (
            f"{folder}: {len(unknown)} files are skipped, because {tiny_imagenet.ANNOTATIONS} gives them no class that is "
            f"used ({some_names(unknown)})"
        )
        if not listing.names:
            raise InputError(
                f"{note}, and no other files are there: get that file again, or delete it to have no labels"
            )
        listing.notes.append(note)
    return listing._replace(is_flat=True)


def _add_classes(listing: Listing, folder: Path, entries: _Entries, has_boxes: bool) -> None:
    """Add the files of all class folders to the listing, in the order of their labels.

    has_boxes: each class folder of Tiny ImageNet has a list of boxes, which is no image.
    """
    class_names = listing.class_names
    listing.notes.extend(_note_oddities(folder, entries, class_names))
    # A folder that is no class of the training split has no label.
    found_classes = set(entries.folders) & set(class_names)
    for label in sorted(map(class_names.index, found_classes)):
        names = _list_files(folder, class_names[label], listing.folders)
        if has_boxes:
            names = [name for name in names if not tiny_imagenet.is_boxes_file(class_names[label], name)]
        listing.names.extend(names)
        listing.labels.extend([label] * len(names))
        if not names:
            listing.notes.append(f"{folder}: the class folder {printable(class_names[label])} holds no files")


def build_folder(
    root: Path,
    split: str,
    progress: bool,
    classes: Sequence[str] | None = None,
) -> tuple[IndexContent, list[str]]:
    """Build the content of a folder's index and notes for the user. Many threads read the first bytes of every file.

    classes: as for `list_folder`. Raises InputError as `list_folder` and `assemble_content` do.
    """
    listing = list_folder(root, split, classes)
    # Paths below the split, to open the files and to name them in messages.
    names = listing.paths()
    folder = root / split
    paths = (os.path.join(folder, name) for name in names)
    with ThreadPool(READ_THREADS) as pool:
        # imap keeps the order of the names.
        found = pool.imap(_inspect_file, paths, chunksize=256)
        verdicts = list(with_progress(found, len(names), f"index {split}", progress))
    metadata: dict[str, Any] = {
        "split": split,
        "class_names": listing.class_names,
        "folders": listing.folders,
    }
    if listing.is_flat:
        metadata["is_flat"] = True
    # The verdicts add the other columns.
    columns = {"label": np.array(listing.labels, "<i4")}
    return assemble_content(columns, listing.names, verdicts, metadata, names), listing.notes


def file_name(class_names: Sequence[str], label: int, name: str) -> str:
    """Return the path of an image below its split: CLASS/NAME, or just NAME for an image without a label."""
    return name if label < 0 else f"{class_names[label]}/{name}"


def inspect_stored(descriptor: int, offset: int, nbytes: int) -> ImageInfo:
    """Judge the image in bytes [offset, offset + nbytes) of an open file. Raises OSError.

    The whole image is read only if its first bytes are not enough.
    """
    if nbytes >= TOO_LARGE_BYTES:
        return ImageInfo("bad", "", 0, 0, TOO_LARGE)
    if nbytes > HEAD_BYTES:
        # The head is enough for most photographs.
        info = inspect_head(os.pread(descriptor, HEAD_BYTES, offset))
        if info is not None:
            return info
    return inspect_image(os.pread(descriptor, nbytes, offset))


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking on a named pipe that has no writer. This is an opener for `open`."""
    return os.open(path, flags | os.O_NONBLOCK)


def assemble_content(
    columns: Columns,
    names: list[str],
    verdicts: list[Verdict],
    metadata: dict[str, Any],
    display_names: list[str],
) -> IndexContent:
    """Join columns and verdicts to the content of an index, which lists the bad files as skipped.

    columns, names, verdicts, display_names: one entry for each file; display_names are for messages. Raises InputError if no
    image remains.
    """
    # One flag for each file: keep it or not.
    kept = np.array([info.kind != "bad" for _, info in verdicts], bool)
    skipped = []
    for name, (_, info) in zip(display_names, verdicts, strict=True):
        if info.kind == "bad":
            skipped.append((printable(name), info.problem))
    if not kept.any():
        split = metadata["split"]
        first = ""
        if skipped:
            name, problem = skipped[0]
            first = f"; {name}: {problem}"
        raise InputError(f"split {split}: no image among {len(names)} files{first}; {LAYOUT}")
    # Keep the rows of the images, and add the columns that the verdicts fill.
    images = [(nbytes, info) for nbytes, info in verdicts if info.kind != "bad"]
    columns = {name: array[kept] for name, array in columns.items()}
    columns["height"] = np.array([info.height for _, info in images], "<i4")
    columns["width"] = np.array([info.width for _, info in images], "<i4")
    columns["nbytes"] = np.array([nbytes for nbytes, _ in images], "<u4")
    columns["kind"] = np.array([info.kind == "convert" for _, info in images], "u1")
    image_names = [name for name, keep in zip(names, kept, strict=True) if keep]
    return IndexContent(columns, image_names, metadata, skipped)


def log_skipped(content: IndexContent, skipped_list: Path) -> None:
    """Log how many files were skipped and name the first three; `skipped_list` is the file that lists all of them."""
    if not content.skipped:
        return
    num_files = len(content.skipped) + len(content.names)
    examples = "; ".join(f"{name}: {problem}" for name, problem in content.skipped[:3])
    _log.warning(
        "split %s: skipped %d of %d files that are not usable images: %s; %s lists all of them",
        content.metadata["split"],
        len(content.skipped),
        num_files,
        examples,
        skipped_list,
    )


def _list_files(folder: Path, below_folder: str, folders: list[tuple[str, int]]) -> list[str]:
    """Return all files below FOLDER/BELOW_FOLDER as sorted relative paths; add each folder to `folders`.

    Nested folders are searched as well (Tiny ImageNet has CLASS/images/).
    """
    found: list[str] = []
    pending = [""]  # folders still to be listed
    visited = set()  # a symbolic link may lead back to a parent folder
    while pending:
        below = pending.pop()
        path = folder / below_folder / below
        # A folder is identified by device and inode, whatever its path.
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        if identity in visited:
            continue
        visited.add(identity)
        folders.append((os.path.join(below_folder, below), status.st_mtime_ns))
        entries = _list_entries(path)
        # Folders inside a class folder belong to the same class.
        pending += [os.path.join(below, name) for name in entries.folders]
        found += [os.path.join(below, name) for name in entries.files]
        # A broken link is listed like a file; reading it fails and reports it.
        found += [os.path.join(below, name) for name in entries.broken_links]
    return sorted(found)


def _inspect_file(path: str) -> Verdict:
    """Judge a file; one that cannot be read is bad. Raises InputError if the machine is at fault and not the file."""
    try:
        with open(path, "rb", buffering=0, opener=open_without_waiting) as file:
            status = os.fstat(file.fileno())
            # Reading from a pipe or device could block or never end.
            if not stat.S_ISREG(status.st_mode):
                return 0, ImageInfo("bad", "", 0, 0, "a pipe, socket or device")
            nbytes = status.st_size
            return nbytes, inspect_stored(file.fileno(), 0, nbytes)
    except OSError as error:
        # A fault of the machine, such as too many open files, must not mark the image as bad.
        refuse_machine_fault(error)
        return 0, ImageInfo("bad", "", 0, 0, f"cannot be read: {error.strerror}")


def _note_unlabelled(folder: Path, entries: _Entries, class_names: list[str], count: int) -> list[str]:
    """Say why the files of a folder get no labels."""
    if not entries.folders:
        return [f"{folder} has no class folders; its {count} files are used without labels"]
    if not class_names:
        return [f"{folder}: its {count} files, also those in folders, are used without labels"]
    found = some_names(entries.folders)
    expected = some_names(class_names)
    return [
        f"{folder}: none of its {len(entries.folders)} folders ({found}) is a class of the training split ({expected}): its "
        f"{count} files are used without labels; for labels, sort them into folders with those names"
    ]


def _note_oddities(folder: Path, entries: _Entries, class_names: list[str]) -> list[str]:
    """Describe what looks unintended in a folder of class folders."""
    notes = []
    # Folders of this split without a class, and classes without a folder in this split.
    if extra := sorted(set(entries.folders) - set(class_names)):
        notes.append(
            f"{folder}: {len(extra)} folders are not classes of the training split and are skipped "
            f"({some_names(extra)})"
        )
    if missing := sorted(set(class_names) - set(entries.folders)):
        notes.append(f"{folder}: {len(missing)} classes of the training split have no folder ({some_names(missing)})")
    # Files and links that lie where only class folders are expected.
    if loose := entries.files:
        notes.append(
            f"{folder}: {len(loose)} files next to the class folders are skipped ({some_names(loose)}); {LAYOUT}"
        )
    if broken := entries.broken_links:
        notes.append(f"{folder}: {len(broken)} links are broken and are skipped ({some_names(broken)})")
    return notes


def some_names(names: Sequence[str]) -> str:
    """Join the first five names for a message."""
    first = ", ".join(printable(name) for name in names[:5])
    return first + (", ..." if len(names) > 5 else "")
