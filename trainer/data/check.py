"""Reads and decodes every image of a set as training does, and names what can't be used."""

import os
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from trainer.config import DataConfig
from trainer.data.decoding import decode
from trainer.data.formats import inspect_image
from trainer.data.index import Index, describe_labels, find_cache
from trainer.data.index_build import (
    WHOLE_FOLDER,
    file_name,
    list_class_folders,
    list_folder,
    open_without_waiting,
)
from trainer.data.index_file import compute_fingerprint, read_index
from trainer.data.printable import printable
from trainer.data.shards import (
    PICTURE_SUFFIXES,
    SHARD_NAME,
    describe_shards,
    list_shards,
    name_classes,
    read_class_names,
    read_shard,
    uncompress_shard,
)
from trainer.errors import InputError, refuse_machine_fault
from trainer.progress import with_progress


@dataclass
class CheckReport:
    """What was found. `converted`: valid pictures of rarer kinds. `bad`: (path below the set, problem), in order. `notes`:
    what looks unintended but can be trained on. `splits`: what each split holds, in words."""

    checked: int = 0
    converted: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)


class Place(NamedTuple):
    """Where one picture's bytes are: `nbytes` from `offset` on, or the whole file where nbytes is -1. size: (height, width)
    in pixels that an index gives."""

    name: str
    path: str
    label: int
    offset: int = 0
    nbytes: int = -1
    size: tuple[int, int] | None = None


Say = Callable[[str, str], None]  # (name, problem)


def check_data(
    path: Path,
    *,
    splits: Sequence[str] | None = None,
    threads: int | None = None,
    progress: bool = False,
    limits: DataConfig | None = None,
    say: Say = lambda name, problem: None,
) -> CheckReport:
    """Check what training would read of a set: tar shards, or an image folder with or without splits and classes.

    splits: only these (default: all that there are). Each of `threads` (default: the processors) holds one decoded picture.
    limits: whose max_image_pixels and max_classes hold. say: called with each bad file as it is found. Raises InputError
    where there is nothing to check.
    """
    limits = limits or DataConfig()
    path = Path(path).expanduser()
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    report = CheckReport()

    def add(name: str, problem: str) -> None:
        report.bad.append((printable(name), problem))
        say(*report.bad[-1])

    shard_splits = sorted({found[1] for entry in path.iterdir() if (found := SHARD_NAME.fullmatch(entry.name))})
    for split in _select(path, splits, shard_splits) if shard_splits else splits or _folder_splits(path):
        list_places = _places_in_shards if shard_splits else _places_in_folder
        places = list(list_places(path, split, limits, report.notes, add))
        labels = np.array([place.label for place in places], np.int32)
        report.splits.append(f"split {split}: {len(places)} files, {describe_labels(labels)}")
        others = _check_places(places, split, threads, progress, partial(_check, limits.max_image_pixels), report, add)
        if others:
            report.notes.append(
                f"split {split}: {len(others)} files are no pictures, left out ({', '.join(others[:5])})"
            )
    if not report.checked and not report.bad:
        raise InputError(f"{path}: no files to check in it; {'; '.join(report.notes)}")
    return report


def _check_places(
    places: list[Place],
    split: str,
    threads: int | None,
    progress: bool,
    check: Callable[[Place], tuple[str, str]],
    report: CheckReport,
    add: Say,
) -> list[str]:
    """Check them all; returns the names of the files that are not meant to be pictures."""
    others = []
    with ThreadPool(threads) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # max_pixels decides
        verdicts = with_progress(pool.imap(check, places, chunksize=16), len(places), f"check {split}", progress)
        for place, (verdict, problem) in zip(places, verdicts, strict=True):
            report.checked += 1
            report.converted += verdict == "convert"
            if verdict == "other":
                others.append(printable(place.name))
            elif verdict == "bad":
                add(place.name, problem)
    return others


def _select(path: Path, wanted: Sequence[str] | None, available: list[str]) -> list[str]:
    if missing := sorted(set(wanted or []) - set(available)):
        raise InputError(f"{path}: no shards of split {', '.join(missing)}; it has {', '.join(available)}")
    return list(wanted or available)


def _folder_splits(path: Path) -> list[str]:
    """All folders beside `train`; the whole folder where it is not divided into splits."""
    return list_class_folders(path) if (path / "train").is_dir() else [WHOLE_FOLDER]


def _places_in_shards(root: Path, split: str, limits: DataConfig, notes: list[str], add: Say) -> Iterator[Place]:
    """The pictures that training reads: those of the index of a prepared set, else those that the tars list. What is wrong
    with tars and indices themselves is added."""
    shards, in_tars = [], []
    for packed in list_shards(root, split):
        shard = packed
        try:
            shard = uncompress_shard(packed, root if packed.suffix != ".gz" else find_cache(root, None))
            shards.append(shard)
            contents = read_shard(shard)
        except InputError as error:
            add(packed.name, str(error).removeprefix(f"{shard}: "))
            continue
        notes += [f"{packed.name}/{name}: is part of another sample, left out" for name in contents.left_out]
        in_tars += [Place(f"{shard.name}/{sample.member}", str(shard), *sample[1:]) for sample in contents.samples]
    try:
        labels = np.array([place.label for place in in_tars], np.int32)
        name_classes(labels, read_class_names(root), [place.name for place in in_tars], limits.max_classes)
    except InputError as error:
        add(split, str(error))
    path = root / f"{split}.index"
    if not path.exists():
        yield from in_tars
        return
    if problem := _check_index(path, shards):
        add(path.name, problem)
        yield from in_tars
        return
    indexed = list(_places_in_index(Index(path, root, shards)))
    if different := {place._replace(size=None) for place in indexed} - set(in_tars):
        add(path.name, f"{len(different)} of its images are not in the tars as it says, such as {min(different).name}")
    yield from indexed


def _places_in_index(index: Index) -> Iterator[Place]:
    for i in range(len(index)):
        shard, offset, nbytes = index.place(i)
        size = int(index.heights[i]), int(index.widths[i])
        yield Place(index.name(i), str(shard), int(index.labels[i]), offset, nbytes, size)


def _check_index(path: Path, shards: list[Path]) -> str:
    try:
        metadata, columns = read_index(path)
        if compute_fingerprint(columns, metadata["class_names"]) != metadata["fingerprint"]:
            return "its contents do not give its fingerprint: damaged; delete it"
    except (InputError, KeyError) as error:
        return str(error)
    return "" if metadata.get("shards") == describe_shards(shards) else "made for other shards: delete it"


def _places_in_folder(root: Path, split: str, _: DataConfig, notes: list[str], add: Say) -> Iterator[Place]:
    folder = root / split
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    try:
        listing = list_folder(root, split)
    except InputError as error:
        notes.append(str(error))
        return
    except OSError as error:
        return add(str(error.filename), f"cannot be read: {error.strerror}")
    notes += listing.notes
    for label, name in zip(listing.labels, listing.names, strict=True):
        below = os.path.normpath(os.path.join(split, file_name(listing.class_names, label, name)))
        yield Place(below, os.path.join(root, below), label)


def _check(max_pixels: int, place: Place) -> tuple[str, str]:
    """(ok, convert, other or bad; problem) of one picture."""
    data = b""
    try:
        with open(place.path, "rb", opener=open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return "bad", "a pipe, socket or device"
            file.seek(place.offset)
            data = file.read(place.nbytes)
        info = inspect_image(data, max_pixels)
        if info.kind == "bad":
            return "other" if _is_no_picture(place.name, data) else "bad", info.problem
        height, width, _ = decode(data, max_pixels).shape
    except OSError as error:
        refuse_machine_fault(error)
        return "bad", f"cannot be read: {error.strerror or error}"
    except InputError as error:
        return "bad", str(error)
    if place.size not in (None, (height, width)):
        return "bad", f"is {height}x{width} pixels, and not as the index says"
    return ("convert" if info.kind == "convert" else "ok"), ""


def _is_no_picture(name: str, data: bytes) -> bool:
    """Whether a file that can't be read as a picture was never meant as one: by its ending, or as text without an ending."""
    stem, dot, suffix = os.path.basename(name).rpartition(".")
    if dot and stem:
        return suffix.lower() not in PICTURE_SUFFIXES
    return bool(data) and data.isascii() and b"\0" not in data
