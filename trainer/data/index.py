"""The index of a split's images on disk.

It knows the label, the size in pixels, the name and the location of the bytes of each image, in tar shards or as files.
"""

import logging
import os
import resource
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainer.config.schema import DataConfig
from trainer.data.cache_folder import find_cache
from trainer.data.index_build import (
    LAYOUT,
    SPLIT_NAMES,
    build_folder,
    file_name,
    find_class_names,
    list_class_folders,
    log_skipped,
    open_without_waiting,
    some_names,
)
from trainer.data.index_file import (
    Columns,
    IndexContent,
    check_contents,
    is_inside,
    read_index,
    write_index,
)
from trainer.data.printable import printable
from trainer.data.tar_shards import (
    TAR_BLOCK,
    build_shards,
    describe_shards,
    list_shard_splits,
    list_shards,
    read_class_names,
    uncompress_shard,
)
from trainer.errors import InputError

_RULES = 3  # increased when the same files give a different index, so that indices of earlier versions are rebuilt
MAX_OPEN_SHARDS = 256  # well below the usual limit of 1,024 open files; further shards are opened for each read

_log = logging.getLogger(__name__)


class Index:
    """The images of one split, memory-mapped; `open_index` opens it. Safe to use from many threads.

    labels: (n,) int32, n = len(index); -1 for an image without a label.
    heights, widths: (n,) int32, in pixels as stored.
    class_names: the name of each label.
    root: folder of the data set.
    fingerprint: equal only for the same images in the same order with the same labels.
    """

    def __init__(self, path: Path, root: Path, shards: list[Path] | None = None) -> None:
        metadata, columns = read_index(path)
        num_shards = None if shards is None else len(shards)
        check_contents(path, metadata, columns, num_shards)
        # What an index of images always has; `check_contents` has verified it.
        self.split: str = metadata["split"]
        self.class_names: list[str] = metadata["class_names"]
        self.fingerprint: str = metadata["fingerprint"]
        self.labels: npt.NDArray[np.int32] = columns["label"]
        self.heights: npt.NDArray[np.int32] = columns["height"]
        self.widths: npt.NDArray[np.int32] = columns["width"]
        self._columns: Columns = columns
        self.root = root
        self.path = path
        # Where the bytes are: in a folder, or in shards.
        self._folder = root / self.split
        self._is_flat: bool = metadata.get("is_flat") is True
        self._shards = shards
        # Number of a shard -> its open file. The lock is held only to open another one.
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def unusable_files(self) -> Path:
        """Return the list of the files that were skipped when the split was indexed; it is missing if there are none."""
        return self.path.with_suffix(".skipped.txt")

    def count_unusable_files(self) -> int:
        """Count the files in that list."""
        return len(self.unusable_files.read_bytes().splitlines()) if self.unusable_files.exists() else 0

    def __del__(self) -> None:
        # The attribute is missing if __init__ raised an error.
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)

    @property
    def is_folder(self) -> bool:
        """Return whether the images are files in a folder and not members of shards."""
        return self._shards is None

    def kind(self, i: int) -> Literal["direct", "convert"]:
        """Return "direct" if DALI decodes image i as it is, "convert" if `image_probe.to_direct` has to convert it first."""
        return "convert" if self._columns["kind"][i] else "direct"

    def name(self, i: int) -> str:
        """Return image i's name for messages: CLASS/FILE or SHARD/MEMBER, with control characters escaped."""
        if self._shards is None:
            return printable(self._file_name(i))
        shard = self._shards[self._columns["shard"][i]]
        return printable(f"{shard.name}/{self._base_name(i)}")

    def place(self, i: int) -> tuple[Path, int, int]:
        """Return (shard, offset in bytes, number of bytes) of image i; only if the images are in shards."""
        assert self._shards is not None
        # The position is stored in blocks, which fits into 32 bits for shards up to 2 TiB.
        number = int(self._columns["shard"][i])
        offset = TAR_BLOCK * int(self._columns["block"][i])
        nbytes = int(self._columns["nbytes"][i])
        return self._shards[number], offset, nbytes

    def read(self, i: int) -> bytes:
        """Read image i's bytes. Raises OSError naming the file if it is missing, cut off or unreadable."""
        if self._shards is None:
            return _read_file(self._folder, self._file_name(i))
        shard, offset, nbytes = self.place(i)
        try:
            data = self._read_shard(int(self._columns["shard"][i]), nbytes, offset)
        except OSError as error:
            error.filename = error.filename or str(shard)  # pread does not set it
            raise
        # A short read means that the shard was cut after it was indexed.
        if len(data) != nbytes:
            name = self.name(i)
            raise OSError(f"{shard}: cut off: image {name} has {len(data)} of {nbytes} bytes")
        return data

    def _file_name(self, i: int) -> str:
        name = self._base_name(i)
        return name if self._is_flat else file_name(self.class_names, self.labels[i], name)

    def _base_name(self, i: int) -> str:
        # All names are stored one after the other; a name begins where the one before it ends.
        ends = self._columns["name_end"]
        start = ends[i - 1] if i else 0
        encoded = self._columns["names"][start : ends[i]].tobytes()
        return encoded.decode("utf-8", "surrogateescape")

    def _read_shard(self, number: int, nbytes: int, offset: int) -> bytes:
        """Read bytes from a shard, and once more after reopening it if the first read fails. Raises OSError."""
        assert self._shards is not None
        path = self._shards[number]
        descriptor = self._open_shard(number, path)
        # There are too many shards to keep all of them open: open this one for a single read.
        if descriptor is None:
            with path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), nbytes, offset)
        # pread takes the offset as an argument, so threads that share the descriptor do not disturb each other.
        try:
            return os.pread(descriptor, nbytes, offset)
        except OSError:
            _reopen(path, descriptor)
            return os.pread(descriptor, nbytes, offset)

    def _open_shard(self, number: int, path: Path) -> int | None:
        """Return the descriptor of a shard that stays open, or None if too many are open already. Raises OSError."""
        descriptor = self._descriptors.get(number)
        if descriptor is not None:
            return descriptor
        with self._lock:
            # Another thread may have opened it in the meantime.
            if number not in self._descriptors and len(self._descriptors) < _most_open_shards():
                self._descriptors[number] = os.open(path, os.O_RDONLY)
        return self._descriptors.get(number)


def _most_open_shards() -> int:
    """Return how many shards may stay open: a quarter of the files that this process may open, at most MAX_OPEN_SHARDS."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_OPEN_SHARDS, most_files // 4)


def _read_file(folder: Path, name: str) -> bytes:
    """Read FOLDER/NAME, where the name is from an index that may come from elsewhere. Raises OSError.

    Only a regular file is read: reading from a named pipe, for example, could block forever.
    """
    # The name must not lead out of the folder.
    if not is_inside(name):
        raise OSError(f"{folder}: the index names a file outside of it: {printable(name)}")
    path = folder / name
    with open(path, "rb", buffering=0, opener=open_without_waiting) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(f"{path}: not a plain file any more")
        try:
            # readall raises errors without the name of the file.
            return file.readall()
        except OSError as error:
            error.filename = str(path)
            raise


def _reopen(path: Path, descriptor: int) -> None:
    """Open the file again under the same descriptor, atomically, because other threads may be reading from it.

    On NFS or FUSE an old descriptor may stay unusable after the fault is over. Raises OSError.
    """
    # dup2 replaces the old descriptor atomically and keeps its number.
    fresh = os.open(path, os.O_RDONLY)
    try:
        os.dup2(fresh, descriptor, inheritable=False)
    finally:
        os.close(fresh)


def open_index(
    root: Path,
    split: str,
    *,
    progress: bool = False,
    max_classes: int = DataConfig.max_classes,
) -> Index:
    """Open one split of a prepared set (ROOT/SPLIT.index), of other tar shards, or of an image folder (ROOT/SPLIT/CLASS/*).

    The split "." is ROOT itself. Other tar shards and image folders are indexed when they are first opened. The index is kept
    in `find_cache` and rebuilt after files or classes were added, removed or renamed. If several processes start together, let
    one of them open the split first: otherwise each builds the index, which is safe but slow.

    progress: show the progress of indexing.
    max_classes: largest number of classes if the shards have labels but no class names.
    Raises InputError naming path, problem and expected layout.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise InputError(f"{root}: no such folder; {LAYOUT}")
    if not is_inside(split):
        raise InputError(f"the split {split!r} is not inside {root}: give the name of a folder in it, such as train")
    try:
        # Shards take precedence over a folder of the same name.
        if shards := list_shards(root, split):
            return _open_shards(root, split, shards, progress, max_classes)
        if (root / split).is_dir():
            return _open_folder(root, split, progress)
    except PermissionError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error
    raise InputError(_describe_missing_split(root, split))


def _describe_missing_split(root: Path, split: str) -> str:
    """Describe for an error message what the folder contains, and the setting that names another split."""
    found = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
    contents = some_names(found) or "nothing"
    advice = "To train on all images below it, give --data.train_split ."
    splits = list_shard_splits(root) or [name for name in list_class_folders(root) if name in SPLIT_NAMES]
    if splits:
        setting = "train_split" if split == "train" else "test_split"
        # Suggest train as the test split only if there is no other one.
        others = [name for name in splits if name != "train"] or splits
        advice = (
            f"Its splits are {some_names(splits)}: name one of them, such as --data.{setting} {printable(others[0])}, or "
            "--data.train_split . to train on all images below it"
        )
    return f"{root}: no split {split!r} in it (it holds: {contents}); {LAYOUT}. {advice}"


def open_images(data: DataConfig, split: str, *, progress: bool = False) -> Index:
    """Open a split of the configured data set. Raises InputError if data.root is empty, and as `open_index` does."""
    if not data.root:
        raise InputError("data.root is not set: give --data.root DIR, a prepared set or an image folder")
    return open_index(Path(data.root), split, progress=progress, max_classes=data.max_classes)


def _open_shards(root: Path, split: str, packed: list[Path], progress: bool, max_classes: int) -> Index:
    """Open tar shards by the index that `wmse prepare` wrote next to them, or else by an index in the cache."""
    prepared = root / f"{split}.index"
    # A prepared set may be read-only and needs no cache, unless its shards are compressed.
    is_compressed = any(shard.suffix == ".gz" for shard in packed)
    needs_cache = is_compressed or not prepared.exists()
    cache = find_cache(root) if needs_cache else root
    # Compressed shards are replaced by their uncompressed copies.
    shards = [uncompress_shard(shard, cache) for shard in packed]
    if prepared.exists():
        _check_shards(prepared, shards)
        return Index(prepared, root, shards)
    # There is no prepared index: use the one in the cache, or build it.
    path = cache / f"{split}.index"
    # Class names, sizes and modification times tell whether an index in the cache is still valid.
    class_names = read_class_names(root)
    mtimes = [shard.stat().st_mtime_ns for shard in shards]

    # Labels that are names of classes get the numbers that they have in the training split, which is opened only for them.
    uses_names = False

    def names_of_train() -> list[str] | None:
        nonlocal uses_names
        train = list_shards(root, "train")
        if not train or train == packed:
            return None
        uses_names = True
        return _open_shards(root, "train", train, progress, max_classes).class_names or None

    def unchanged(metadata: dict[str, Any]) -> bool:
        indexed = (metadata.get("shards"), metadata.get("mtimes"))
        if indexed != (describe_shards(shards), mtimes) or not _follows_rules(metadata):
            return False
        expected = names_of_train() if metadata.get("uses_names_of_train") else class_names
        return expected in (None, metadata["class_names"])

    if not _is_current(path, unchanged):
        # Build the index and record which shards it describes.
        uses_names = False
        content, notes = build_shards(shards, split, class_names, progress, max_classes, names_of_train)
        content.metadata["mtimes"] = mtimes
        content.metadata["uses_names_of_train"] = uses_names
        _keep(path, content, notes)
    return Index(path, root, shards)


def _check_shards(prepared: Path, shards: list[Path]) -> None:
    """Raise InputError if the shards are not those that the prepared index was built from."""
    # Compare names and sizes in both directions: shards may be missing, changed or additional.
    expected = read_index(prepared)[0].get("shards", [])
    found = describe_shards(shards)
    for shard in [*expected, *found]:
        if shard not in expected or shard not in found:
            raise InputError(
                f"{prepared.parent}: {shard[0]} is missing or does not have the size that {prepared.name} expects: prepare "
                f"the set again, or delete {prepared.name} to index the shards as they are"
            )


def _open_folder(root: Path, split: str, progress: bool) -> Index:
    # A nested split such as a/b needs a file name without slashes.
    path = find_cache(root) / f"{split.replace('/', '_')}.index"
    if not _is_current(path, lambda metadata: _folder_unchanged(root, split, metadata)):
        _keep(path, *build_folder(root, split, progress))
    return Index(path, root)


def _folder_unchanged(root: Path, split: str, metadata: dict[str, Any]) -> bool:
    """Return whether no file or class was added, removed or renamed since the folder was indexed.

    This compares the modification times of all listed folders, which do not change when a file gets new contents.
    """
    folder = root / split
    try:
        unchanged = all((folder / name).stat().st_mtime_ns == mtime for name, mtime in metadata["folders"])
    except (FileNotFoundError, NotADirectoryError, KeyError):
        return False
    return unchanged and metadata["class_names"] == find_class_names(root, split) and _follows_rules(metadata)


def _follows_rules(metadata: dict[str, Any]) -> bool:
    """Return whether the index was built by the rules of this version of the program."""
    return metadata.get("rules") == _RULES


def _is_current(path: Path, unchanged: Callable[[dict[str, Any]], bool]) -> bool:
    """Return whether there is a readable index whose metadata `unchanged` accepts; log why it has to be rebuilt."""
    if not path.exists():
        return False
    try:
        metadata, _ = read_index(path)
        if unchanged(metadata):
            return True
        # Rebuilding can take minutes, so say why it happens.
        _log.info("the files of %s changed: indexing them again", path)
    except InputError as error:
        _log.warning("%s", error)
    return False


def _keep(path: Path, content: IndexContent, notes: list[str]) -> None:
    """Write a new index and log what it holds."""
    content.metadata["rules"] = _RULES
    write_index(path, content)
    for note in notes:
        _log.warning("%s", note)
    # The list of skipped files lies next to the index.
    log_skipped(content, path.with_suffix(".skipped.txt"))
    labels = content.columns["label"]
    split = content.metadata["split"]
    _log.info("split %s: indexed %d images (%s) in %s", split, len(labels), describe_labels(labels), path)


def describe_labels(labels: npt.NDArray[np.integer[Any]]) -> str:
    """Summarise labels, (n,) with -1 for none, in a text for a log line: the number of classes and of images in each."""
    # Images without a label are counted on their own.
    labelled = labels[labels >= 0]
    counts = np.unique(labelled, return_counts=True)[1]
    if not counts.size:
        return "no labels"
    fewest = counts.min()
    most = counts.max()
    # for example "3 classes with 5 to 9 (median 7) images each, 2 images without a label"
    text = f"{len(counts)} class{'es' if len(counts) > 1 else ''} with {fewest}"
    if fewest < most:
        text += f" to {most} (median {np.median(counts):g})"
    text += f" image{'s' if most > 1 else ''} each"
    unlabelled = len(labels) - counts.sum()
    return text + (f", {unlabelled} images without a label" if unlabelled else "")
