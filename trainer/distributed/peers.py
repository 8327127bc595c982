"""How the ranks of a job learn that one of them fails.

Over NCCL nothing tells them: they wait in a collective until it times out. So a rank that fails says so in the job's store
before it does anything that may block, and a thread of every rank looks there.
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
_FAILURE_KEY, _READ_KEY = "failure", "failure read"
_LOOK_SECONDS = 2.0
_GRACE_SECONDS = 5.0  # gloo ends the other ranks by itself, with their own last lines
_SAVE_SECONDS = 300.0  # longest wait for a checkpoint that is being written
_LONGEST_WORK = timedelta(hours=6)  # for what one rank does while the others wait, such as indexing a large folder


class Failure(NamedTuple):
    """Why another rank ends."""

    message: str
    exit_code: int


class LostRankError(RuntimeError):
    """Another rank has failed, is gone or late: the cause is in that rank's log lines."""

    def __init__(self, failure: Failure | None, error: BaseException) -> None:
        """failure: what the other rank reported, if anything. error: what the collective raised."""
        first_line = str(error).partition("\n")[0]
        super().__init__(failure.message if failure else f"another rank is gone or late ({first_line})")
        self.exit_code = failure.exit_code if failure else FAILED


def is_of_lost_rank(error: BaseException) -> bool:
    """Whether an error means that another rank is gone or late."""
    of_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return of_gloo or isinstance(error, (LostRankError, dist.DistError))


class Peers:
    """The other ranks of this job. One process alone has none, and does nothing here."""

    def __init__(self, store: dist.Store | None = None, ranks: Ranks | None = None) -> None:
        self._store, self._ranks = store, ranks or Ranks()
        self._told = False
        self._all_know = False
        self._checks = 0
        self._watcher: Peers | None = None
        self.heard: Failure | None = None
        """The failure of another rank that the thread has found."""
        self.is_saving: Callable[[], bool] = lambda: False
        """Whether a checkpoint is being written, so that the process can't be ended yet."""

    def tell(self, error: BaseException) -> None:
        """Log that this rank fails and tell the others. Only the first failure of a job counts: not the errors of collectives
        that follow from it."""
        if self._store is None or self._told or self._all_know or is_of_lost_rank(error):
            return
        self._told = True
        store, what = self._store, _in_words(error)
        failure = Failure(f"rank {self._ranks.rank} on {socket.gethostname()} failed: {what}", exit_code_of(error))

        def set_first() -> None:
            with suppress(RuntimeError):  # the store has gone with rank 0
                store.compare_set(_FAILURE_KEY, "", json.dumps(failure))
                store.set(f"{_READ_KEY}/{self._ranks.rank}", "")  # this rank ends by itself

        aside(set_first)  # before the log line, whose file system may be what hangs
        aside(lambda: _log.error("rank %d fails and tells the other ranks: %s", self._ranks.rank, what))

    def wait_until_heard(self) -> None:
        """Wait some seconds for the other ranks to look, on the rank that keeps the store: it goes with the process."""
        if self._store is None or not (self._told and self._ranks.is_first):
            return
        others = [f"{_READ_KEY}/{rank}" for rank in range(1, self._ranks.world_size)]
        deadline = time.monotonic() + 2 * _LOOK_SECONDS
        with suppress(RuntimeError):  # the store is torchrun's, and gone
            while time.monotonic() < deadline and not self._store.check(others):
                time.sleep(0.05)

    def look(self) -> None:
        """Set `heard` if another rank has told a failure."""
        with suppress(RuntimeError):  # the store has gone with rank 0
            if self._store is not None and not self._told and self.heard is None and self._store.check([_FAILURE_KEY]):
                self.heard = Failure(*json.loads(self._store.get(_FAILURE_KEY)))
                self._store.set(f"{_READ_KEY}/{self._ranks.rank}", "")

    def ask(self) -> Failure | None:
        """Look once more, and return the failure that another rank has told, if any. For other threads than the main one, which
        may hold the store's connection."""
        if self.heard is None and self._watcher is not None:
            self._watcher.look()
            self.heard = self._watcher.heard
        return self.heard

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error itself, or for a collective that failed a LostRankError with what the other rank has told."""
        if not is_of_lost_rank(error) or isinstance(error, LostRankError):
            return error
        aside(self.look)  # rank 0, which keeps the store, may hang
        return LostRankError(self.heard, error)

    @contextmanager
    def watched(self, before_exit: Callable[[Failure], None]) -> Iterator[None]:
        """While the block runs, end this process some seconds after another rank has failed, with that rank's exit code."""
        if self._store is None:
            yield
            return
        ended = threading.Event()
        # a wait of the main thread would hold up a shared connection
        own = self._watcher = Peers(self._store.clone(), self._ranks)
        threading.Thread(target=self._watch, args=(own, ended, before_exit), name="peers", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, own: Peers, ended: threading.Event, before_exit: Callable[[Failure], None]) -> None:
        while not ended.wait(_LOOK_SECONDS):
            own.look()
            if own.heard is None or self._told:
                continue
            self.heard = own.heard
            if not ended.wait(_GRACE_SECONDS) and not self._told:
                self._end(own.heard, before_exit)
            return

    def _end(self, failure: Failure, before_exit: Callable[[Failure], None]) -> None:
        """End the process, whose main thread may hang in a collective, but not in the middle of a save."""
        deadline = time.monotonic() + _SAVE_SECONDS
        while self.is_saving() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        aside(lambda: _log.error("this rank ends, because %s", failure.message))
        aside(lambda: before_exit(failure))
        os._exit(failure.exit_code)

    def check(self, error: InputError | OSError | None) -> None:
        """Raise InputError on every rank if any of them gives an error, naming each. All ranks call this, and wait for each
        other without a collective, whose time-out a long preparation would exceed."""
        if self._store is None:
            if error is not None:
                raise error
            return
        self._checks += 1
        store = dist.PrefixStore(f"check {self._checks}", self._store)
        problem = "" if error is None else _in_words(error)
        try:
            compare_ranks(store, self._ranks, {"problem": problem}, _LONGEST_WORK, lambda: None)
        except InputError:
            self._all_know = True
            raise


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return describe_os_error(error)
    is_plain = isinstance(error, (InputError, TrainingFailedError))
    return str(error) if is_plain else f"{type(error).__name__}: {error}".rstrip(": ")
