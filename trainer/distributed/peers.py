"""Failure reports between ranks: how the ranks of a job learn that one of them has failed.

NCCL does not report it: the other ranks wait in a collective until it times out. So a rank that fails writes its error
to the job's store before it does anything that may block, and a thread of every rank looks for such a report.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from trainer.distributed.ranks import Ranks
from trainer.distributed.rendezvous import compare_ranks
from trainer.errors import FAILED, InputError, TrainingFailedError, exit_code_of
from trainer.files import describe_os_error
from trainer.run.signals import aside

_log = logging.getLogger(__name__)
_FAILURE_KEY = "failure"
_READ_KEY = "failure read"
_LOOK_SECONDS = 2.0
_GRACE_SECONDS = 5.0  # gloo's collectives fail by themselves, so a rank gets this time to end in the normal way
_SAVE_SECONDS = 300.0  # longest wait for a checkpoint that is being written
_LONGEST_WORK = timedelta(hours=6)  # longest work of one rank while the others wait, such as indexing a large folder


class Failure(NamedTuple):
    """Failure of another rank."""

    message: str
    exit_code: int


class LostRankError(RuntimeError):
    """Another rank has failed, is lost or late. The log lines of that rank have the cause."""

    def __init__(self, failure: Failure | None, error: BaseException) -> None:
        """failure: the report of the other rank, if it wrote one. error: the exception of the collective."""
        first_line = str(error).partition("\n")[0]
        super().__init__(failure.message if failure else f"another rank has ended or does not answer ({first_line})")
        self.exit_code = failure.exit_code if failure else FAILED


def is_of_lost_rank(error: BaseException) -> bool:
    """Return whether an error means that another rank is lost or late."""
    if isinstance(error, (LostRankError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


class Peers:
    """Connection to the other ranks of this job, for failure reports.

    All calls do nothing if this process is the only rank."""

    def __init__(self, store: dist.Store | None = None, ranks: Ranks | None = None) -> None:
        self._store = store
        self._ranks = ranks or Ranks()
        self._told = False  # this rank has reported a failure
        self._all_know = False  # every rank raises the same error, so no rank reports it
        self._checks = 0
        self._watcher: Peers | None = None
        self.heard: Failure | None = None
        """Failure that another rank has reported."""
        self.is_saving: Callable[[], bool] = lambda: False
        """Returns whether a checkpoint is being written; the process is not ended before that."""

    def tell(self, error: BaseException) -> None:
        """Log that this rank fails, and report it to the other ranks.

        Only the first failure of a job counts, not the errors of other ranks' collectives that follow from it."""
        if self._store is None or self._told or self._all_know or is_of_lost_rank(error):
            return
        self._told = True
        store = self._store
        what = _describe(error)
        failure = Failure(f"rank {self._ranks.rank} on {socket.gethostname()} failed: {what}", exit_code_of(error))

        def report() -> None:
            with suppress(RuntimeError):  # rank 0 has ended, and the store with it
                store.compare_set(_FAILURE_KEY, "", json.dumps(failure))
                store.set(f"{_READ_KEY}/{self._ranks.rank}", "")  # this rank ends by itself

        # Report before the log line is written, since the log file's disk may be what hangs.
        aside(report)
        aside(lambda: _log.error("rank %d fails and tells the other ranks: %s", self._ranks.rank, what))

    def wait_until_heard(self) -> None:
        """Give the other ranks some seconds to read the report of rank 0, because the store ends with its process."""
        if self._store is None or not (self._told and self._ranks.is_first):
            return
        others = [f"{_READ_KEY}/{rank}" for rank in range(1, self._ranks.world_size)]
        deadline = time.monotonic() + 2 * _LOOK_SECONDS
        with suppress(RuntimeError):  # torchrun keeps the store and has ended
            while time.monotonic() < deadline and not self._store.check(others):
                time.sleep(0.05)

    def look(self) -> None:
        """Set `heard` if another rank has reported a failure."""
        if self._store is None or self._told or self.heard is not None:
            return
        with suppress(RuntimeError):  # rank 0 has ended, and the store with it
            if self._store.check([_FAILURE_KEY]):
                self.heard = Failure(*json.loads(self._store.get(_FAILURE_KEY)))
                self._store.set(f"{_READ_KEY}/{self._ranks.rank}", "")

    def ask(self) -> Failure | None:
        """Look once more, and return the failure that another rank has reported, if any.

        Uses the connection of the thread, since the main thread may be waiting on the other one."""
        if self.heard is None and self._watcher is not None:
            self._watcher.look()
            self.heard = self._watcher.heard
        return self.heard

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error itself, or for a failed collective a LostRankError with the report of the other rank."""
        if not is_of_lost_rank(error) or isinstance(error, LostRankError):
            return error
        aside(self.look)  # rank 0, which keeps the store, may hang
        return LostRankError(self.heard, error)

    @contextmanager
    def watched(self, before_exit: Callable[[Failure], None]) -> Iterator[None]:
        """End this process some seconds after another rank has failed, with its exit code, while the block runs.

        before_exit: called with the failure before the process ends."""
        if self._store is None:
            yield
            return
        ended = threading.Event()
        # The thread needs a second connection: a wait of the main thread would block a shared one.
        watcher = Peers(self._store.clone(), self._ranks)
        self._watcher = watcher
        threading.Thread(target=self._watch, args=(watcher, ended, before_exit), name="peers", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, watcher: Peers, ended: threading.Event, before_exit: Callable[[Failure], None]) -> None:
        while not ended.wait(_LOOK_SECONDS):
            watcher.look()
            if watcher.heard is None or self._told:
                continue
            self.heard = watcher.heard
            if not ended.wait(_GRACE_SECONDS) and not self._told:
                self._end(watcher.heard, before_exit)
            return

    def _end(self, failure: Failure, before_exit: Callable[[Failure], None]) -> None:
        """End the process, because its main thread may hang in a collective. Wait for a save in progress first."""
        deadline = time.monotonic() + _SAVE_SECONDS
        while self.is_saving() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        aside(lambda: _log.error("this rank ends, because %s", failure.message))
        aside(lambda: before_exit(failure))
        os._exit(failure.exit_code)

    def check(self, error: InputError | OSError | None) -> None:
        """Raise InputError on every rank if any rank passes an error. The message has the errors of all ranks.

        Every rank must call this. The ranks wait for each other through the store, because a long preparation would
        exceed the time-out of a collective."""
        if self._store is None:
            if error is not None:
                raise error
            return
        # Keys of the store cannot be reused, so each check has its own prefix.
        self._checks += 1
        store = dist.PrefixStore(f"check {self._checks}", self._store)
        problem = "" if error is None else _describe(error)
        try:
            compare_ranks(store, self._ranks, {"problem": problem}, _LONGEST_WORK, lambda: None)
        except InputError:
            self._all_know = True
            raise


def _describe(error: BaseException) -> str:
    """Describe an error in words. Only exceptions that are not meant for users show their type."""
    if isinstance(error, OSError):
        return describe_os_error(error)
    if isinstance(error, (InputError, TrainingFailedError)):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")
