"""Injects faults into runs, for tests and for `make soak`. Nothing in trainer/ imports it.

    code = start(["pretrain", ...], folder, Faults(kill_at_step=5))[0].wait()

`start` runs the command line in one process per rank. These are forked from a process that has imported everything, so that
a start takes tenths of a second. As under srun, only environment variables tell the ranks apart.
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
    """The faults of a run and when they happen. Steps are counted from 0, as in the plan."""

    on_rank: int = NEVER
    """Rank in which the faults happen; NEVER: in every rank."""
    kill_at_step: int = NEVER
    """Step at which the process kills itself (SIGKILL), when its views are ready."""
    freeze_at_step: int = NEVER
    """Step at which the process stops itself (SIGSTOP)."""
    raise_at_step: int = NEVER
    """Step at which the loader raises a RuntimeError."""
    signal_at_step: tuple[int, int] = (NEVER, 0)
    """(step, signal) that the process sends to itself."""
    kill_in_save: tuple[int, str] = (NEVER, "")
    """(number, place): the process kills itself in this save, counted from 0. place: writing, fsync, rename, renamed."""
    full_disk: tuple[int, int] = (NEVER, NEVER)
    """(first, end): the saves first..end-1 of this process, counted from 0, fail because the disk is full."""
    disk_errno: int = errno.ENOSPC
    """Error of a full disk: ENOSPC, or EDQUOT for a quota."""
    poison: str = ""
    """Value that is NaN in `poison_steps`: embeddings (of the last view), loss or gradient."""
    poison_steps: tuple[int, int] = (0, 0)
    """(first, end): the steps first..end-1."""
    bad_reads: tuple[int, ...] = ()
    """Images whose reads fail."""
    bad_read: str = "vanished"
    """How these reads fail: vanished, denied, io_error (always), io_error_once, cut (only 200 bytes), hangs."""
    bad_reads_after: int = 0
    """Number of reads of this process that succeed before any fails."""
    slow: str = ""
    """What takes `slow_seconds` longer each time: read or check (an image), forward, save (a checkpoint), host (the loop)."""
    slow_seconds: float = 0.0
    watch: str = ""
    """File to which each step appends a line: step, memory in bytes, number of open files, number of threads.

    The memory is anonymous memory only, because mapped files and shared pages depend on other processes.
    """


def save_unchecked(folder: Path, content: dict[str, Any]) -> Path:
    """Write a checkpoint without the checks of `save_checkpoint`, for example with weights that are not finite."""
    import torch

    from trainer.run.checkpoint import content_digest
    from trainer.run.checkpoint_files import checkpoint_path

    path = checkpoint_path(folder, content["step"])
    torch.save({**content, "sha256": content_digest(content)}, path)
    return path


def install(faults: Faults) -> None:
    """Install the faults in the trainer of this process, if it is a rank in which they happen."""
    rank = int(os.environ.get("RANK", 0))
    if faults.on_rank in (NEVER, rank):
        _break_steps(faults)
        _break_saves(faults)
        _break_numbers(faults)
        _break_reads(faults)
        if faults.slow:
            _slow_down(faults.slow, faults.slow_seconds)


_step_now = NEVER  # step of the batch that the loader returned last


def _break_steps(faults: Faults) -> None:
    """Replace the loader's iteration by one in which the faults of steps happen."""
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
    """Append a line about this process to the file `Faults.watch`."""
    me = psutil.Process()
    status = Path("/proc/self/status").read_text().split()
    own_memory = 1024 * int(status[status.index("RssAnon:") + 1])
    with open(path, "a") as file:
        file.write(f"{step} {own_memory} {me.num_fds()} {me.num_threads()}\n")


def _break_saves(faults: Faults) -> None:
    """Replace the writing of checkpoints by one that fails or kills the process."""
    number, place = faults.kill_in_save
    if number == NEVER and faults.full_disk[0] == NEVER:
        return
    from trainer.run import checkpoint

    plain_write = checkpoint.atomic_write
    saves = 0

    class File:
        """File of a checkpoint, on a full disk or in a process that is killed while it writes."""

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
    """Replace the loss of W-MSE by one that is NaN in some steps."""
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
    """Replace the index's reads by reads that fail for some images."""
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


def _slow_down(what: str, seconds: float) -> None:
    """Let a function of the trainer sleep before it does its work."""
    from trainer import loop
    from trainer.data import reader
    from trainer.data.index import Index
    from trainer.models.networks import EncoderNetwork
    from trainer.run.state import RunState

    places: dict[str, tuple[Any, str]] = {
        "read": (Index, "read"),
        "check": (reader, "inspect_image"),
        "forward": (EncoderNetwork, "encode"),
        "save": (loop, "save"),
        "host": (RunState, "note"),
    }
    owner, name = places[what]
    plain = getattr(owner, name)

    def slowed(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return plain(*arguments, **keywords)

    setattr(owner, name, slowed)


def start(arguments: Sequence[str | Path], folder: Path, faults: Faults | None = None, ranks: int = 1) -> list[Started]:
    """Start `wmse ARGUMENTS` once per rank, with `faults` installed; outputs go to files in `folder`.

    {rank} in an argument is replaced by the rank.
    """
    return start_ranks(_wmse, [faults or Faults(), *map(str, arguments)], folder, ranks)


def _wmse(faults: Faults, *arguments: str) -> int:
    install(faults)
    from trainer.cli import main

    return main(list(arguments))


def _as_command() -> int:
    """Run `python -m tests.faults '{"raise_at_step": 3}' pretrain ...`, for torchrun."""
    return _wmse(Faults(**json.loads(sys.argv[1])), *sys.argv[2:])


if __name__ == "__main__":
    sys.exit(_as_command())
