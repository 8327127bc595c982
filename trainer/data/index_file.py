"""The index file: a header and plain arrays. It is memory-mapped, so all processes of a node share it.

    bytes 0-7    magic b"WMSEINDX"
    bytes 8-11   format version, uint32 (all numbers are little-endian)
    bytes 12-15  length of the metadata, uint32
    then         metadata, JSON in UTF-8: "split", "class_names", "count", "fingerprint", what the index was built from
                 ("folders" or "shards"), "is_flat" if labelled images do not lie in the folders of their classes, and
                 "columns": [name, dtype, length] of each array
    then         the arrays in the order of "columns", each starting at a multiple of 64 bytes from the file's start

The columns have one value for each image:

    label            int32   -1: no label
    height, width    int32   in pixels
    nbytes           uint32  length of the encoded image
    kind             uint8   0: direct, 1: convert
    name_end         uint32  end of the image's name in `names`
    shard            uint16  number of the tar shard (only for shards)
    block            uint32  the image starts at byte 512 * block of the shard (only for shards)

`names` holds all names in UTF-8, one after the other. An image takes 21 bytes, or 27 in shards, and the bytes of its name.
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

# The first bytes identify the file; the version changes with the layout.
MAGIC = b"WMSEINDX"
VERSION = 1
COLUMN_DTYPES = {"label": "<i4", "height": "<i4", "width": "<i4", "nbytes": "<u4", "kind": "u1", "name_end": "<u4"}
SHARD_COLUMN_DTYPES = {"shard": "<u2", "block": "<u4"}

_HEADER = struct.Struct("<8sII")  # magic, version, length of the metadata
_ALIGNMENT = 64

Columns = dict[str, npt.NDArray[Any]]


@dataclass
class IndexContent:
    """The content of an index in memory."""

    columns: Columns
    """The columns of the file except `name_end` and `names`."""
    names: list[str]
    metadata: dict[str, Any]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(name, problem) of each skipped file."""


def write_index(path: Path, content: IndexContent) -> None:
    """Write the index atomically, and SPLIT.skipped.txt next to it if files were skipped.

    Raises InputError if the names are too long.
    """
    # File names may contain bytes that are not UTF-8; surrogateescape preserves them.
    encoded = [name.encode("utf-8", "surrogateescape") for name in content.names]
    columns = dict(content.columns)
    # Sum in 64 bits first, to detect an overflow of the 32 bits in the file.
    name_end = np.cumsum([len(name) for name in encoded], dtype=np.uint64)
    if len(encoded) and name_end[-1] >= 2**32:
        raise InputError(f"{path}: the names of {len(encoded)} images take more than 4 GiB; use shorter names")
    columns["name_end"] = name_end.astype("<u4")
    columns["names"] = np.frombuffer(b"".join(encoded), np.uint8)
    # The metadata must be complete before it is written, because the arrays follow it.
    metadata = {**content.metadata, "count": len(encoded)}
    metadata["fingerprint"] = compute_fingerprint(columns, metadata["class_names"])
    metadata["columns"] = []
    for name, array in columns.items():
        metadata["columns"].append([name, array.dtype.str, len(array)])
    # ASCII, because class names need not be valid UTF-8.
    header = json.dumps(metadata, ensure_ascii=True).encode()
    with atomic_write(path) as file:
        file.write(_HEADER.pack(MAGIC, VERSION, len(header)) + header)
        # Align each array, so that it can be mapped as numbers.
        for array in columns.values():
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(array.tobytes())
    _write_skipped_list(path.with_suffix(".skipped.txt"), content.skipped)


def read_index(path: Path) -> tuple[dict[str, Any], Columns]:
    """Return metadata and memory-mapped columns. Raises InputError if the file is no index, cut off, or of another version."""
    try:
        size = path.stat().st_size
        metadata, header_bytes = _read_header(path)
        layout = []
        for name, dtype, count in metadata["columns"]:
            layout.append((name, np.dtype(dtype), int(count)))
        # An array of objects would hold memory addresses.
        has_objects = any(dtype.hasobject for _, dtype, _ in layout)
        if has_objects or any(count < 0 for _, _, count in layout):
            raise ValueError("not plain numbers")
    except InputError:
        raise
    except (struct.error, UnicodeDecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(_unusable(path, "its header is cut off or damaged")) from error
    # The lengths in the header determine where each array lies.
    spans = list(_array_spans(header_bytes, layout))
    expected = spans[-1][1] if spans else 0
    # The end of the last array must be the end of the file.
    if size != expected:
        raise InputError(_unusable(path, f"it has {size} bytes of {expected}"))
    # The columns are views of the mapped file: the system reads a page when it is first used.
    buffer = np.asarray(np.memmap(path, np.uint8, "r"))
    columns = {}
    for (start, end), (name, dtype, _) in zip(spans, layout, strict=True):
        columns[name] = buffer[start:end].view(dtype)
    return metadata, columns


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return metadata and length of the header in bytes. Raises InputError, or the errors of struct and json."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        magic, version, length = _HEADER.unpack(header)
        if magic != MAGIC:
            raise InputError(_unusable(path, "it does not begin like one"))
        if version != VERSION:
            raise InputError(_unusable(path, f"it has format version {version}, this program reads {VERSION}"))
        metadata = json.loads(file.read(length))
    return metadata, _HEADER.size + length


def check_contents(path: Path, metadata: dict[str, Any], columns: Columns, num_shards: int | None) -> None:
    """Raise InputError if an index, which may come from elsewhere, would end a run hours later at one of its images.

    num_shards: number of tar shards; None: the images are files in a folder.
    """
    problem = _find_problem(metadata, columns, num_shards)
    if problem:
        raise InputError(_unusable(path, f"{problem} cannot be right"))


# An index that was tampered with must not lead to a crash or to files outside of the data set.
def _find_problem(metadata: dict[str, Any], columns: Columns, num_shards: int | None) -> str:
    """Return what cannot be right in an index, or an empty text. Each check relies on those before it."""
    split = metadata.get("split")
    has_fingerprint = isinstance(metadata.get("fingerprint"), str)
    if not isinstance(split, str) or not is_inside(split) or not has_fingerprint:
        return "its split or fingerprint"
    class_names = metadata.get("class_names")
    if not isinstance(class_names, list) or not all(isinstance(name, str) for name in class_names):
        return "its class names"
    dtypes = COLUMN_DTYPES if num_shards is None else COLUMN_DTYPES | SHARD_COLUMN_DTYPES
    labels = columns.get("label")
    lengths = {len(columns.get(name, ())) for name in dtypes}
    # All columns must exist and have the same length, at least 1.
    if labels is None or lengths != {len(labels)} or not len(labels):
        return "the lengths of its columns"
    if any(columns[name].dtype != dtype for name, dtype in dtypes.items()):
        return "the types of its columns"
    if labels.max() >= len(class_names) or labels.min() < -1:
        return "a label, which is not the number of a class,"
    if num_shards is not None and columns["shard"].max() >= num_shards:
        return "the number of a shard"
    smallest = min(columns["height"].min(), columns["width"].min())
    if smallest < 1:
        return "the size of an image"
    return ""


def is_inside(name: str) -> bool:
    """Return whether a relative path stays inside its folder."""
    parts = name.split("/")
    return bool(name) and not name.startswith("/") and ".." not in parts


def compute_fingerprint(columns: Columns, class_names: list[str]) -> str:
    """Return a hash of all columns and the class names; it is equal only for the same images, order and labels."""
    digest = hashlib.blake2b(json.dumps(class_names).encode(), digest_size=16)
    # The order of the columns in the file does not matter.
    for name in sorted(columns):
        column = columns[name]
        digest.update(f"\n{name} {len(column)}\n".encode())
        digest.update(np.ascontiguousarray(column).view(np.uint8).data)
    return digest.hexdigest()


def _array_spans(position: int, layout: list[tuple[str, np.dtype[Any], int]]) -> Iterator[tuple[int, int]]:
    """Yield first byte and end of each array, the header ending at `position`."""
    # Each array starts at the next multiple of the alignment.
    for _, dtype, count in layout:
        start = position + -position % _ALIGNMENT
        position = start + dtype.itemsize * count
        yield start, position


def _unusable(path: Path, reason: str) -> str:
    return f"{path}: not a usable index: {reason}. Delete it, and the next start indexes the images again"


def _write_skipped_list(path: Path, skipped: list[tuple[str, str]]) -> None:
    """Write NAME<tab>PROBLEM for each skipped file, or delete an old list if no file was skipped."""
    if not skipped:
        path.unlink(missing_ok=True)
        return
    lines = [f"{name}\t{problem}\n" for name, problem in skipped]
    with atomic_write(path) as file:
        file.writelines(line.encode("utf-8", "surrogateescape") for line in lines)
