"""Files that appear under their name only when they are complete, and what is said where they can't."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trainer.errors import MACHINE_FAULTS

_ROOT = Path(__file__).parents[1]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADVICE = {
    errno.EACCES: "change the rights of the file or its folder, or take another one",
    errno.EPERM: "change the rights of the file or its folder, or take another one",
    errno.EROFS: "take a folder that can be written",
    **MACHINE_FAULTS,
}


def shipped_folder(name: str) -> Path:
    """A folder that comes with the program: beside the packages in a checkout, inside `trainer` where it is installed."""
    return next(folder for folder in (_ROOT / name, _ROOT / "trainer" / name) if folder.is_dir())


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Temporary file, fsync, rename, fsync of the folder: a crash leaves the old file or the new one, never a torn one. An
    OSError that is raised names `path`."""
    try:
        with _atomic_write(path) as file:
            yield file
    except OSError as error:
        if (
            error.filename is None or error.errno in _NO_ROOM
        ):  # a failed write knows no name, a failed creation the wrong one
            error.filename = str(path)
        raise


@contextmanager
def _atomic_write(path: Path) -> Iterator[BinaryIO]:
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


def describe_os_error(error: OSError, needed: int | None = None) -> str:
    """In a line: which file, what is wrong, and what to do about it. needed: bytes that the file takes, where that is known."""
    path = str(error.filename)
    if error.errno in _NO_ROOM:
        size = f"{needed / 2**20:.1f} MiB are needed, " if needed is not None else ""
        return f"can't write {path}: {error.strerror} ({size}{_free(path)}). Make room there, or take another folder"
    advice = _ADVICE.get(error.errno or 0)
    return f"{path}: {error.strerror}" + (f": {advice}" if advice else "")


def _free(path: str) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB are free on its disk, a quota may allow less"
    except OSError:
        return f"{folder} can't be looked at"
