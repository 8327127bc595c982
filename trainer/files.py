"""Write files atomically, and describe files that cannot be read or written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import InputError

_ROOT = Path(__file__).parents[1]
# Errors of a disk or a quota that is full, and of a file above the size limit.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors that are faults of the machine and not of a file, and the advice for them.
_MACHINE_FAULTS = {
    errno.EMFILE: "allow more open files (`ulimit -n 4096`)",
    errno.ENFILE: "the machine has too many open files: raise fs.file-max, or end other programs",
    errno.ENOMEM: "the machine has no memory left: use fewer threads, or end other programs",
}
_ADVICE = {
    errno.EACCES: "change the permissions of the file or its folder, or use another one",
    errno.EPERM: "change the permissions of the file or its folder, or use another one",
    errno.EROFS: "use a folder on a disk that is not read-only",
    **_MACHINE_FAULTS,
}


def parse_object(line: str | bytes) -> dict[str, Any]:
    """Return the object of a line of JSON. It is empty if the line holds anything else, such as one that was cut off."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # deeply nested brackets raise RecursionError
        return {}
    return values if isinstance(values, dict) else {}


def shipped_folder(name: str) -> Path:
    """Return a folder that comes with the program."""
    # It lies beside the packages in a checkout, and inside `trainer` in an installation.
    candidates = (_ROOT / name, _ROOT / "trainer" / name)
    return next(folder for folder in candidates if folder.is_dir())


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write a temporary file, fsync it, rename it to `path`, and fsync the folder.

    A crash leaves either the old file or the new one. Raises OSError with the name `path`."""
    try:
        with _atomic_write(path) as file:
            yield file
    except OSError as error:
        # The error of a failed write has no file name, and the error of a failed creation names the temporary file.
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
        with suppress(OSError):  # the folder may be gone, and the first error is the one to report
            os.unlink(temporary)
        raise
    # Make the renaming itself durable.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically as UTF-8. Raises OSError with the name `path`."""
    with atomic_write(path) as file:
        file.write(text.encode())


def describe_os_error(error: OSError, needed: int | None = None) -> str:
    """Describe in one line the file, the error and the fix. needed: size of the file in bytes, if known."""
    path = str(error.filename or "a file")
    if error.errno in _NO_ROOM:
        size = f"{needed / 2**20:.1f} MiB are needed, " if needed is not None else ""
        space = size + _describe_free_space(path)
        return f"cannot write {path}: {error.strerror} ({space}). Free some space there, or use another folder"
    advice = _ADVICE.get(error.errno or 0)
    described = f"{path}: {error.strerror}"
    return f"{described}: {advice}" if advice else described


def refuse_machine_fault(error: OSError) -> None:
    """Raise InputError for an error that is a fault of the machine, so that the file is not reported as damaged."""
    if error.errno in _MACHINE_FAULTS:
        raise InputError(f"cannot read {describe_os_error(error)}") from error


def _describe_free_space(path: str) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    try:
        free_mib = shutil.disk_usage(folder).free / 2**20
    except OSError:
        return f"the free space of {folder} is unknown"
    return f"{free_mib:.1f} MiB are free on its disk, a quota may allow less"
