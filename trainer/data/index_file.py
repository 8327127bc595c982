"""The index file: a header and plain arrays, memory-mapped, shared by all processes of a node.

    bytes 0-7    magic b"WMSEINDX"
    bytes 8-11   format version, uint32 (all numbers little-endian)
    bytes 12-15  length of the metadata, uint32
    then         metadata, JSON in UTF-8: "split", "class_names", "count", "fingerprint", what it was built from
                 ("folders" or "shards"), and "columns": [name, dtype, length] of each array
    then         the arrays in the order of "columns", each starting at a multiple of 64 bytes from the file's start

Columns, one value an image: label int32 (-1: none), height and width int32 (pixels), nbytes uint32, kind uint8 (1: convert),
name_end uint32 (where its name ends in `names`); from tar shards also shard uint16 and block uint32 (the picture starts at byte
512 * block of the shard). `names` holds all names in UTF-8, one after the other. 21 or 27 bytes an image and its name.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.errors import InputError
from trainer.files import atomic_write

MAGIC = b"WMSEINDX"
VERSION = 1
COLUMN_DTYPES = {"label": "<i4", "height": "<i4", "width": "<i4", "nbytes": "<u4", "kind": "u1", "name_end": "<u4"}
SHARD_COLUMN_DTYPES = {"shard": "<u2", "block": "<u4"}

_HEADER = struct.Struct("<8sII")
_ALIGNMENT = 64

Columns = dict[str, npt.NDArray[Any]]


@dataclass
class IndexContent:
    """An index in memory. `columns` as in the file but for the names; `bad` lists (name, problem) of the files left out."""

    columns: Columns
    names: list[str]
    metadata: dict[str, Any]
    bad: list[tuple[str, str]] = field(default_factory=list)


def write_index(path: Path, content: IndexContent) -> None:
    """Write the index atomically, and SPLIT.bad.txt beside it if files were left out."""
    encoded = [name.encode("utf-8", "surrogateescape") for name in content.names]
    columns = dict(content.columns)
    columns["name_end"] = np.cumsum([len(name) for name in encoded], dtype=np.uint64)
    if len(encoded) and columns["name_end"][-1] >= 2**32:
        raise InputError(f"{path}: the names of {len(encoded)} images are over 4 GiB; use shorter names")
    columns["name_end"] = columns["name_end"].astype("<u4")
    columns["names"] = np.frombuffer(b"".join(encoded), np.uint8)
    metadata = {**content.metadata, "count": len(encoded)}
    metadata["fingerprint"] = compute_fingerprint(columns, metadata["class_names"])
    metadata["columns"] = [[name, array.dtype.str, len(array)] for name, array in columns.items()]
    header = json.dumps(metadata, ensure_ascii=True).encode()
    with atomic_write(path) as file:
        file.write(_HEADER.pack(MAGIC, VERSION, len(header)) + header)
        for array in columns.values():
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(array.tobytes())
    _write_bad_list(path.with_suffix(".bad.txt"), content.bad)


def read_index(path: Path) -> tuple[dict[str, Any], Columns]:
    """Return metadata and memory-mapped columns. Raises InputError if the file is not an index, cut off, or of another
    version."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic, version, length = _HEADER.unpack(file.read(_HEADER.size))
            if magic != MAGIC:
                raise InputError(_unusable(path, "it does not begin like one"))
            if version != VERSION:
                raise InputError(_unusable(path, f"it has format version {version}, this program reads {VERSION}"))
            metadata = json.loads(file.read(length))
        layout = [(name, np.dtype(dtype), int(count)) for name, dtype, count in metadata["columns"]]
        if any(dtype.hasobject or count < 0 for _, dtype, count in layout):  # objects would be memory addresses
            raise ValueError("not plain numbers")
    except (struct.error, UnicodeDecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(_unusable(path, "its header is cut or damaged")) from error
    ends = list(_layout_ends(_HEADER.size + length, layout))
    if size != (expected := ends[-1][1] if ends else 0):
        raise InputError(_unusable(path, f"it has {size} bytes of {expected}"))
    buffer = np.asarray(np.memmap(path, np.uint8, "r"))
    columns = {name: buffer[a:b].view(dtype) for (a, b), (name, dtype, _) in zip(ends, layout, strict=True)}
    return metadata, columns


def check_contents(path: Path, metadata: dict[str, Any], columns: Columns, num_shards: int | None) -> None:
    """Raise InputError if the index, which may come from elsewhere, would end a run hours later at one of its images.

    num_shards: how many tar shards it is of; None: it is of an image folder."""
    dtypes = COLUMN_DTYPES if num_shards is None else COLUMN_DTYPES | SHARD_COLUMN_DTYPES
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
        problem = "a label, which is not the number of a class,"
    elif num_shards is not None and columns["shard"].max() >= num_shards:
        problem = "the number of a shard"
    elif min(columns["height"].min(), columns["width"].min()) < 1:
        problem = "the size of an image"
    if problem:
        raise InputError(_unusable(path, f"{problem} can't be right"))


def is_inside(name: str) -> bool:
    """Whether a relative path stays inside its folder."""
    return bool(name) and not name.startswith("/") and ".." not in name.split("/")


def compute_fingerprint(columns: Columns, class_names: list[str]) -> str:
    """Hash all columns and the class names: equal only for the same images in the same order with the same labels."""
    digest = hashlib.blake2b(json.dumps(class_names).encode(), digest_size=16)
    for name in sorted(columns):
        digest.update(f"\n{name} {len(columns[name])}\n".encode())
        digest.update(np.ascontiguousarray(columns[name]).view(np.uint8).data)
    return digest.hexdigest()


def _layout_ends(position: int, layout: list[tuple[str, np.dtype[Any], int]]) -> Iterator[tuple[int, int]]:
    for _, dtype, count in layout:
        position += -position % _ALIGNMENT
        yield position, position + dtype.itemsize * count
        position += dtype.itemsize * count


def _unusable(path: Path, reason: str) -> str:
    return f"{path}: not a usable index: {reason}. Delete it: the next start indexes the images again"


def _write_bad_list(path: Path, bad: list[tuple[str, str]]) -> None:
    if not bad:
        path.unlink(missing_ok=True)
        return
    with atomic_write(path) as file:
        file.writelines(f"{name}\t{problem}\n".encode("utf-8", "surrogateescape") for name, problem in bad)
