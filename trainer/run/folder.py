"""Run folder: config.yaml, checkpoints/, metrics.jsonl, tensorboard/, eval/, state.json, log.txt and others (`_FILES`)."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO

from trainer.errors import InputError

_log = logging.getLogger(__name__)
_LOG_BYTES = 32 << 20  # size at which log.txt is renamed to log.txt.1
_FILES = (
    ".lock",
    "log.txt",
    "log.txt.1",
    "metrics.jsonl",
    "config.yaml",
    "state.json",
    "quarantine.jsonl",
    "images.index",
    "launch.json",
    "starts.jsonl",
    "stop",
    "certificate.json",
    "trackers.json",
)
_FOLDERS = ("checkpoints", "tensorboard", "eval")
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
}
_FORMAT = "%(asctime)s %(levelname).1s {rank}%(message)s"


def check_run_dir_is_set(run_dir: str) -> None:
    """Raise InputError if the setting run_dir is empty."""
    if not run_dir:
        raise InputError("run_dir is not set: give --run_dir DIR, the folder for checkpoints and logs of this run")


def open_run_folder(run_dir: str) -> Path:
    """Return the run folder and create it if it is missing.

    Raises InputError if it cannot be created, or if an entry in it has the name of a run's file but another type."""
    check_run_dir_is_set(run_dir)
    path = Path(run_dir)
    _check_names(path)
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: the name holds a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot create the run folder {str(path)!r}: {reason}") from error
    return path


def _check_names(run_dir: Path) -> None:
    """Raise InputError if an entry is not of the type that a run writes.

    Writing through a link could overwrite other people's files, and opening a named pipe could block for ever."""
    problems = []
    for name in (*_FILES, *_FOLDERS):
        path = run_dir / name
        is_folder = name in _FOLDERS
        # A link to a folder is allowed, so that checkpoints can be on another disk.
        if not os.path.lexists(path) or (is_folder and path.is_dir()):
            continue
        wanted = stat.S_IFDIR if is_folder else stat.S_IFREG
        found = stat.S_IFMT(path.lstat().st_mode)
        if found != wanted:
            problems.append(f"{name} is {_KINDS.get(found, 'a device or socket')}, not {_KINDS[wanted]}")
    if problems:
        raise InputError(
            f"cannot use the run folder {run_dir}: {'; '.join(problems)}. Move these entries away, or use another --run_dir "
            "(the run folder itself may be a link)"
        )


@contextmanager
def lock_run_folder(run_dir: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Lock the folder against other processes while the block runs: two runs in one folder would damage each other's files.

    The operating system releases the lock when the process ends, however it ends. Raises InputError naming the holder if
    another process still holds the lock after `wait_seconds`."""
    try:
        file = (run_dir / ".lock").open("a+b", buffering=0)
    except OSError as error:
        raise InputError(f"cannot write to the run folder {run_dir}: {error.strerror}") from error
    with file:
        try:
            _lock(file, time.monotonic() + wait_seconds)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "of unknown id"
            raise InputError(
                f"{run_dir} is in use by another process ({holder}): wait until it ends, end it, or use another --run_dir"
            ) from error
        except OSError as error:  # the file system has no locks
            _log.warning("cannot lock %s (%s): make sure that no other process trains into it", run_dir, error.strerror)
        # Write who holds the lock. On a full disk the lock holds without it.
        with suppress(OSError):
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            holder = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
            file.write(holder.encode())
        yield


def _lock(file: BinaryIO, end: float) -> None:
    """Lock the file. Raises BlockingIOError if another process still holds the lock at `end` (time.monotonic)."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(1.0)


class _CurrentStderr(logging.StreamHandler):
    """Handler for the current sys.stderr, which a progress bar replaces in order to stay below the log lines."""

    stream = property(lambda self: sys.stderr, lambda self, _: None)


class _LogFile(RotatingFileHandler):
    """Handler for log.txt. While the disk is full, lines reach only stderr, without a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the base class's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def start_logging(run_dir: Path | None, rank: int) -> None:
    """Log to stderr and, on rank 0, to log.txt in `run_dir` (None: no file).

    Other ranks log warnings only, with their number."""
    root = logging.getLogger()
    # A second call replaces the handlers, when the folder of the run is known.
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    handlers: list[logging.Handler] = [_CurrentStderr()]
    if run_dir is not None and rank == 0:
        log_file = run_dir / "log.txt"
        handlers.append(
            _LogFile(
                log_file,
                maxBytes=_LOG_BYTES,
                backupCount=1,
                encoding="utf-8",
                errors="backslashreplace",
            )
        )
    prefix = f"rank {rank}: " if rank else ""
    formatter = logging.Formatter(_FORMAT.format(rank=prefix), "%Y-%m-%d %H:%M:%S")
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
