"""Read and decode every image of a data set as training does, and report what cannot be used."""

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

from trainer.config.schema import DataConfig
from trainer.data.cache_folder import find_cache
from trainer.data.decoding import decode
from trainer.data.image_probe import inspect_image
from trainer.data.index import Index, describe_labels
from trainer.data.index_build import (
    TOO_LARGE,
    TOO_LARGE_BYTES,
    WHOLE_FOLDER,
    list_class_folders,
    list_folder,
    open_without_waiting,
)
from trainer.data.index_file import compute_fingerprint, read_index
from trainer.data.printable import printable
from trainer.data.shard_labels import StoredLabel, number_labels
from trainer.data.tar_shards import (
    PICTURE_SUFFIXES,
    describe_shards,
    list_shard_splits,
    list_shards,
    read_class_names,
    read_shard,
    shard_notes,
    uncompress_shard,
)
from trainer.errors import InputError
from trainer.files import refuse_machine_fault
from trainer.progress import with_progress

OnBad = Callable[[str, str], None]  # (name, problem)


@dataclass
class CheckReport:
    """The findings of a check."""

    on_bad: OnBad
    """Called with each bad file as it is found."""
    checked: int = 0
    converted: int = 0
    """Valid images of rarer kinds, which are converted when they are read."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    """(path below the set, problem) of each bad file, in order."""
    notes: list[str] = field(default_factory=list)
    """Findings that look unintended but do not prevent training."""
    splits: list[str] = field(default_factory=list)
    """One line for each split: the number of files, of classes, and of images in each class."""

    def add_bad(self, name: str, problem: str) -> None:
        """Add a bad file and report it at once."""
        self.bad.append((printable(name), problem))
        self.on_bad(*self.bad[-1])


class StoredImage(NamedTuple):
    """The location of one image's bytes."""

    name: str
    path: str
    label: int
    offset: int = 0
    nbytes: int = -1  # -1: the whole file
    size: tuple[int, int] | None = None  # height and width in pixels according to an index, if there is one


def check_data(
    path: Path,
    *,
    splits: Sequence[str] | None = None,
    threads: int | None = None,
    progress: bool = False,
    limits: DataConfig | None = None,
    on_bad: OnBad = lambda name, problem: None,
) -> CheckReport:
    """Check the images that training would read: in tar shards, or in an image folder with or without splits and classes.

    splits: check only these; None: all. threads: None: one for each processor; each thread holds one decoded image.
    limits: its max_image_pixels and max_classes apply. on_bad: called with (name, problem) of each bad file as it is found.
    Raises InputError if there is nothing to check.
    """
    limits = limits or DataConfig()
    path = Path(path).expanduser()
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    report = CheckReport(on_bad)
    # Shards take precedence over folders, as in training.
    shard_splits = list_shard_splits(path)
    if shard_splits:
        chosen: Sequence[str] = _select(path, splits, shard_splits)
    else:
        chosen = splits or _folder_splits(path)
    for split in chosen:
        if shard_splits:
            images = list(_list_in_shards(path, split, limits.max_classes, report))
        else:
            images = list(_list_in_folder(path, split, report))
        labels = np.array([image.label for image in images], np.int32)
        report.splits.append(f"split {split}: {len(images)} files, {describe_labels(labels)}")
        # Decode the images with many threads; the report lists them in order.
        with ThreadPool(threads) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # max_image_pixels decides
            verdicts = pool.imap(partial(_check_image, limits.max_image_pixels), images, chunksize=16)
            shown = with_progress(verdicts, len(images), f"check {split}", progress)
            _add_verdicts(split, zip(images, shown, strict=True), report)
    if not report.checked and not report.bad:
        problems = [f"{path}: no files to check in it except hidden ones", *report.notes]
        raise InputError("; ".join(problems))
    return report


def _add_verdicts(split: str, verdicts: Iterator[tuple[StoredImage, tuple[str, str]]], report: CheckReport) -> None:
    """Add the verdicts on a split's files to the report. Files that are no images are noted together."""
    # Collect them for one note, instead of a line for each.
    others = []
    for image, (verdict, problem) in verdicts:
        report.checked += 1
        report.converted += verdict == "convert"
        # Files that were never meant as images, such as a README, are no fault of the data set.
        if verdict == "other":
            others.append(printable(image.name))
        elif verdict == "bad":
            report.add_bad(image.name, problem)
    if others:
        examples = ", ".join(others[:5])
        report.notes.append(f"split {split}: {len(others)} files are not images and are skipped ({examples})")


def _select(path: Path, wanted: Sequence[str] | None, available: list[str]) -> list[str]:
    """Return the splits to check. Raises InputError if there are no shards of one of them."""
    if missing := sorted(set(wanted or []) - set(available)):
        raise InputError(f"{path}: no shards of split {', '.join(missing)}; it has {', '.join(available)}")
    return list(wanted or available)


def _folder_splits(path: Path) -> list[str]:
    """Return `train` and the folders next to it, or the whole folder if it is not divided into splits."""
    return list_class_folders(path) if (path / "train").is_dir() else [WHOLE_FOLDER]


def _list_in_shards(root: Path, split: str, max_classes: int, report: CheckReport) -> Iterator[StoredImage]:
    """Yield the images that training reads: those of a prepared set's index or, without one, those that the tars list.

    Problems of the tars and of the index go to the report.
    """
    # Read the tars even if there is an index, to find what does not agree with it.
    shards, in_tars = _list_in_tars(root, split, max_classes, report)
    # A prepared set has an index next to its shards.
    path = root / f"{split}.index"
    problem = _check_index(path, shards) if path.exists() else ""
    if problem:
        report.add_bad(path.name, problem)
    if problem or not path.exists():
        yield from in_tars
        return
    # Training reads by the index, so each entry must be where the tars have an image. The tars do not know sizes in pixels.
    indexed = list(_list_in_index(Index(path, root, shards)))
    different = {image._replace(size=None) for image in indexed} - set(in_tars)
    if different:
        first = min(different).name
        report.add_bad(path.name, f"{len(different)} of its images differ from those in the tars, for example {first}")
    yield from indexed


def _list_in_tars(
    root: Path,
    split: str,
    max_classes: int,
    report: CheckReport,
) -> tuple[list[Path], list[StoredImage]]:
    """Return the uncompressed shards, and the images in those that can be read."""
    shards = []
    images = []
    stored_labels: list[StoredLabel] = []
    skipped = []
    for packed in list_shards(root, split):
        shard = packed
        try:
            cache = find_cache(root) if packed.suffix == ".gz" else root
            shard = uncompress_shard(packed, cache)
            shards.append(shard)
            # A damaged shard is reported, and the others are still checked.
            contents = read_shard(shard)
        except InputError as error:
            # The report names the shard already.
            problem = str(error).removeprefix(f"{shard}: ")
            report.add_bad(packed.name, problem)
            continue
        skipped += [f"{packed.name}/{name}" for name in contents.skipped]
        for sample in contents.samples:
            name = f"{shard.name}/{sample.member}"
            image = StoredImage(
                name=name,
                path=str(shard),
                label=-1,
                offset=sample.offset,
                nbytes=sample.nbytes,
            )
            images.append(image)
            stored_labels.append(sample.label)
    # The labels have numbers only when all of them are known.
    labels = np.full(len(images), -1, np.int32)
    try:
        names = [image.name for image in images]
        labels, _ = number_labels(stored_labels, read_class_names(root), names, max_classes)
    except InputError as error:
        report.add_bad(split, str(error))
    images = [image._replace(label=int(label)) for image, label in zip(images, labels, strict=True)]
    report.notes += shard_notes(split, labels, skipped, shards)
    return shards, images


def _list_in_index(index: Index) -> Iterator[StoredImage]:
    """Yield the images that an index of shards lists."""
    for i in range(len(index)):
        # The index knows sizes and places, so no image is opened here.
        shard, offset, nbytes = index.place(i)
        height = int(index.heights[i])
        width = int(index.widths[i])
        yield StoredImage(
            name=index.name(i),
            path=str(shard),
            label=int(index.labels[i]),
            offset=offset,
            nbytes=nbytes,
            size=(height, width),
        )


def _check_index(path: Path, shards: list[Path]) -> str:
    """Return what is wrong with the index of a prepared set, or an empty text."""
    try:
        metadata, columns = read_index(path)
        fingerprint = compute_fingerprint(columns, metadata["class_names"])
        # The index itself may be damaged.
        if fingerprint != metadata["fingerprint"]:
            return "it is damaged: its contents do not match its fingerprint; delete it"
    except (InputError, KeyError) as error:
        return str(error)
    if metadata.get("shards") != describe_shards(shards):
        return "it was made for other shards: delete it"
    return ""


def _list_in_folder(root: Path, split: str, report: CheckReport) -> Iterator[StoredImage]:
    """Yield the files of a split in an image folder. Raises InputError if there is no such folder."""
    folder = root / split
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    try:
        listing = list_folder(root, split)
    except InputError as error:
        report.notes.append(str(error))
        return
    except OSError as error:
        return report.add_bad(str(error.filename), f"cannot be read: {error.strerror}")
    report.notes += listing.notes
    for label, below_split in zip(listing.labels, listing.paths(), strict=True):
        # normpath removes the leading "./" of the split ".".
        below_root = os.path.normpath(os.path.join(split, below_split))
        yield StoredImage(below_root, os.path.join(root, below_root), label)


def _check_image(max_pixels: int, image: StoredImage) -> tuple[str, str]:
    """Return a verdict, "ok", "convert", "other" (not meant as an image) or "bad", and the problem.

    Raises InputError if the machine is at fault and not the image.
    """
    try:
        with open(image.path, "rb", opener=open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return "bad", "a pipe, socket or device"
            if image.nbytes < 0 and status.st_size >= TOO_LARGE_BYTES:
                return "bad", TOO_LARGE
            # For a member of a tar, read only its own bytes.
            file.seek(image.offset)
            data = file.read(image.nbytes)
        info = inspect_image(data, max_pixels)
        if info.kind == "bad":
            return "bad" if _is_meant_as_image(image.name, data) else "other", info.problem
        # The structure is sound: decode the image, because only that finds damaged pixels.
        height, width, _ = decode(data, max_pixels).shape
    except OSError as error:
        refuse_machine_fault(error)
        return "bad", f"cannot be read: {error.strerror or error}"
    except InputError as error:
        return "bad", str(error)
    # Training computes crop windows from the size in the index.
    if image.size not in (None, (height, width)):
        return "bad", f"has {height}x{width} pixels, unlike its entry in the index"
    verdict = "convert" if info.kind == "convert" else "ok"
    return verdict, ""


def _is_meant_as_image(name: str, data: bytes) -> bool:
    """Return whether a file that cannot be read as an image was meant to be one.

    Its suffix decides or, without one, whether its contents are anything but text.
    """
    stem, dot, suffix = os.path.basename(name).rpartition(".")
    # A name such as ".jpg" has no suffix.
    if dot and stem:
        return suffix.lower() in PICTURE_SUFFIXES
    return not data or not data.isascii() or b"\0" in data
