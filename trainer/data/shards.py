"""Tar shards in the WebDataset convention: SPLIT-000000.tar with members KEY.jpg (or .png, ...) and KEY.cls, the label as text.

Shards are read in place, at the offsets their headers give; nothing is ever unpacked from them. A compressed shard
(SPLIT-000000.tar.gz) cannot be read so: it is uncompressed once, as a whole, into the cache.
"""

import gzip
import itertools
import json
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.data.index_build import READ_THREADS, Verdict, assemble_content, inspect_stored, with_progress
from trainer.data.index_file import IndexContent
from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.files import atomic_write

PICTURE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jp2", "ppm", "pgm")
SHARD_NAME = re.compile(r"(.+)-\d+\.tar(?:\.gz)?")  # group 1: the split
TAR_BLOCK = 512  # bytes; members start at its multiples


class Sample(NamedTuple):
    """One picture of a shard: bytes [offset, offset + nbytes)."""

    member: str
    label: int
    offset: int
    nbytes: int


def list_shards(root: Path, split: str) -> list[Path]:
    """ROOT/SPLIT-<digits>.tar, or .tar.gz where the plain one is not there, in the order of their names."""
    names = {entry.name for entry in root.iterdir() if (m := SHARD_NAME.fullmatch(entry.name)) and m[1] == split}
    return [root / name for name in sorted(names) if name.removesuffix(".gz") not in names - {name}]


def uncompress_shard(shard: Path, cache: Path) -> Path:
    """The shard itself where plain; else its uncompressed copy in `cache`, made where missing or older than the shard."""
    if shard.suffix != ".gz":
        return shard
    copy = cache / shard.stem
    stamp = shard.stat().st_mtime_ns
    if copy.exists() and copy.stat().st_mtime_ns == stamp:
        return copy
    try:
        with gzip.open(shard) as source, atomic_write(copy) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{shard}: damaged or cut: {error}; get it again") from error
    os.utime(copy, ns=(stamp, stamp))
    return copy


def iterate_samples(shard: Path) -> Iterator[Sample]:
    """The samples of an uncompressed shard in their order. Hidden members are ignored, parts but picture and label too.

    Raises InputError naming tar and member: no picture, no label, parts not adjacent, not a tar, cut.
    """
    seen: set[str] = set()
    try:
        with tarfile.open(shard, "r:", encoding="utf-8") as tar:
            members = (member for member in tar if member.isreg() and not os.path.basename(member.name).startswith("."))
            for key, group in itertools.groupby(members, lambda member: _split_name(member.name)[0]):
                parts = list(group)
                if key in seen:
                    raise InputError(
                        f"{shard}: {printable(parts[0].name)}: the parts of sample {printable(key)} are not adjacent, "
                        "or it comes twice"
                    )
                seen.add(key)
                yield _join_parts(tar, shard, key, parts)
    except (tarfile.TarError, OSError) as error:
        raise InputError(f"{shard}: cannot be read as an uncompressed tar file, or is cut: {error}") from error


def build_shards(shards: list[Path], split: str, class_names: list[str] | None, progress: bool) -> IndexContent:
    """Content of the index of uncompressed shards. Without class names, classes are called by their numbers.

    Raises InputError naming tar and member for what `iterate_samples` refuses and for labels beyond the classes.
    """
    if len(shards) > np.iinfo(np.uint16).max:
        raise InputError(
            f"{shards[0].parent}: {len(shards)} shards of split {split}, at most 65,535: put more into each"
        )
    samples: list[Sample] = []
    verdicts: list[Verdict] = []
    numbers: list[int] = []
    with ThreadPool(READ_THREADS) as pool:
        found = with_progress(pool.imap(_inspect_shard, shards), len(shards), f"index {split}", progress)
        for number, (shard_samples, shard_verdicts) in enumerate(found):
            samples += shard_samples
            verdicts += shard_verdicts
            numbers += [number] * len(shard_samples)
    display_names = [
        printable(f"{shards[number].name}/{sample.member}") for number, sample in zip(numbers, samples, strict=True)
    ]
    labels = np.array([sample.label for sample in samples], "<i4")
    if class_names is None:
        class_names = [str(label) for label in range(max(labels, default=-1) + 1)]
    _check_labels(labels, class_names, display_names)
    columns = {
        "label": labels,
        "shard": np.array(numbers, "<u2"),
        "block": np.array([sample.offset // TAR_BLOCK for sample in samples], "<u4"),
    }
    metadata = {"split": split, "class_names": class_names, "shards": describe_shards(shards)}
    return assemble_content(columns, [sample.member for sample in samples], verdicts, metadata, display_names)


def describe_shards(shards: list[Path]) -> list[list[str | int]]:
    """[name, size in bytes] of each: what an index remembers, to notice shards that were cut, changed or added."""
    return [[shard.name, shard.stat().st_size] for shard in shards]


def read_class_names(root: Path) -> list[str] | None:
    """Class names of a prepared set, from ROOT/dataset.json; None where there is no such file."""
    path = root / "dataset.json"
    if not path.exists():
        return None
    try:
        return [str(name) for name in json.loads(path.read_text(encoding="utf-8"))["class_names"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected JSON with a list under class_names: {error!r}") from error


def _split_name(name: str) -> tuple[str, str]:
    """(key, suffix): the suffix begins at the first dot of the base name."""
    folder, base = os.path.split(name)
    stem, _, suffix = base.partition(".")
    return os.path.join(folder, stem), suffix.lower()


def _join_parts(tar: tarfile.TarFile, shard: Path, key: str, parts: list[tarfile.TarInfo]) -> Sample:
    pictures = [member for member in parts if _split_name(member.name)[1] in PICTURE_SUFFIXES]
    labels = [member for member in parts if _split_name(member.name)[1] == "cls"]
    if len(pictures) != 1 or len(labels) != 1:
        names = printable(", ".join(member.name for member in parts))
        raise InputError(
            f"{shard}: the sample {printable(key)} ({names}) has {len(pictures)} pictures and "
            f"{len(labels)} labels; it must have one picture ({', '.join('.' + suffix for suffix in PICTURE_SUFFIXES)}) "
            f"and beside it one label (.cls)"
        )
    stream = tar.extractfile(labels[0])
    text = stream.read(32) if stream else b""
    if not re.fullmatch(rb"\s*-?\d{1,9}\s*", text):
        raise InputError(f"{shard}: {printable(labels[0].name)}: the label {text!r} is not a whole number")
    return Sample(pictures[0].name, int(text), pictures[0].offset_data, pictures[0].size)


def _inspect_shard(shard: Path) -> tuple[list[Sample], list[Verdict]]:
    samples = list(iterate_samples(shard))
    with shard.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        return samples, [
            (sample.nbytes, inspect_stored(descriptor, sample.offset, sample.nbytes)) for sample in samples
        ]


def _check_labels(labels: np.ndarray, class_names: list[str], display_names: list[str]) -> None:
    wrong = np.flatnonzero((labels < -1) | (labels >= len(class_names)))
    if wrong.size:
        raise InputError(
            f"{display_names[wrong[0]]}: label {labels[wrong[0]]} is none of the {len(class_names)} classes (-1: no label)"
        )
