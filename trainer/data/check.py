"""Reads and decodes every file of a set and names those that cannot be used."""

import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from trainer.data.formats import decode_fully, inspect_image
from trainer.data.index import find_cache
from trainer.data.index_build import open_without_waiting, with_progress
from trainer.data.index_file import compute_fingerprint, read_index
from trainer.data.printable import printable
from trainer.data.shards import SHARD_NAME, describe_shards, iterate_samples, list_shards, uncompress_shard
from trainer.errors import InputError


@dataclass
class CheckReport:
    """What was found. `converted`: valid pictures of rarer kinds. `bad`: (path below the set, problem), in order."""

    checked: int = 0
    converted: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)


class Place(NamedTuple):
    """Where one picture's bytes are: `nbytes` from `offset` on, or the whole file where nbytes is -1."""

    name: str
    path: Path
    offset: int = 0
    nbytes: int = -1


def check_data(
    path: Path, *, splits: Sequence[str] | None = None, threads: int | None = None, progress: bool = False
) -> CheckReport:
    """Check a set of tar shards, or every file below a folder of any layout; hidden files are left alone.

    splits: only these (shards SPLIT-*.tar, or folders PATH/SPLIT). Each of `threads` (default: the processors) holds one
    decoded picture. Raises InputError where there is nothing to check.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    report = CheckReport()
    shard_splits = sorted({found[1] for entry in path.iterdir() if (found := SHARD_NAME.fullmatch(entry.name))})
    if shard_splits:
        places = list(_places_in_shards(path, _select(path, splits, shard_splits), report))
    else:
        folders = [path / split for split in splits] if splits else [path]
        places = [place for folder in folders for place in _places_in_folder(path, folder, report)]
    if not places and not report.bad:
        raise InputError(f"{path}: no files to check in it")
    with ThreadPool(threads) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # large pictures are valid up to MAX_PIXELS
        verdicts = with_progress(pool.imap(_check, places, chunksize=16), len(places), "check", progress)
        for place, (converted, problem) in zip(places, verdicts, strict=True):
            report.checked += 1
            report.converted += converted
            if problem:
                report.bad.append((printable(place.name), problem))
    return report


def _select(path: Path, wanted: Sequence[str] | None, available: list[str]) -> list[str]:
    if missing := sorted(set(wanted or []) - set(available)):
        raise InputError(f"{path}: no shards of split {', '.join(missing)}; it has {', '.join(available)}")
    return list(wanted or available)


def _places_in_shards(root: Path, splits: list[str], report: CheckReport) -> Iterator[Place]:
    """The pictures in the shards of these splits; what is wrong with tars and indices themselves goes into the report."""
    for split in splits:
        shards = []
        for packed in list_shards(root, split):
            try:
                shards.append(uncompress_shard(packed, root if packed.suffix != ".gz" else find_cache(root, None)))
                for sample in iterate_samples(shards[-1]):
                    yield Place(f"{packed.name}/{sample.member}", shards[-1], sample.offset, sample.nbytes)
            except InputError as error:
                report.bad.append((packed.name, str(error)))
        if problem := _check_index(root / f"{split}.index", shards):
            report.bad.append((f"{split}.index", problem))


def _check_index(path: Path, shards: list[Path]) -> str:
    if not path.exists():
        return ""
    try:
        metadata, columns = read_index(path)
    except InputError as error:
        return str(error)
    if compute_fingerprint(columns, metadata["class_names"]) != metadata["fingerprint"]:
        return "its contents do not give its fingerprint: damaged; delete it"
    return "" if metadata.get("shards") == describe_shards(shards) else "made for other shards: delete it"


def _places_in_folder(root: Path, folder: Path, report: CheckReport) -> Iterator[Place]:
    def unreadable(error: OSError) -> None:
        report.bad.append((str(error.filename), f"cannot be read: {error.strerror}"))

    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    visited = set()  # links may lead back to a folder above
    for path, folders, files in os.walk(folder, onerror=unreadable, followlinks=True):
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            file = Path(path, name)
            yield Place(str(file.relative_to(root)), file)


def _check(place: Place) -> tuple[bool, str]:
    """(converted, problem) of one picture."""
    try:
        with open(place.path, "rb", opener=open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return False, "a pipe, socket or device"
            file.seek(place.offset)
            data = file.read(place.nbytes)
        info = inspect_image(data)
        if info.kind == "bad":
            return False, info.problem
        decode_fully(data)
    except OSError as error:
        return False, f"cannot be read: {error.strerror or error}"
    except InputError as error:
        return False, str(error)
    return info.kind == "convert", ""
