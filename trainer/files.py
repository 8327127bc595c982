"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_ROOT = Path(__file__).parents[1]


def shipped_folder(name: str) -> Path:
    """A folder that comes with the program: beside the packages in a checkout, inside `trainer` where it is installed."""
    return next(folder for folder in (_ROOT / name, _ROOT / "trainer" / name) if folder.is_dir())


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Temporary file, fsync, rename, fsync of the folder: a crash leaves the old file or the new one, never a torn one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's files are private; results are shared
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the folder may have gone: what went wrong first is what is told
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    """A small text file, atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())
