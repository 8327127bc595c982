"""What is on disk: for each image its label, size in pixels, name and where its bytes are. One class for both storage forms."""

import contextlib
import hashlib
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

from trainer.data.index_build import (
    LAYOUT,
    build_folder,
    file_name,
    find_class_names,
    log_left_out,
    open_without_waiting,
    some_names,
)
from trainer.data.index_file import COLUMN_DTYPES, SHARD_COLUMN_DTYPES, Columns, IndexContent, read_index, write_index
from trainer.data.printable import printable
from trainer.data.shards import (
    MAX_CLASSES,
    TAR_BLOCK,
    build_shards,
    describe_shards,
    list_shards,
    read_class_names,
    uncompress_shard,
)
from trainer.errors import InputError
from trainer.files import write_text

_RULES = 2  # raised when the same files give another index, so that those of earlier versions are built again
CACHE_FOLDER = ".wmse_index"
MAX_OPEN_SHARDS = 256  # well below the usual limit of 1,024 open files; shards beyond it are opened for each read

_log = logging.getLogger(__name__)


class Index:
    """The images of one split, memory-mapped; made by `open_index`.

    labels, heights, widths: (n,) int32, n = len(index); label -1: none; pixels as stored. class_names: by label. root: folder.
    fingerprint: equal only for the same images, order and labels. Safe to use from many threads.
    """

    def __init__(self, path: Path, root: Path, shards: list[Path] | None = None) -> None:
        metadata, columns = read_index(path)
        _check_contents(path, metadata, columns, shards)
        self.split: str = metadata["split"]
        self.class_names: list[str] = metadata["class_names"]
        self.fingerprint: str = metadata["fingerprint"]
        self.labels: npt.NDArray[np.int32] = columns["label"]
        self.heights: npt.NDArray[np.int32] = columns["height"]
        self.widths: npt.NDArray[np.int32] = columns["width"]
        self._columns: Columns = columns
        self.root, self.path = root, path
        self._folder = root / self.split
        self._shards = shards
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.labels)

    def __del__(self) -> None:
        for descriptor in getattr(self, "_descriptors", {}).values():
            os.close(descriptor)

    @property
    def is_folder(self) -> bool:
        """Whether the images lie as files of a folder, not in shards."""
        return self._shards is None

    def kind(self, i: int) -> Literal["direct", "convert"]:
        """Whether DALI can have image i's bytes as they are, or `formats.to_direct` of them."""
        return "convert" if self._columns["kind"][i] else "direct"

    def name(self, i: int) -> str:
        """For messages: CLASS/FILE, or SHARD/MEMBER, control characters escaped."""
        if self._shards is None:
            return printable(self._file_name(i))
        return printable(f"{self._shards[self._columns['shard'][i]].name}/{self._base_name(i)}")

    def place(self, i: int) -> tuple[Path, int, int]:
        """(shard, offset, number of bytes) of image i of a set of shards."""
        assert self._shards is not None
        number = int(self._columns["shard"][i])
        return self._shards[number], TAR_BLOCK * int(self._columns["block"][i]), int(self._columns["nbytes"][i])

    def read(self, i: int) -> bytes:
        """Image i's bytes. Raises OSError naming the file where it is gone, cut or unreadable."""
        if self._shards is None:
            return _read_file(self._folder, self._file_name(i))
        shard, offset, nbytes = self.place(i)
        try:
            data = self._read_shard(int(self._columns["shard"][i]), nbytes, offset)
        except OSError as error:
            error.filename = error.filename or str(shard)  # pread knows no name
            raise
        if len(data) != nbytes:
            raise OSError(f"{shard}: cut: image {self.name(i)} has {len(data)} of {nbytes} bytes")
        return data

    def _file_name(self, i: int) -> str:
        return file_name(self.class_names, self.labels[i], self._base_name(i))

    def _base_name(self, i: int) -> str:
        ends = self._columns["name_end"]
        start = ends[i - 1] if i else 0
        return self._columns["names"][start : ends[i]].tobytes().decode("utf-8", "surrogateescape")

    def _read_shard(self, number: int, nbytes: int, offset: int) -> bytes:
        assert self._shards is not None
        descriptor = self._descriptors.get(number)
        if descriptor is None:
            with self._lock:
                if number not in self._descriptors and len(self._descriptors) < _most_open_shards():
                    self._descriptors[number] = os.open(self._shards[number], os.O_RDONLY)
            descriptor = self._descriptors.get(number)
        if descriptor is not None:
            try:
                return os.pread(descriptor, nbytes, offset)
            except OSError:
                _reopen(self._shards[number], descriptor)
                return os.pread(descriptor, nbytes, offset)
        with self._shards[number].open("rb", buffering=0) as file:
            return os.pread(file.fileno(), nbytes, offset)


def _most_open_shards() -> int:
    """A quarter of the files that this process may open; shards beyond it are opened for each read."""
    return min(MAX_OPEN_SHARDS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def _check_contents(path: Path, metadata: dict[str, Any], columns: Columns, shards: list[Path] | None) -> None:
    """Raises InputError where the index, which may be anyone's, would end a run at one of its images, hours later."""
    dtypes = COLUMN_DTYPES if shards is None else COLUMN_DTYPES | SHARD_COLUMN_DTYPES
    split, class_names = metadata.get("split"), metadata.get("class_names")
    labels, lengths = columns.get("label"), {len(columns.get(name, ())) for name in dtypes}
    problem = ""
    if not isinstance(split, str) or not is_inside(split) or not isinstance(metadata.get("fingerprint"), str):
        problem = "its split or fingerprint"
    elif not isinstance(class_names, list) or not all(isinstance(name, str) for name in class_names):
        problem = "its class names"
    elif labels is None or lengths != {len(labels)} or not len(labels):
        problem = "the lengths of its columns"
    elif any(columns[name].dtype != dtype for name, dtype in dtypes.items()):
        problem = "the types of its columns"
    elif labels.max() >= len(class_names) or labels.min() < -1:
        problem = "a label, for which it has no class"
    elif shards is not None and columns["shard"].max() >= len(shards):
        problem = "a shard, which there is none of"
    elif min(columns["height"].min(), columns["width"].min()) < 1:
        problem = "the size of an image"
    if problem:
        raise InputError(
            f"{path}: damaged: {problem} can't be right; delete it: the next start indexes the images again"
        )


def is_inside(name: str) -> bool:
    """Whether a relative path stays inside the folder that it starts from."""
    return bool(name) and not name.startswith("/") and ".." not in name.split("/")


def _read_file(folder: Path, name: str) -> bytes:
    """FOLDER/NAME, the name from an index that may be anyone's. What is no plain file could be waited for without end."""
    if not is_inside(name):
        raise OSError(f"{folder}: the index names a file outside of it: {printable(name)}")
    path = folder / name
    with open(path, "rb", buffering=0, opener=open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path}: not a plain file any more")
        try:
            return file.readall()
        except OSError as error:
            error.filename = str(path)
            raise


def _reopen(path: Path, descriptor: int) -> None:
    """Put the file as it is now behind an open descriptor: one of NFS or FUSE may stay dead after the fault has passed.

    In one step: other threads are reading by this number."""
    fresh = os.open(path, os.O_RDONLY)
    try:
        os.dup2(fresh, descriptor, inheritable=False)
    finally:
        os.close(fresh)


def open_index(
    root: Path,
    split: str,
    *,
    cache_dir: Path | None = None,
    progress: bool = False,
    max_classes: int = MAX_CLASSES,
) -> Index:
    """Open one split of a prepared set (ROOT/SPLIT.index), of others' tar shards, or of an image folder (ROOT/SPLIT/CLASS/*;
    split "." is ROOT itself). Shards without class names may have labels up to `max_classes`.

    The last two are looked through at the first opening, with a progress bar where wanted; the index is kept in
    ROOT/.wmse_index, or where that cannot be written below ~/.cache/wmse (or below `cache_dir`, if given), and made anew
    when files or classes were added, removed or renamed. Where several processes start together, let one open it first:
    all may build at once safely, but all would work. Raises InputError naming path, problem and expected layout.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise InputError(f"{root}: no such folder; {LAYOUT}")
    if not is_inside(split):
        raise InputError(f"the split {split!r} is no folder inside {root}: name one, such as train")
    try:
        if list_shards(root, split):
            return _open_shards(root, split, cache_dir, progress, max_classes)
        if (root / split).is_dir():
            return _open_folder(root, split, cache_dir, progress)
    except PermissionError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error
    found = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
    raise InputError(
        f"{root}: no split {split!r} in it (it holds: {some_names(found) or 'nothing'}); {LAYOUT}. To train on all images "
        "below it, give --data.train_split ."
    )


def _open_shards(root: Path, split: str, cache_dir: Path | None, progress: bool, max_classes: int) -> Index:
    prepared = root / f"{split}.index"
    packed = list_shards(root, split)
    needs_cache = not prepared.exists() or any(shard.suffix == ".gz" for shard in packed)
    cache = find_cache(root, cache_dir) if needs_cache else root
    shards = [uncompress_shard(shard, cache) for shard in packed]
    if prepared.exists():
        _check_shards(prepared, shards)
        return Index(prepared, root, shards)
    path = cache / f"{split}.index"
    class_names = read_class_names(root)
    mtimes = [shard.stat().st_mtime_ns for shard in shards]

    def unchanged(metadata: dict[str, Any]) -> bool:
        same_shards = (metadata.get("shards"), metadata.get("mtimes")) == (describe_shards(shards), mtimes)
        return same_shards and class_names in (None, metadata["class_names"]) and _follows_rules(metadata)

    if not _is_current(path, unchanged):
        content, notes = build_shards(shards, split, class_names, progress, max_classes)
        content.metadata["mtimes"] = mtimes
        _keep(path, content, notes)
    return Index(path, root, shards)


def _check_shards(prepared: Path, shards: list[Path]) -> None:
    expected = read_index(prepared)[0].get("shards", [])
    found = describe_shards(shards)
    for shard in [*expected, *found]:
        if shard not in expected or shard not in found:
            raise InputError(
                f"{prepared.parent}: {shard[0]} is missing or not of the size that {prepared.name} was made for: prepare the "
                f"set again, or delete {prepared.name} to have the shards indexed as they are"
            )


def _open_folder(root: Path, split: str, cache_dir: Path | None, progress: bool) -> Index:
    path = find_cache(root, cache_dir) / f"{split.replace('/', '_')}.index"
    if not _is_current(path, lambda metadata: _folder_unchanged(root, split, metadata)):
        _keep(path, *build_folder(root, split, progress))
    return Index(path, root)


def _folder_unchanged(root: Path, split: str, metadata: dict[str, Any]) -> bool:
    """By the modification times of all folders listed: files added, removed or renamed change them, new contents do not."""
    try:
        unchanged = all((root / split / name).stat().st_mtime_ns == mtime for name, mtime in metadata["folders"])
    except (FileNotFoundError, NotADirectoryError, KeyError):
        return False
    return unchanged and metadata["class_names"] == find_class_names(root, split) and _follows_rules(metadata)


def _follows_rules(metadata: dict[str, Any]) -> bool:
    """Whether this version of the program would list the same files."""
    return metadata.get("rules") == _RULES


def _is_current(path: Path, unchanged: Callable[[dict[str, Any]], bool]) -> bool:
    if not path.exists():
        return False
    try:
        if unchanged(read_index(path)[0]):
            return True
        _log.info("the files of %s changed: indexing them again", path)
    except InputError as error:
        _log.warning("%s", error)
    return False


def _keep(path: Path, content: IndexContent, notes: list[str]) -> None:
    content.metadata["rules"] = _RULES
    write_index(path, content)
    for note in notes:
        _log.warning("%s", note)
    log_left_out(content, path.with_suffix(".bad.txt"))
    labels, split = content.columns["label"], content.metadata["split"]
    _log.info("split %s: indexed %d images (%s) in %s", split, len(labels), describe_labels(labels), path)


def describe_labels(labels: npt.NDArray[np.int32]) -> str:
    """How many classes and how many images of each the labels have, in words."""
    counts = np.unique(labels[labels >= 0], return_counts=True)[1]
    if not counts.size:
        return "no labels"
    return f"{len(counts)} class{'es' if len(counts) > 1 else ''} of {counts.min()} to {counts.max()} images"


def user_cache() -> Path:
    """Where what can be made again is kept for this user: $XDG_CACHE_HOME/wmse or ~/.cache/wmse."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wmse"


def find_cache(root: Path, cache_dir: Path | None) -> Path:
    """The folder for what is built from ROOT: the first that can be written, made where missing, kept out of git."""
    own_name = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=8).hexdigest()
    candidates = [cache_dir / own_name] if cache_dir else [user_cache() / own_name]
    inside = root / CACHE_FOLDER
    # what is marked read-only is left alone, by root too; a link in somebody's set could lead anywhere
    if cache_dir is None and root.stat().st_mode & 0o222 and not inside.is_symlink():
        candidates.insert(0, inside)
    for folder in candidates:
        with contextlib.suppress(OSError):  # not writable: the next one, or the error below
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / ".gitignore", "*\n")  # a new file each time: a link that stood there is not followed
            return folder
    raise InputError(f"{folder}: cannot be written, but the index of {root} must be kept: name a cache folder that can")
