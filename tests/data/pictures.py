"""Helpers of the tests of the data on disk: they make small images, image folders and tar files."""

import io
import os
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def shared(name: str) -> Path:
    """Return a folder of real photographs in WMSE_TEST_DATA; skip the test if the folder does not exist."""
    folder = Path(os.environ.get("WMSE_TEST_DATA") or "no WMSE_TEST_DATA") / name
    if not folder.is_dir():
        pytest.skip(f"no real photographs: set WMSE_TEST_DATA to a folder that holds {name}/")
    return folder


def image(mode: str = "RGB", height: int = 21, width: int = 34, seed: int = 0) -> Image.Image:
    """Return an image of smooth colours with some noise, so that neither codec nor conversion is trivial."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 200 / height, columns * 200 / width, (rows + columns) * 3 % 200], -1)
    pixels = pixels + rng.integers(0, 56, pixels.shape)
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def encoded(format_name: str, picture: Image.Image | None = None, **options: object) -> bytes:
    """Return `picture`, or that of `image()`, as the bytes of a file of this format."""
    buffer = io.BytesIO()
    (picture or image()).save(buffer, format_name, **options)
    return buffer.getvalue()


def png_chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG of these chunks (type, body), with correct lengths and checksums."""
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_16_bit() -> bytes:
    """Return a PNG of random pixels with 16 bits a channel."""
    rows = np.random.default_rng(0).integers(0, 2**16, (21, 34, 3)).astype(">u2")
    header = struct.pack(">IIBBBBB", 34, 21, 16, 2, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return png_chunks((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))


def damaged_png() -> bytes:
    """Return a PNG whose structure and checksums are correct; only decoding shows that its pixel data are invalid."""
    header = struct.pack(">IIBBBBB", 34, 21, 8, 2, 0, 0, 0)
    return png_chunks((b"IHDR", header), (b"IDAT", b"no zlib stream"), (b"IEND", b""))


def make_folder(root: Path, files: dict[str, bytes]) -> Path:
    """Write files, given as path below `root` -> content; return `root`."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def make_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write a tar file of these members (name, content); return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
