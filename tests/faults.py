"""Breaks a run on purpose: a small tool for tests and for `make soak`. Nothing in trainer/ knows of it.

    code = start(["pretrain", ...], folder, Faults(kill_at_step=5))[0].wait()

`start` runs the command line in processes of their own (ranks as srun would start them: only environment variables), forked
from one that has imported everything, so that a start costs tenths of a second.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.processes import Started, start_ranks

NEVER = -1


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and when; steps count from 0, as in the plan."""

    on_rank: int = NEVER
    """The one rank that is struck; NEVER: every rank."""
    kill_at_step: int = NEVER
    """SIGKILL when the views of this step are ready."""
    freeze_at_step: int = NEVER
    """SIGSTOP."""
    raise_at_step: int = NEVER
    """An exception."""
    signal_at_step: tuple[int, int] = (NEVER, 0)
    """(step, signal): the process sends it to itself."""
    kill_in_save: tuple[int, str] = (NEVER, "")
    """(n, place): SIGKILL in the n-th save of this process, from 0; place: writing, fsync, rename, renamed."""
    full_disk: tuple[int, int] = (NEVER, NEVER)
    """The n-th save of this process, from the first number up to but without the second, meets a full disk half way."""
    disk_errno: int = errno.ENOSPC
    """ENOSPC: full; EDQUOT: quota."""
    poison: str = ""
    """What is NaN in `poison_steps`: embeddings (of the last view), loss, gradient."""
    poison_steps: tuple[int, int] = (0, 0)
    """First step and the one after the last."""
    bad_reads: tuple[int, ...] = ()
    """Images whose reading fails."""
    bad_read: str = "vanished"
    """How: vanished, denied, io_error (always), io_error_once, cut, hangs."""
    bad_reads_after: int = 0
    """Reads of this process that go well before any fails."""
    watch: str = ""
    """File to which each step appends a line: step, memory in bytes, open files, threads. The memory is what the process
    has made itself, since mapped files and shared pages come and go with other processes."""


def save_unchecked(folder: Path, content: dict[str, Any]) -> Path:
    """Write a checkpoint as it is, whatever its weights hold."""
    import torch

    from trainer.run.checkpoint import content_digest
    from trainer.run.checkpoint_files import checkpoint_path

    path = checkpoint_path(folder, content["step"])
    torch.save({**content, "sha256": content_digest(content)}, path)
    return path


def install(faults: Faults) -> None:
    """Put the faults into this process's trainer."""
    rank = int(os.environ.get("RANK", 0))
    if faults.on_rank in (NEVER, rank):
        _break_steps(faults)
        _break_saves(faults)
        _break_numbers(faults)
        _break_reads(faults)


_step_now = NEVER  # of the batch that was handed over last


def _break_steps(faults: Faults) -> None:
    from trainer.data.loader import Batch, ViewLoader

    plain = ViewLoader.__iter__

    def iterate(self: ViewLoader) -> Iterator[Batch]:
        global _step_now
        for batch in plain(self):
            _step_now = batch.step
            if faults.watch:
                _append_sizes(faults.watch, batch.step)
            if batch.step == faults.kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)
            if batch.step == faults.freeze_at_step:
                os.kill(os.getpid(), signal.SIGSTOP)
            if batch.step == faults.signal_at_step[0]:
                os.kill(os.getpid(), faults.signal_at_step[1])
            if batch.step == faults.raise_at_step:
                raise RuntimeError("the fault that was injected")
            yield batch

    ViewLoader.__iter__ = iterate  # type: ignore[method-assign]


def _append_sizes(path: str, step: int) -> None:
    me = psutil.Process()
    status = Path("/proc/self/status").read_text().split()
    own_memory = 1024 * int(status[status.index("RssAnon:") + 1])
    with open(path, "a") as file:
        file.write(f"{step} {own_memory} {me.num_fds()} {me.num_threads()}\n")


def _break_saves(faults: Faults) -> None:
    number, place = faults.kill_in_save
    if number == NEVER and faults.full_disk[0] == NEVER:
        return
    from trainer.run import checkpoint

    plain_write = checkpoint.atomic_write
    saves = 0

    class File:
        """A checkpoint's file, on a disk that is full or in a process that is killed."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: Any) -> int:
            if place == "writing" and saves > number:
                self._file.write(bytes(data)[: len(data) // 2])
                self._file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            if faults.full_disk[0] < saves <= faults.full_disk[1]:
                raise OSError(faults.disk_errno, os.strerror(faults.disk_errno))
            return int(self._file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    @contextlib.contextmanager
    def atomic_write(path: Path) -> Iterator[Any]:
        nonlocal saves
        saves += 1
        with plain_write(path) as file:
            yield File(file)

    def killed_at(name: str, function: Callable[..., Any], after: bool) -> None:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords) if after else None
            if saves > number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result if after else function(*arguments, **keywords)

        setattr(os, name, wrapped)

    checkpoint.atomic_write = atomic_write
    if place == "fsync":
        killed_at("fsync", os.fsync, after=False)
    elif place in ("rename", "renamed"):
        killed_at("replace", os.replace, after=place == "renamed")


def _break_numbers(faults: Faults) -> None:
    if not faults.poison:
        return
    from trainer.methods.wmse import method

    plain = method.wmse_loss_with_status
    first, end = faults.poison_steps

    def poisoned(v: Any, **keywords: Any) -> Any:
        if not first <= _step_now < end:
            return plain(v, **keywords)
        if faults.poison == "embeddings":
            factor = v.new_ones(len(v), 1)
            factor[-1] = float("nan")
            return plain(v * factor, **keywords)
        loss, status = plain(v, **keywords)
        if faults.poison == "gradient":
            loss.register_hook(lambda gradient: gradient * float("nan"))
            return loss, status
        return loss * float("nan"), status

    method.wmse_loss_with_status = poisoned


def _break_reads(faults: Faults) -> None:
    if not faults.bad_reads:
        return
    from trainer.data.index import Index

    plain = Index.read
    reads = 0
    failed: set[int] = set()

    def read(self: Index, i: int) -> bytes:
        nonlocal reads
        reads += 1
        if i not in faults.bad_reads or reads <= faults.bad_reads_after:
            return plain(self, i)
        if faults.bad_read == "hangs":
            time.sleep(10_000)
        if faults.bad_read == "cut":
            return plain(self, i)[:200]
        if faults.bad_read == "io_error_once" and i in failed:
            return plain(self, i)
        failed.add(i)
        number = {"vanished": errno.ENOENT, "denied": errno.EACCES}.get(faults.bad_read, errno.EIO)
        raise OSError(number, os.strerror(number), self.name(i))

    Index.read = read  # type: ignore[method-assign]


def start(words: Sequence[str | Path], folder: Path, faults: Faults | None = None, ranks: int = 1) -> list[Started]:
    """Start `wmse WORDS` once per rank, with `faults` installed; outputs go to files in `folder`.

    {rank} in a word becomes the rank.
    """
    return start_ranks(_wmse, [faults or Faults(), *map(str, words)], folder, ranks)


def _wmse(faults: Faults, *words: str) -> int:
    install(faults)
    from trainer.cli import main

    return main(list(words))


def _as_command() -> int:
    """Run `python -m tests.faults '{"raise_at_step": 3}' pretrain ...`, for torchrun."""
    return _wmse(Faults(**json.loads(sys.argv[1])), *sys.argv[2:])


if __name__ == "__main__":
    sys.exit(_as_command())
