"""Tar shards in the WebDataset convention: SPLIT-000000.tar with members KEY.jpg (or .png, ...) and KEY.cls, the label as text.

Shards of other tools may have the label in KEY.json or KEY.txt instead (`shard_labels`).
Images are read from the shard itself, at the offsets that the tar headers give; no member is ever unpacked to a file. This is
impossible in a compressed shard (SPLIT-000000.tar.gz), so it is uncompressed once, as a whole, into the cache.
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
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import IO, NamedTuple

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
from trainer.data.shard_labels import StoredLabel, number_labels, read_json_label, read_text_label
from trainer.errors import InputError
from trainer.files import atomic_write
from trainer.progress import with_progress

PICTURE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jp2", "ppm", "pgm")
_SHARD_NAME = re.compile(r"(?:(.+)-)?\d+\.tar(?:\.gz)?")  # group 1: the split
TAR_BLOCK = 512  # bytes; each member starts at a multiple of it
_FREE_SPACE_LEFT = 1 << 28  # bytes that stay free on the disk of the cache
_MOST_PART_BYTES = 1 << 24  # largest .json or .txt that is read
_MAX_PADDING = 10_240 + TAR_BLOCK  # bytes of zeros: an end mark of two blocks, padded to a record of 20 blocks

_log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One image of a shard: bytes [offset, offset + nbytes)."""

    member: str
    label: StoredLabel
    offset: int
    nbytes: int


def list_shards(root: Path, split: str, exact: bool = False) -> list[Path]:
    """Return ROOT/SPLIT-<digits>.tar, or .tar.gz if there is no uncompressed one, sorted by name.

    Without such shards and without a folder ROOT/SPLIT, these are the shards ROOT/PREFIX-SPLIT-<digits>.tar of other tools
    and, for the split train, ROOT/<digits>.tar. exact: only take the names of the first form.
    Raises InputError for a shard that is not a regular file, and for several prefixes.
    """
    groups = _group_shards(root)
    names = groups.get(split, set())
    if not names and not exact and not (root / split).is_dir():
        # Other tools put the name of the data set before the split.
        candidates = [name for name in groups if name.endswith((f"-{split}", f"_{split}", f".{split}"))]
        if split == "train" and "" in groups:
            candidates.append("")
        if len(candidates) > 1:
            found = ", ".join(sorted(f"{name}-*.tar" if name else "<digits>.tar" for name in candidates))
            raise InputError(
                f"{root}: the split {split!r} could be any of {found}: give the whole name before the digits as the "
                "split, such as --data.train_split NAME"
            )
        names = set().union(*(groups[name] for name in candidates))
    for name in names:
        path = root / name
        if path.exists() and not path.is_file():  # opening a named pipe would block
            raise InputError(f"{path}: has the name of a shard, but is not a file: move it away")
    # Drop a compressed shard if there is an uncompressed one of the same name.
    kept = [name for name in sorted(names) if name.removesuffix(".gz") not in names - {name}]
    return [root / name for name in kept]


def list_shard_splits(root: Path) -> list[str]:
    """Return the splits of the shards in ROOT, sorted. Shards that have no name but digits are the split train."""
    groups = _group_shards(root)
    if "" in groups:
        del groups[""]
        # Next to a folder of that name they are something else.
        if list_shards(root, "train"):
            groups["train"] = set()
    return sorted(groups)


def _group_shards(root: Path) -> dict[str, set[str]]:
    """Return the names of the shards in ROOT by the name of their split; it is empty for <digits>.tar."""
    groups: dict[str, set[str]] = {}
    for entry in root.iterdir():
        found = _SHARD_NAME.fullmatch(entry.name)
        if found:
            split = found[1] or ""
            groups.setdefault(split, set()).add(entry.name)
    return groups


def uncompress_shard(shard: Path, cache: Path) -> Path:
    """Return the shard itself if it is uncompressed, else its copy in `cache`, which is written if missing or outdated.

    Raises InputError if the shard is damaged or does not fit on the disk of the cache.
    """
    if shard.suffix != ".gz":
        return shard
    copy = cache / shard.stem
    # The copy gets the shard's modification time, which tells whether it is up to date.
    modified = shard.stat().st_mtime_ns
    if copy.exists() and copy.stat().st_mtime_ns == modified:
        return copy
    # A compressed file does not tell its uncompressed size, so check the free space while writing.
    free = shutil.disk_usage(cache).free
    packed_size = size_text(shard.stat().st_size)
    _log.info("unpacking %s (%s) into %s, which has %s free", shard, packed_size, cache, size_text(free))
    try:
        with gzip.open(shard) as source, atomic_write(copy) as target:
            # Copy in pieces of 1 MiB, so that memory stays small.
            while chunk := source.read(1 << 20):
                # Stop before the disk is full.
                if target.tell() + len(chunk) > free - _FREE_SPACE_LEFT:
                    raise InputError(
                        f"{shard}: unpacks to more than the {size_text(free)} that are free in {cache}: free some space "
                        "there, or unpack it yourself on another disk"
                    )
                target.write(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = error.args[0] if error.args else "no gzip file"  # str() of an OSError may omit the message
        raise InputError(f"{shard}: damaged or cut off: {problem}; get the file again") from error
    os.utime(copy, ns=(modified, modified))
    return copy


class ShardContents(NamedTuple):
    """The contents of a shard."""

    samples: list[Sample]
    skipped: list[str]  # members that look like images of their own but are further parts of a sample


class _Header(tarfile.TarInfo):
    """A tar header that refuses a negative size, which would let Python's reader go back and loop forever."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        # Check each header right after it is parsed.
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise InputError(f"{printable(header.name)}: its header is damaged: it gives a size of {header.size} bytes")
        return header


def read_shard(shard: Path) -> ShardContents:
    """List the samples of an uncompressed shard in their order.

    Hidden members and parts other than image and label are ignored; a sample without a label has label -1.

    Raises InputError naming tar and member for a sample without an image, for parts that are not adjacent, for a member that is
    not a regular file, and for a tar file that is damaged or whose members end before the file does.
    """
    try:
        with shard.open("rb") as file:
            return _read_samples(file)
    except InputError as error:
        raise InputError(f"{shard}: {error}") from error


def list_members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an uncompressed tar, which may itself be a member of a tar.

    The caller may read from the file between two members. Raises InputError for a tar that is damaged or whose members end
    before the file does.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", tarinfo=_Header) as tar:
            yield from tar
            _check_end(file, tar.offset)
    except InputError:  # which is a ValueError
        raise
    except (tarfile.TarError, ValueError, OverflowError) as error:  # the last two for numbers that cannot be right
        problem = printable(str(error))[:200]
        raise InputError(f"cannot be read as an uncompressed tar file, or is cut off: {problem}") from error


def _read_samples(file: IO[bytes]) -> ShardContents:
    """Group the members of a tar by key and return the sample of each group."""
    samples: list[Sample] = []
    skipped: list[str] = []
    seen: set[str] = set()
    # The parts of a sample must be adjacent, so grouping neighbours by key is enough.
    members = (member for member in list_members(file) if _is_wanted(member))
    for key, group in itertools.groupby(members, lambda member: _split_name(member.name)[0]):
        parts = list(group)
        if key in seen:
            raise InputError(
                f"{printable(parts[0].name)}: the parts of sample {printable(key)} are not adjacent, "
                "or the sample is there twice"
            )
        seen.add(key)
        samples.append(_join_parts(file, key, parts))
        skipped += [part.name for part in parts if _is_dotted_image(part.name)]
    return ShardContents(samples, skipped)


def build_shards(
    shards: list[Path],
    split: str,
    class_names: list[str] | None,
    progress: bool,
    max_classes: int = DataConfig.max_classes,
    names_of_train: Callable[[], list[str] | None] = lambda: None,
) -> tuple[IndexContent, list[str]]:
    """Build the content of the index of uncompressed shards, and notes for the user.

    class_names: None: the classes are named by the labels, and there may be at most `max_classes`.
    names_of_train: is called for the class names if the labels are texts and class_names is None; it may return None.
    Raises InputError naming tar and member as `read_shard` does, and for labels that are not a class.
    """
    if len(shards) > np.iinfo(np.uint16).max:
        raise InputError(
            f"{shards[0].parent}: {len(shards)} shards of split {split}, more than 65,535: put more images into each"
        )
    # One entry for each image: its sample, its verdict, the number of its shard and its name for messages.
    samples: list[Sample] = []
    verdicts: list[Verdict] = []
    shard_numbers: list[int] = []
    display_names: list[str] = []
    skipped: list[str] = []
    with ThreadPool(READ_THREADS) as pool:
        # Many shards are read at the same time, and their results arrive in order.
        inspected = pool.imap(_inspect_shard, shards)
        found = with_progress(inspected, len(shards), f"index {split}", progress)
        for number, (contents, shard_verdicts) in enumerate(found):
            shard_name = shards[number].name
            samples += contents.samples
            verdicts += shard_verdicts
            shard_numbers += [number] * len(contents.samples)
            display_names += [printable(f"{shard_name}/{sample.member}") for sample in contents.samples]
            skipped += [f"{shard_name}/{name}" for name in contents.skipped]
    labels, class_names = number_labels(
        [sample.label for sample in samples],
        class_names,
        display_names,
        max_classes,
        names_of_train,
    )
    # Where the bytes of each image are; `assemble_content` adds the columns that describe it.
    columns = {
        "label": labels,
        "shard": np.array(shard_numbers, "<u2"),
        "block": np.array([sample.offset // TAR_BLOCK for sample in samples], "<u4"),
    }
    metadata = {"split": split, "class_names": class_names, "shards": describe_shards(shards)}
    names = [sample.member for sample in samples]
    content = assemble_content(columns, names, verdicts, metadata, display_names)
    return content, shard_notes(split, labels, skipped, shards)


def describe_shards(shards: list[Path]) -> list[list[str | int]]:
    """Return [name, size in bytes] of each shard; an index stores them to detect shards that were cut, changed or added."""
    # Lists, because JSON has no tuples.
    return [[shard.name, shard.stat().st_size] for shard in shards]


def read_class_names(root: Path) -> list[str] | None:
    """Read the class names of a prepared set from ROOT/dataset.json; return None if there is no such file.

    Raises InputError if the file has no list of names.
    """
    path = root / "dataset.json"
    if not path.exists():
        return None
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        return [str(name) for name in description["class_names"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected JSON with a list under class_names: {error!r}") from error


def _split_name(name: str) -> tuple[str, str]:
    """Split a name into (key, suffix) at the first dot of the base name."""
    folder, base = os.path.split(name)
    stem, _, suffix = base.partition(".")
    return os.path.join(folder, stem), suffix.lower()


def _is_dotted_image(name: str) -> bool:
    """Return whether a member such as `a.1.jpg` looks like an image of its own, but is a further part of sample `a`."""
    _, dot, last = _split_name(name)[1].rpartition(".")
    return bool(dot) and last in PICTURE_SUFFIXES


def _is_wanted(member: tarfile.TarInfo) -> bool:
    """Return whether the member is a regular file that is not hidden.

    Raises InputError for an image or a label that is not a regular file.
    """
    name = os.path.basename(member.name)
    if name.startswith(".") or member.isdir():
        return False
    # A sparse file is not stored byte for byte.
    if member.isreg() and not member.issparse():
        return True
    # Other members, such as links to text files, are ignored.
    suffix = name.lower().rpartition(".")[2]
    if suffix not in (*PICTURE_SUFFIXES, "cls"):
        return False
    kind = "special file"
    if member.islnk() or member.issym():
        kind = "link"
    elif member.issparse():
        kind = "sparse file"
    raise InputError(
        f"{printable(member.name)}: is a {kind}, so the tar does not store its bytes as they are: make the shard again with "
        "`tar --dereference --hard-dereference` and without --sparse"
    )


def _check_end(file: IO[bytes], end: int) -> None:
    """Raise InputError if anything but a tar's usual padding follows its last member, which ends at byte `end`.

    Python's reader mistakes an unreadable header for the end of the file, so later members would be lost.
    """
    size = file.seek(0, os.SEEK_END)
    if size - end < TAR_BLOCK:
        raise InputError(f"is cut off after its last whole member, at byte {end}: get the file again")
    position = _find_nonzero(file, end)
    # Something other than zeros follows: a damaged header, or another tar file.
    if position is not None:
        after_zeros = position >= end + TAR_BLOCK
        what = "follow after zeros" if after_zeros else "that do not begin with a valid header follow"
        raise InputError(
            f"its members end at byte {end}, but {size - position} bytes {what}: the file is damaged there "
            "(get it again), or several tar files were joined by `cat` (keep them apart)"
        )
    if size - end > _MAX_PADDING:
        raise InputError(
            f"its members end at byte {end}, but {size - end} bytes of zeros follow, more than a tar's padding: the rest of "
            "the file was never written; get it again"
        )


def _find_nonzero(file: IO[bytes], position: int) -> int | None:
    """Return the position of the first byte from `position` on that is not zero, or None if all of them are zero."""
    file.seek(position)
    while chunk := file.read(1 << 20):
        if rest := chunk.lstrip(b"\0"):
            return position + len(chunk) - len(rest)
        position += len(chunk)
    return None


def _join_parts(file: IO[bytes], key: str, parts: list[tarfile.TarInfo]) -> Sample:
    """Make a sample of the members with the same key. Raises InputError unless there are one image and at most one label."""
    images = []
    labels = []
    dotted_labels = []  # such as `a.1.cls`, which was meant for a sample of its own
    others = {}  # suffix -> part that may hold the label if there is no .cls
    for member in parts:
        suffix = _split_name(member.name)[1]
        if suffix in PICTURE_SUFFIXES:
            images.append(member)
        elif suffix == "cls":
            labels.append(member)
        elif suffix.endswith(".cls"):
            dotted_labels.append(member)
        elif suffix in ("json", "txt"):
            others[suffix] = member
    if len(images) != 1 or len(labels) > 1 or dotted_labels:
        names = printable(", ".join(member.name for member in parts))
        suffixes = ", ".join("." + suffix for suffix in PICTURE_SUFFIXES)
        num_labels = len(labels) + len(dotted_labels)
        raise InputError(
            f"the sample {printable(key)} ({names}) has {len(images)} images and {num_labels} labels; it must have one "
            f"image ({suffixes}) and at most one label (.cls). A sample's name ends at its first dot: rename files with "
            "more dots"
        )
    image = images[0]
    label: StoredLabel = _read_label(file, labels[0]) if labels else None
    # A .cls is the label by convention; the others count only without it.
    if not labels and "json" in others:
        label = read_json_label(_read_part(file, others["json"]), others["json"].name)
    if label is None and "txt" in others:
        label = read_text_label(_read_part(file, others["txt"]))
    return Sample(
        member=image.name,
        label=label,
        offset=image.offset_data,
        nbytes=image.size,
    )


def _read_label(file: IO[bytes], member: tarfile.TarInfo) -> int:
    """Read the label of a sample, a whole number as text. Raises InputError naming the member."""
    file.seek(member.offset_data)
    text = file.read(min(32, member.size))
    # At most nine digits, so that the label fits into 32 bits.
    if not re.fullmatch(rb"\s*-?\d{1,9}\s*", text):
        raise InputError(f"{printable(member.name)}: the label {text!r} is not a whole number")
    return int(text)


def _read_part(file: IO[bytes], member: tarfile.TarInfo) -> bytes:
    """Read a part of a sample that may hold its label. Raises InputError if it is far too large for that."""
    if member.size > _MOST_PART_BYTES:
        raise InputError(f"{printable(member.name)}: has {member.size} bytes, more than {_MOST_PART_BYTES}: remove it")
    file.seek(member.offset_data)
    return file.read(member.size)


def _inspect_shard(shard: Path) -> tuple[ShardContents, list[Verdict]]:
    """List the samples of a shard and judge the image of each. Raises InputError as `read_shard` does."""
    contents = read_shard(shard)
    verdicts = []
    with shard.open("rb", buffering=0) as file:
        for sample in contents.samples:
            info = inspect_stored(file.fileno(), sample.offset, sample.nbytes)
            verdicts.append((sample.nbytes, info))
    return contents, verdicts


def shard_notes(split: str, labels: np.ndarray, skipped: list[str], shards: list[Path]) -> list[str]:
    """Describe what looks unintended in the shards of a split.

    labels: (n,) with -1 for none. skipped: members that look like images of their own but are parts of other samples.
    """
    notes = []
    if other_name := next((shard.name for shard in shards if not shard.name.startswith(f"{split}-")), None):
        notes.append(f"split {split}: no shards have this name: reading {other_name} and those named like it")
    digits = [re.findall(r"(\d+)\.tar", shard.name)[-1] for shard in shards]
    numbers = sorted(set(map(int, digits)))
    # Gaps are kept as ranges: if the numbers are dates, a gap may span millions of them.
    neighbours = itertools.pairwise(numbers)
    gaps = [range(before + 1, after) for before, after in neighbours if after > before + 1]
    if gaps:
        num_missing = sum(map(len, gaps))
        first_missing = itertools.islice(itertools.chain(*gaps), 5)
        first = ", ".join(map(str, first_missing))
        notes.append(f"split {split}: no shard has number {first}: {num_missing} may be missing")
    if len(numbers) < len(shards):
        notes.append(f"split {split}: several shards have the same number; all of them are read")
    if (unlabelled := int((labels < 0).sum())) > 0:
        notes.append(f"split {split}: {unlabelled} of {len(labels)} images have no label")
    if skipped:
        notes.append(
            f"split {split}: {len(skipped)} images with several dots in their names are parts of other samples and are "
            f"skipped ({some_names(skipped)})"
        )
    return notes
