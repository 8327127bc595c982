"""state.json: what a run is doing and what became of it, for `wmse status`, the evaluator, schedulers and people.

Rank 0 rewrites the file at every change and, from a thread, every few seconds, so that its "heartbeat" tells a run that
lives from one that was killed. docs/reliability.md lists the keys.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.cluster.runs import read_run, whole
from trainer.distributed.ranks import Ranks
from trainer.errors import DONE, FAILED, PREEMPTED, InputError, TrainingFailedError, exit_code_of
from trainer.files import write_text
from trainer.run.checkpoint_files import newest_step
from trainer.run.folder import lock_run_folder
from trainer.run.signals import STOP, StopRequest

_log = logging.getLogger(__name__)
_MESSAGE_LENGTH = 500
_BEAT_SECONDS = 15.0
_LOOK_SECONDS = 2.0  # `wmse stop` is noticed this fast
_SILENT_SECONDS = 900.0  # longer than timeout_minutes, which ends the other ranks
_LOCK_SECONDS = 3.0  # a write that hangs on its file system must not hold up the end of the process


def stop_file(run_dir: Path) -> Path:
    """The file by which `wmse stop` asks a run to end."""
    return run_dir / "stop"


def _stopped_job(run_dir: Path) -> str:
    """The SLURM job that `wmse stop` meant, empty if it was none."""
    try:
        return stop_file(run_dir).read_text().strip()
    except OSError:
        return ""


class RunState:
    """The state of the run, which only rank 0 writes. Safe to use from several threads."""

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self._run_dir = run_dir
        self._writes = ranks.is_first
        self._lock = threading.Lock()
        self._fields_lock = threading.Lock()  # never held while something is written
        self._ranks = ranks
        self._fields: dict[str, Any] = {}

    @property
    def starts(self) -> int:
        """How often this run was started, this time included."""
        return int(self._fields["starts"])

    def start(self, max_idle_restarts: int) -> None:
        """Begin to write, and forget an earlier `wmse stop`. The caller holds the folder's lock.

        Raises TrainingFailedError if SLURM requeued this job `max_idle_restarts` times in a row without a new checkpoint."""
        before = read_run(self._run_dir).state
        step = newest_step(self._run_dir)
        is_idle = self._ranks.restarts > 0 and before.get("first_step") == step
        idle_starts = (whole(before, "idle_starts") or 0) + 1 if is_idle else 0
        self.write(
            status="starting",
            exit_code=None,
            step=step,
            first_step=step,
            starts=(whole(before, "starts") or 0) + 1,
            idle_starts=idle_starts,
            world_size=self._ranks.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            job={"id": self._ranks.job_id, "restarts": self._ranks.restarts} if self._ranks.job_id else None,
        )
        if _stopped_job(self._run_dir) != self._ranks.job_id or not self._ranks.job_id:
            self._forget_stop()  # it stopped an earlier job, or an earlier start by hand
        if idle_starts >= max_idle_restarts:
            raise TrainingFailedError(
                f"{idle_starts} starts in a row produced no checkpoint beyond step {step}, so this job is not requeued: see "
                f"{self._run_dir / 'log.txt'} for what ended them. Give the job more time or the run more frequent checkpoints "
                "(checkpoint.every_minutes), and submit it again"
            )

    def _forget_stop(self) -> None:
        path = stop_file(self._run_dir)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"can't remove {path}, which asks the run to stop: {error.strerror}. Remove it") from error

    def note(self, **fields: Any) -> None:
        """Change fields without writing them; the next heartbeat does."""
        with self._fields_lock:  # two threads that change fields at once must not undo each other
            self._fields = self._fields | fields

    def write(self, **fields: Any) -> None:
        """Change fields and write the file. A file that can't be written is logged and ends nothing."""
        self.note(**fields)
        if not self._writes:
            return
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            _log.error("can't write %s: an earlier write hangs", self._run_dir / "state.json")
            return
        try:
            now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "heartbeat": round(time.time(), 3)}
            now |= {"checkpoint_step": newest_step(self._run_dir) or None}
            write_text(self._run_dir / "state.json", json.dumps(self._fields | now) + "\n")
        except OSError as error:
            _log.error("can't write %s (%s): %s", self._run_dir / "state.json", self._fields["status"], error.strerror)
        finally:
            self._lock.release()

    def ended(self, status: str, exit_code: int, **fields: Any) -> None:
        """Write how this start ended. Later calls change nothing: the first is the cause."""
        if self._fields.get("exit_code") is None:
            self.write(status=status, exit_code=exit_code, **fields)

    def preempted(self) -> None:
        """Write that a signal ended the process before the loop could."""
        self.ended("preempted", PREEMPTED, step=newest_step(self._run_dir))

    def hung(self, message: str) -> None:
        """Write that the watchdog ends the process, and what it waited for."""
        self.ended("failed", FAILED, step=newest_step(self._run_dir), message=message[:_MESSAGE_LENGTH])

    def lost_rank(self, message: str, exit_code: int) -> None:
        """Write that the failure of another rank ends the run."""
        self.ended("failed", exit_code, step=newest_step(self._run_dir), message=message[:_MESSAGE_LENGTH])

    def failed(self, error: BaseException) -> None:
        """Write that an error ends the run, unless this rank never came to hold the folder. The first call's message stays."""
        if not self._fields:
            return
        message = " ".join(str(error).split())[:_MESSAGE_LENGTH] or type(error).__name__
        self.ended("failed", exit_code_of(error), message=message)
        if self._fields["status"] == "failed":
            self.write(step=newest_step(self._run_dir))  # a checkpoint may have been finished since the first call

    @contextmanager
    def heartbeat(self, stop: StopRequest) -> Iterator[None]:
        """Rewrite the file every few seconds while the block runs, and turn `wmse stop` into a stop request."""
        if not self._writes:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(stop, ended), name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_LOCK_SECONDS)  # it may hang on its file system

    def _beat(self, stop: StopRequest, ended: threading.Event) -> None:
        last = time.monotonic()
        while not ended.wait(_LOOK_SECONDS):
            if not stop.asked and os.path.exists(stop_file(self._run_dir)):  # Path.exists raises for a stale handle
                _log.warning("`wmse stop` was called: saving a checkpoint and stopping after the current step")
                stop.ask(STOP)
            if time.monotonic() - last >= _BEAT_SECONDS:
                self.write()
                last = time.monotonic()


def wait_for_end(run_dir: Path, stop: StopRequest, timeout_seconds: float) -> int:
    """Wait on a rank that has nothing to do until the others have ended; returns the exit code of the run.

    The rank stays because srun and torchrun may take an early end for a failure. It gives up when rank 0 has given no
    sign of life for a while."""
    stop.allow(timeout_seconds)
    _log.warning("the global batch size can't be divided evenly among all ranks: this rank stays idle")
    before = last = read_run(run_dir).state.get("heartbeat")
    heard = time.monotonic()
    while time.monotonic() - heard < _SILENT_SECONDS:
        state = read_run(run_dir).state
        beat = state.get("heartbeat")
        if state.get("exit_code") is not None and beat != before:
            return int(state["exit_code"])
        if beat != last:
            last = beat
            heard = time.monotonic()
        time.sleep(_LOOK_SECONDS)
    _log.error("no sign of life from rank 0 for %.0f s: this rank ends", _SILENT_SECONDS)
    return DONE


def note_lost_rank_0(run_dir: Path, error: BaseException) -> None:
    """Write that the run failed, if rank 0 was killed before it could; for a rank that has lost another one.

    A rank 0 that is alive holds the folder's lock and writes itself how the run ends."""
    try:
        with lock_run_folder(run_dir):
            state = read_run(run_dir).state
            if state.get("status") in ("starting", "running") and state.get("exit_code") is None:
                message = f"rank 0 was lost: {str(error).partition(chr(10))[0]}"[:_MESSAGE_LENGTH]
                state |= {"status": "failed", "exit_code": FAILED, "message": message, "step": newest_step(run_dir)}
                write_text(run_dir / "state.json", json.dumps(state) + "\n")
                _log.error(
                    "rank 0 was lost before it could write how the run ended: state.json now says that it failed"
                )
    except InputError:  # rank 0 holds the lock
        return
    except OSError as problem:
        _log.error("can't write %s: %s", run_dir / "state.json", problem.strerror)


def mark_run(run_dir: Path, status: str, exit_code: int | None = None) -> None:
    """Write the state of a run that no process is running: queued, or stopped before it started again.

    Raises OSError if the file can't be written."""
    kept = {"step": 0, "starts": 0, **read_run(run_dir).state}
    old_start = ("host", "pid", "job", "message", "doing", "images_per_s")
    state = {key: value for key, value in kept.items() if key not in old_start}
    state |= {"status": status, "exit_code": exit_code, "heartbeat": round(time.time(), 3)}
    write_text(run_dir / "state.json", json.dumps(state) + "\n")
