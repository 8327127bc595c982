"""Atomic writes, and messages for files that can't be read or written."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trainer.errors import InputError

_ROOT = Path(__file__).parents[1]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MACHINE_FAULTS = {
    errno.EMFILE: "allow more open files (`ulimit -n 4096`)",
    errno.ENFILE: "the machine has too many open files: raise fs.file-max, or end other programs",
    errno.ENOMEM: "the machine has no memory left: use fewer threads, or end other programs",
}
_ADVICE = {
    errno.EACCES: "change the permissions of the file or its folder, or use another one",
    errno.EPERM: "change the permissions of the file or its folder, or use another one",
    errno.EROFS: "use a folder that can be written",
    **_MACHINE_FAULTS,
}


def shipped_folder(name: str) -> Path:
    """Return a folder that comes with the program: beside the packages in a checkout, inside `trainer` if it is installed."""
    return next(folder for folder in (_ROOT / name, _ROOT / "trainer" / name) if folder.is_dir())


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write a temporary file, fsync it, rename it to `path`, and fsync the folder: a crash leaves the old file or the new one.

    Raises OSError naming `path`."""
    try:
        with _atomic_write(path) as file:
            yield file
    except OSError as error:
        # the error of a failed write has no name, that of a failed creation has the temporary file's
        if error.filename is None or error.errno in _NO_ROOM:
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
        with suppress(OSError):  # the folder may be gone; the first error is the one to report
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically, as UTF-8. Raises OSError naming `path`."""
    with atomic_write(path) as file:
        file.write(text.encode())


def describe_os_error(error: OSError, needed: int | None = None) -> str:
    """Say in one line which file, what is wrong and what to do about it. needed: bytes that the file takes, if known."""
    path = str(error.filename or "a file")
    if error.errno in _NO_ROOM:
        size = f"{needed / 2**20:.1f} MiB are needed, " if needed is not None else ""
        return (
            f"can't write {path}: {error.strerror} ({size}{_free(path)}). Free some space there, or use another folder"
        )
    advice = _ADVICE.get(error.errno or 0)
    return f"{path}: {error.strerror}" + (f": {advice}" if advice else "")


def refuse_machine_fault(error: OSError) -> None:
    """Raise InputError if the machine is at fault, so that the file that was being read is not blamed for it."""
    if error.errno in _MACHINE_FAULTS:
        raise InputError(f"can't read {describe_os_error(error)}") from error


def _free(path: str) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB are free on its disk, a quota may allow less"
    except OSError:
        return f"{folder} can't be looked at"
