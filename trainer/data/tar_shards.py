"""Tar shards in the WebDataset convention: SPLIT-000000.tar with members KEY.jpg (or .png, ...) and KEY.cls, the label as text.

Shards are read in place, at the offsets in their headers; no member is ever unpacked to a file. A compressed shard
(SPLIT-000000.tar.gz) can't be read in place: it is uncompressed once, as a whole, into the cache.
"""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.config.schema import DataConfig
from trainer.data.index_build import (
    READ_THREADS,
    Verdict,
    assemble_content,
    inspect_stored,
    some_names,
)
from trainer.data.index_file import IndexContent
from trainer.data.printable import printable, size_text
from trainer.errors import InputError
from trainer.files import atomic_write
from trainer.progress import with_progress

PICTURE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jp2", "ppm", "pgm")
SHARD_NAME = re.compile(r"(.+)-\d+\.tar(?:\.gz)?")  # group 1: the split
TAR_BLOCK = 512  # bytes; members start at its multiples
_FREE_SPACE_LEFT = 1 << 28  # bytes left free on the disk of the cache
_MAX_PADDING = 10_240 + TAR_BLOCK  # bytes of zeros: an end mark of two blocks, filled up to a record of 20 blocks

_log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One image of a shard: bytes [offset, offset + nbytes)."""

    member: str
    label: int
    offset: int
    nbytes: int


def list_shards(root: Path, split: str) -> list[Path]:
    """List ROOT/SPLIT-<digits>.tar, or .tar.gz if there is no plain one, in the order of their names.

    Raises InputError for one that is not a file."""
    names = {entry.name for entry in root.iterdir() if (m := SHARD_NAME.fullmatch(entry.name)) and m[1] == split}
    for name in names:
        if (root / name).exists() and not (root / name).is_file():  # a named pipe would be waited for
            raise InputError(f"{root / name}: is a shard by its name, but not a file: move it away")
    return [root / name for name in sorted(names) if name.removesuffix(".gz") not in names - {name}]


def uncompress_shard(shard: Path, cache: Path) -> Path:
    """Return the shard itself if it is plain, else its uncompressed copy in `cache`, made anew if missing or outdated.

    Raises InputError if the shard is damaged or does not fit on the disk of the cache."""
    if shard.suffix != ".gz":
        return shard
    copy = cache / shard.stem
    stamp = shard.stat().st_mtime_ns
    if copy.exists() and copy.stat().st_mtime_ns == stamp:
        return copy
    free = shutil.disk_usage(cache).free
    _log.info(
        "unpacking %s (%s) into %s, which has %s free", shard, size_text(shard.stat().st_size), cache, size_text(free)
    )
    try:
        with gzip.open(shard) as source, atomic_write(copy) as target:
            while chunk := source.read(1 << 20):
                if target.tell() + len(chunk) > free - _FREE_SPACE_LEFT:
                    raise InputError(
                        f"{shard}: unpacks to more than the {size_text(free)} that are free in {cache}: free some space "
                        "there, or unpack it yourself on another disk"
                    )
                target.write(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = error.args[0] if error.args else "no gzip file"  # str() of an OSError may leave the message out
        raise InputError(f"{shard}: damaged or cut off: {problem}; get the file again") from error
    os.utime(copy, ns=(stamp, stamp))
    return copy


class ShardContents(NamedTuple):
    """What a shard holds. `left_out`: members that look like images but are further parts of a sample."""

    samples: list[Sample]
    left_out: list[str]


class _Header(tarfile.TarInfo):
    """A tar header that refuses a negative size, with which Python's reader would go backwards for ever."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise InputError(f"{printable(header.name)}: its header gives a size of {header.size} bytes: damaged")
        return header


def read_shard(shard: Path) -> ShardContents:
    """List the samples of an uncompressed shard in their order. Hidden members and parts other than picture and label are
    ignored; a sample without a label has label -1.

    Raises InputError naming tar and member for a sample without a picture, parts that are not adjacent, a member that is
    no plain file, and a tar file that is damaged or whose members end before the file does.
    """
    samples: list[Sample] = []
    left_out: list[str] = []
    seen: set[str] = set()
    try:
        with tarfile.open(shard, "r:", encoding="utf-8", tarinfo=_Header) as tar:
            members = (member for member in tar if _is_wanted(member))
            for key, group in itertools.groupby(members, lambda member: _split_name(member.name)[0]):
                parts = list(group)
                if key in seen:
                    raise InputError(
                        f"{printable(parts[0].name)}: the parts of sample {printable(key)} are not adjacent, "
                        "or the sample is there twice"
                    )
                seen.add(key)
                samples.append(_join_parts(tar, key, parts))
                left_out += [part.name for part in parts if _is_dotted_picture(part.name)]
            _check_end(shard, tar.offset)
    except InputError as error:
        raise InputError(f"{shard}: {error}") from error
    except (tarfile.TarError, ValueError, OverflowError) as error:  # the last two for numbers that can't be right
        problem = printable(str(error))[:200]
        raise InputError(f"{shard}: cannot be read as an uncompressed tar file, or is cut off: {problem}") from error
    return ShardContents(samples, left_out)


def build_shards(
    shards: list[Path],
    split: str,
    class_names: list[str] | None,
    progress: bool,
    max_classes: int = DataConfig.max_classes,
) -> tuple[IndexContent, list[str]]:
    """Build the content of the index of uncompressed shards, and notes for the user.

    class_names: None: the classes are named by their numbers, at most `max_classes`. Raises InputError naming tar and member
    for what `read_shard` refuses and for labels without a class.
    """
    if len(shards) > np.iinfo(np.uint16).max:
        raise InputError(
            f"{shards[0].parent}: {len(shards)} shards of split {split}, more than 65,535: put more images into each"
        )
    samples: list[Sample] = []
    verdicts: list[Verdict] = []
    numbers: list[int] = []
    left_out: list[str] = []
    with ThreadPool(READ_THREADS) as pool:
        found = with_progress(pool.imap(_inspect_shard, shards), len(shards), f"index {split}", progress)
        for number, (contents, shard_verdicts) in enumerate(found):
            samples += contents.samples
            verdicts += shard_verdicts
            numbers += [number] * len(contents.samples)
            left_out += [f"{shards[number].name}/{name}" for name in contents.left_out]
    display_names = [
        printable(f"{shards[number].name}/{sample.member}") for number, sample in zip(numbers, samples, strict=True)
    ]
    labels = np.array([sample.label for sample in samples], "<i4")
    class_names = name_classes(labels, class_names, display_names, max_classes)
    columns = {
        "label": labels,
        "shard": np.array(numbers, "<u2"),
        "block": np.array([sample.offset // TAR_BLOCK for sample in samples], "<u4"),
    }
    metadata = {"split": split, "class_names": class_names, "shards": describe_shards(shards)}
    names = [sample.member for sample in samples]
    return assemble_content(columns, names, verdicts, metadata, display_names), shard_notes(
        split, labels, left_out, shards
    )


def describe_shards(shards: list[Path]) -> list[list[str | int]]:
    """Return [name, size in bytes] of each, which an index keeps to notice shards that were cut, changed or added."""
    return [[shard.name, shard.stat().st_size] for shard in shards]


def read_class_names(root: Path) -> list[str] | None:
    """Read the class names of a prepared set from ROOT/dataset.json; None if there is no such file. Raises InputError."""
    path = root / "dataset.json"
    if not path.exists():
        return None
    try:
        return [str(name) for name in json.loads(path.read_text(encoding="utf-8"))["class_names"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected JSON with a list under class_names: {error!r}") from error


def _split_name(name: str) -> tuple[str, str]:
    """Split a name into (key, suffix) at the first dot of the base name."""
    folder, base = os.path.split(name)
    stem, _, suffix = base.partition(".")
    return os.path.join(folder, stem), suffix.lower()


def _is_dotted_picture(name: str) -> bool:
    """Whether a member such as `a.1.jpg` looks like an image of its own, but is a further part of sample `a`."""
    _, dot, last = _split_name(name)[1].rpartition(".")
    return bool(dot) and last in PICTURE_SUFFIXES


def _is_wanted(member: tarfile.TarInfo) -> bool:
    """Whether the member is a plain file that is not hidden. Raises InputError for an image or label that is not a plain
    file."""
    name = os.path.basename(member.name)
    if name.startswith(".") or member.isdir():
        return False
    if member.isreg() and not member.issparse():
        return True
    if name.lower().rpartition(".")[2] in (*PICTURE_SUFFIXES, "cls"):
        kind = "link" if member.islnk() or member.issym() else "sparse file" if member.issparse() else "special file"
        raise InputError(
            f"{printable(member.name)}: is a {kind}, whose bytes are not stored in the tar as they are: "
            "make the shard again with `tar --dereference --hard-dereference` and without --sparse"
        )
    return False


def _check_end(shard: Path, end: int) -> None:
    """Raise InputError if anything but a tar's usual padding follows its last member, which ends at byte `end`.

    Python's reader takes any header that it can't read for the end of the file, so that later members would be lost.
    """
    size = shard.stat().st_size
    with shard.open("rb") as file:
        file.seek(end)
        if size - end < TAR_BLOCK:
            raise InputError(f"is cut after its last whole member, at byte {end}: get the file again")
        position = end
        while chunk := file.read(1 << 20):
            if rest := chunk.lstrip(b"\0"):
                position += len(chunk) - len(rest)
                after_zeros = position >= end + TAR_BLOCK
                what = "follow after zeros" if after_zeros else "follow that do not begin with a valid header"
                raise InputError(
                    f"its members end at byte {end}, but {size - position} bytes {what}: the file is damaged there "
                    "(get it again), or several tar files were joined by `cat` (keep them apart)"
                )
            position += len(chunk)
    if size - end > _MAX_PADDING:
        raise InputError(
            f"its members end at byte {end}, but {size - end} bytes of zeros follow, more than a tar's padding: the rest of "
            "the file was never written; get it again"
        )


def _join_parts(tar: tarfile.TarFile, key: str, parts: list[tarfile.TarInfo]) -> Sample:
    pictures = [member for member in parts if _split_name(member.name)[1] in PICTURE_SUFFIXES]
    labels = [member for member in parts if _split_name(member.name)[1] == "cls"]
    own_labels = [member.name for member in parts if _split_name(member.name)[1].endswith(".cls")]
    if len(pictures) != 1 or len(labels) > 1 or own_labels:
        names = printable(", ".join(member.name for member in parts))
        raise InputError(
            f"the sample {printable(key)} ({names}) has {len(pictures)} pictures and {len(labels) + len(own_labels)} labels; "
            f"it must have one picture ({', '.join('.' + suffix for suffix in PICTURE_SUFFIXES)}) and at most one label "
            "(.cls). A sample's name ends at its first dot: rename files with more dots"
        )
    return Sample(
        pictures[0].name, _read_label(tar, labels[0]) if labels else -1, pictures[0].offset_data, pictures[0].size
    )


def _read_label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    stream = tar.extractfile(member)
    text = stream.read(32) if stream else b""
    if not re.fullmatch(rb"\s*-?\d{1,9}\s*", text):
        raise InputError(f"{printable(member.name)}: the label {text!r} is not a whole number")
    return int(text)


def _inspect_shard(shard: Path) -> tuple[ShardContents, list[Verdict]]:
    contents = read_shard(shard)
    with shard.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        return contents, [
            (sample.nbytes, inspect_stored(descriptor, sample.offset, sample.nbytes)) for sample in contents.samples
        ]


def shard_notes(split: str, labels: np.ndarray, left_out: list[str], shards: list[Path]) -> list[str]:
    """Describe what looks unintended in the shards of a split.

    labels: (n,) with -1 for none. left_out: images that belong to no sample."""
    notes = []
    numbers = sorted({int(re.findall(r"-(\d+)\.tar", shard.name)[-1]) for shard in shards})
    # a date as a number may make a gap of millions: gaps are not listed number by number
    gaps = [range(before + 1, after) for before, after in itertools.pairwise(numbers) if after > before + 1]
    if gaps:
        first = ", ".join(map(str, itertools.islice(itertools.chain(*gaps), 5)))
        notes.append(f"split {split}: no shard has number {first}: {sum(map(len, gaps))} may be missing")
    if len(numbers) < len(shards):
        notes.append(f"split {split}: several shards have the same number, all are read")
    if (unlabelled := int((labels < 0).sum())) > 0:
        notes.append(f"split {split}: {unlabelled} of {len(labels)} images have no label")
    if left_out:
        notes.append(
            f"split {split}: {len(left_out)} images with several dots in their names are parts of other samples and are "
            f"left out ({some_names(left_out)})"
        )
    return notes


def name_classes(
    labels: np.ndarray, class_names: list[str] | None, display_names: Sequence[str], max_classes: int
) -> list[str]:
    """Return the class names, by default their numbers. Raises InputError naming an image whose label is not a class."""
    if class_names is None:
        class_names = [str(label) for label in range(min(max(labels, default=-1) + 1, max_classes))]
    wrong = np.flatnonzero((labels < -1) | (labels >= len(class_names)))
    if wrong.size:
        raise InputError(
            f"{display_names[wrong[0]]}: label {labels[wrong[0]]} is not one of the {len(class_names)} classes (-1: no label; "
            "data.max_classes limits their number if no dataset.json names them)"
        )
    return class_names
