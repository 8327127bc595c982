"""The folder of a run: config.yaml, checkpoints/, metrics.jsonl, tensorboard/, eval/, quarantine.jsonl, state.json, log.txt."""

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
_LOG_BYTES = 32 << 20  # of log.txt, before it becomes log.txt.1
_FILES = (".lock", "log.txt", "log.txt.1", "metrics.jsonl", "config.yaml", "state.json", "quarantine.jsonl", "images.index",
          "launch.json", "stop")  # fmt: skip
_FOLDERS = ("checkpoints", "tensorboard", "eval")
_KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a named pipe"}
_FORMAT = "%(asctime)s %(levelname).1s {rank}%(message)s"


def check_run_dir_is_set(run_dir: str) -> None:
    """Raises InputError if the setting is empty."""
    if not run_dir:
        raise InputError("run_dir is not set: give --run_dir DIR, where checkpoints and logs of this run go")


def open_run_folder(run_dir: str) -> Path:
    """Return the run folder, made if missing. Raises InputError if it can't be made, or if something else has the name of what
    a run writes there."""
    check_run_dir_is_set(run_dir)
    path = Path(run_dir)
    _check_names(path)
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"can't make the run folder {str(path)!r}: {reason}") from error
    return path


def _check_names(run_dir: Path) -> None:
    """Raise InputError for links, through which other people's files could be overwritten, and for entries that could block for
    ever, such as named pipes."""
    problems = []
    for name in (*_FILES, *_FOLDERS):
        path = run_dir / name
        wanted, word = (stat.S_IFREG, "a file") if name in _FILES else (stat.S_IFDIR, "a folder")
        if not os.path.lexists(path) or (
            name in _FOLDERS and path.is_dir()
        ):  # a link to a folder is allowed: it may be on another disk
            continue
        if (kind := stat.S_IFMT(path.lstat().st_mode)) != wanted:
            problems.append(f"{name} is {_KINDS.get(kind, 'a device or socket')}, not {word}")
    if problems:
        raise InputError(
            f"can't use the run folder {run_dir}: {'; '.join(problems)}. Move that away, or take another --run_dir (which may "
            "be a link itself)"
        )


@contextmanager
def lock_run_folder(run_dir: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Keep other processes out of the folder while the block runs: two that train into it would tear each other's files.

    The system lets go of the lock when the process ends, however it does. Raises InputError naming who holds it, if it is
    still held after `wait_seconds`."""
    try:
        file = (run_dir / ".lock").open("a+b", buffering=0)
    except OSError as error:
        raise InputError(f"can't write to the run folder {run_dir}: {error.strerror}") from error
    with file:
        try:
            _lock(file, time.monotonic() + wait_seconds)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "which did not say its name"
            raise InputError(
                f"{run_dir} is in use by another process ({holder}): wait for it to end, end it, or take another --run_dir"
            ) from error
        except OSError as error:  # a file system without locks
            _log.warning("can't lock %s (%s): see to it that no other process trains into it", run_dir, error.strerror)
        with suppress(OSError):  # the disk is full: the lock holds without a name in it
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        yield


def _lock(file: BinaryIO, end: float) -> None:
    """Raises BlockingIOError if another process holds the lock until `end`."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(1.0)


class _CurrentStderr(logging.StreamHandler):
    """Writes to the current sys.stderr, which a progress bar replaces so that it stays below the lines."""

    stream = property(lambda self: sys.stderr, lambda self, _: None)


class _LogFile(RotatingFileHandler):
    """log.txt. While the disk is full, its lines go only to stderr, without a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the base class's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def start_logging(run_dir: Path | None, rank: int) -> None:
    """Plain lines on stderr and, on the first rank, appended to log.txt; other ranks report warnings only, by their number."""
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    handlers: list[logging.Handler] = [_CurrentStderr()]
    if run_dir is not None and rank == 0:
        log_file = run_dir / "log.txt"
        handlers.append(
            _LogFile(log_file, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
        )
    for handler in handlers:
        handler.setFormatter(
            logging.Formatter(_FORMAT.format(rank=f"rank {rank}: " if rank else ""), "%Y-%m-%d %H:%M:%S")
        )
        root.addHandler(handler)
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
