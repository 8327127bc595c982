"""state.json: status and progress of a run, for `wmse status`, `wmse stop`, the evaluator and the next start.

Rank 0 rewrites the file at every change of status, and a thread every few seconds: a "heartbeat" that stops shows that
the run was killed. docs/reliability.md lists the keys.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.cluster.runs import read_run, whole
from trainer.distributed.ranks import Ranks
from trainer.errors import DONE, FAILED, PREEMPTED, DivergedError, InputError, TrainingFailedError, exit_code_of
from trainer.files import write_text
from trainer.run.checkpoint_files import newest_step
from trainer.run.cost import RunCost
from trainer.run.folder import lock_run_folder
from trainer.run.signals import STOP, StopRequest

_log = logging.getLogger(__name__)
_MESSAGE_LENGTH = 500
_FINISHED = ("done", "stopped")
_BEAT_SECONDS = 15.0
_LOOK_SECONDS = 2.0  # interval of looking for the file of `wmse stop`
_SILENT_SECONDS = 900.0  # longer than timeout_minutes, which ends the other ranks
_LOCK_SECONDS = 3.0  # a write that hangs on its file system may not delay the end of the process any longer


def stop_file(run_dir: Path) -> Path:
    """Return the path of the file by which `wmse stop` asks a run to end."""
    return run_dir / "stop"


def _stopped_job(run_dir: Path) -> str:
    """Return the id of the SLURM job that `wmse stop` was called for; empty if it was called for none."""
    try:
        return stop_file(run_dir).read_text().strip()
    except OSError:
        return ""


class RunState:
    """Writer of state.json, thread-safe. Every rank has one; only that of rank 0 writes."""

    def __init__(self, run_dir: Path, ranks: Ranks, cost: RunCost | None = None) -> None:
        """cost: account of the run; None: a new one, on a CPU."""
        self.cost = cost or RunCost(ranks)
        self._run_dir = run_dir
        self._writes = ranks.is_first
        self._lock = threading.Lock()
        self._fields_lock = threading.Lock()  # never held during a write
        self._ranks = ranks
        self._fields: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # state.json as this start found it

    @property
    def starts(self) -> int:
        """Number of starts of this run, this one included."""
        return int(self._fields["starts"])

    def start(self, max_idle_restarts: int) -> None:
        """Write the status "starting" and remove the file of an earlier `wmse stop`. The caller holds the folder's lock.

        Raises TrainingFailedError if SLURM requeued this job `max_idle_restarts` times in a row without a new
        checkpoint."""
        before = read_run(self._run_dir).state
        self._before = before
        step = newest_step(self._run_dir)
        self.cost.continue_from(before.get("cost"))
        # A requeued start is idle if the start before it began at the same step: that one has saved nothing.
        starts = whole(before, "starts") or 0
        idle_starts = 0
        if self._ranks.restarts > 0 and before.get("first_step") == step:
            idle_starts = (whole(before, "idle_starts") or 0) + 1
        job_id = self._ranks.job_id
        self.write(
            status="starting",
            exit_code=None,
            step=step,
            first_step=step,
            starts=starts + 1,
            idle_starts=idle_starts,
            world_size=self._ranks.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            job={"id": job_id, "restarts": self._ranks.restarts} if job_id else None,
        )
        # A stop of this very job still holds after a requeue. Any other one was for an earlier job or an earlier start
        # by hand.
        if not job_id or _stopped_job(self._run_dir) != job_id:
            self._remove_stop_file()
        if idle_starts >= max_idle_restarts:
            raise TrainingFailedError(
                f"{idle_starts} starts in a row produced no checkpoint beyond step {step}, so this job is not requeued: "
                f"{self._run_dir / 'log.txt'} says how each start ended. Give the job more time, or the run more frequent "
                "checkpoints (checkpoint.every_minutes), and submit it again"
            )

    def _remove_stop_file(self) -> None:
        path = stop_file(self._run_dir)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot remove {path}, which asks the run to stop: {error.strerror}. Remove it"
            ) from error

    def note(self, **fields: Any) -> None:
        """Change fields without writing the file. The next heartbeat writes them."""
        with self._fields_lock:  # else two threads that change fields at once could undo each other's changes
            self._fields = self._fields | fields

    def write(self, **fields: Any) -> None:
        """Change fields and write the file. If the file cannot be written, log it and continue."""
        self.note(**fields)
        self._put(
            lambda: {
                **self._fields,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "heartbeat": round(time.time(), 3),
                "checkpoint_step": newest_step(self._run_dir) or None,
                "cost": self.cost.content(),
            }
        )

    def _put(self, content: Callable[[], dict[str, Any]]) -> None:
        """Replace the file on rank 0. If it cannot be written, log it and continue. content: called under the lock."""
        if not self._writes:
            return
        path = self._run_dir / "state.json"
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            _log.error("cannot write %s: an earlier write hangs", path)
            return
        try:
            write_text(path, json.dumps(content()) + "\n")
        except OSError as error:
            _log.error("cannot write %s (%s): %s", path, self._fields["status"], error.strerror)
        finally:
            self._lock.release()

    def ended(self, status: str, exit_code: int, **fields: Any) -> None:
        """Write how this start ended. Only the first call has an effect, because it has the cause."""
        if self._fields.get("exit_code") is None:
            self.write(status=status, exit_code=exit_code, **fields)

    def preempted(self) -> None:
        """Write that a signal ended the process before the loop could save."""
        self.ended("preempted", PREEMPTED, step=newest_step(self._run_dir))

    def hung(self, message: str) -> None:
        """Write that the watchdog ends the process. message: what the run waits for."""
        self.lost_rank(message, FAILED)

    def lost_rank(self, message: str, exit_code: int) -> None:
        """Write that the failure of another rank ends the run."""
        self.ended("failed", exit_code, step=newest_step(self._run_dir), message=message[:_MESSAGE_LENGTH])

    def failed(self, error: BaseException) -> None:
        """Write that an error ends the run, unless `start` was never called. The message of the first call stays."""
        if not self._fields:
            return
        # A finished run stays finished if somebody gives it wrong settings afterwards.
        if isinstance(error, InputError) and self._before.get("status") in _FINISHED:
            self._fields = self._before
            self._put(lambda: self._before)
            return
        # A message of many lines would make the table of `wmse status` unreadable.
        message = " ".join(str(error).split())[:_MESSAGE_LENGTH] or type(error).__name__
        # A table of several runs tells a run that diverged from one that failed for another reason.
        diverged = {"step": error.step, "reason": error.reason} if isinstance(error, DivergedError) else None
        self.ended("failed", exit_code_of(error), message=message, diverged=diverged)
        # The saver may have finished a checkpoint since the first call.
        if self._fields["status"] == "failed":
            self.write(step=newest_step(self._run_dir))

    @contextmanager
    def heartbeat(self, stop: StopRequest) -> Iterator[None]:
        """Write the file every few seconds while the block runs, and turn a `wmse stop` into a stop request."""
        if not self._writes:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(
            target=self._beat,
            args=(stop, ended),
            name="heartbeat",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_LOCK_SECONDS)  # not for ever: the thread may hang on its file system

    def _beat(self, stop: StopRequest, ended: threading.Event) -> None:
        last = time.monotonic()
        while not ended.wait(_LOOK_SECONDS):
            # os.path.exists: Path.exists would raise for a stale file handle.
            if not stop.asked and os.path.exists(stop_file(self._run_dir)):
                _log.warning("`wmse stop` was called: saving a checkpoint and stopping after the current step")
                stop.ask(STOP)
            if time.monotonic() - last >= _BEAT_SECONDS:
                self.cost.own()
                self.write()
                last = time.monotonic()


def wait_for_end(run_dir: Path, stop: StopRequest, timeout_seconds: float) -> int:
    """Let an idle rank wait until the other ranks have ended. Returns the exit code of the run.

    The rank waits because srun and torchrun may take an early end for a failure. It ends by itself if rank 0 writes no
    heartbeat for a long time."""
    stop.allow(timeout_seconds)
    _log.warning("the global batch size cannot be divided evenly among all ranks: this rank stays idle")
    before = read_run(run_dir).state.get("heartbeat")
    last_beat = before
    last_change = time.monotonic()
    while time.monotonic() - last_change < _SILENT_SECONDS:
        state = read_run(run_dir).state
        beat = state.get("heartbeat")
        # An exit code written before this wait is that of an earlier start.
        if state.get("exit_code") is not None and beat != before:
            return int(state["exit_code"])
        if beat != last_beat:
            last_beat = beat
            last_change = time.monotonic()
        time.sleep(_LOOK_SECONDS)
    _log.error("rank 0 has written no heartbeat for %.0f s: this idle rank ends", _SILENT_SECONDS)
    return DONE


def note_lost_rank_0(run_dir: Path, error: BaseException) -> None:
    """Write that the run failed, if rank 0 was killed before it could write this.

    Ranks that have lost another rank call this. A rank 0 that is alive holds the folder's lock and writes the end itself."""
    path = run_dir / "state.json"
    try:
        with lock_run_folder(run_dir):
            state = read_run(run_dir).state
            if state.get("status") not in ("starting", "running") or state.get("exit_code") is not None:
                return
            first_line = str(error).partition("\n")[0]
            message = f"rank 0 was lost: {first_line}"[:_MESSAGE_LENGTH]
            state |= {
                "status": "failed",
                "exit_code": FAILED,
                "message": message,
                "step": newest_step(run_dir),
            }
            write_text(path, json.dumps(state) + "\n")
            _log.error("rank 0 was lost before it could write how the run ended: state.json now says that it failed")
    except InputError:  # rank 0 holds the lock
        return
    except OSError as problem:
        _log.error("cannot write %s: %s", path, problem.strerror)


def mark_run(run_dir: Path, status: str, exit_code: int | None = None) -> None:
    """Write the state of a run that no process is running: queued, or stopped before its next start.

    Raises OSError if the file cannot be written."""
    kept = {
        "step": 0,
        "starts": 0,
        **read_run(run_dir).state,
    }
    # These keys describe the start before this one.
    old_start = ("host", "pid", "job", "message", "diverged", "doing", "images_per_s")
    state = {key: value for key, value in kept.items() if key not in old_start}
    state |= {
        "status": status,
        "exit_code": exit_code,
        "heartbeat": round(time.time(), 3),
    }
    write_text(run_dir / "state.json", json.dumps(state) + "\n")
