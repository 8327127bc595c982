"""`wmse stop`: asks a run, wherever it runs or waits, to save a checkpoint and stay stopped."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from trainer.cluster.jobs import ACTIVE, find_jobs
from trainer.cluster.runs import FINAL, number, read_run
from trainer.errors import DONE, InputError
from trainer.run_state import mark_run, stop_file

_LOOK_SECONDS = 1.0
_LATE_SECONDS = 30.0  # without a heartbeat, at one every 15 s: worth a question to SLURM
_STALE_SECONDS = 120.0  # nothing runs the run any more


def stop_run(run_dir: Path, wait_seconds: float) -> str:
    """Ask the run to stop and wait until it has; returns what became of it in a sentence.

    A job that still waits in SLURM's queue is cancelled. Raises InputError if there is no such run, none that runs, or if it
    has not stopped after `wait_seconds`."""
    run = read_run(run_dir)
    state = run.state
    if not state:
        raise InputError(f"{run_dir} is no run folder: it has no state.json")
    if state.get("status") in FINAL:
        return f"{run_dir} has already ended: {state['status']} after step {state.get('step')}"
    job_id = run.job_id or ""
    silent = _silence(state)
    if silent > _STALE_SECONDS and _job_state(job_id) not in ACTIVE:
        raise InputError(f"nothing runs {run_dir}: its last heartbeat was {silent / 60:.0f} minutes ago")
    stop_file(run_dir).touch()  # also for a job that waits: if it starts now, it sees the file
    end = time.monotonic() + wait_seconds
    while time.monotonic() < end:
        now = read_run(run_dir).state
        if now.get("status") in FINAL:
            return f"{run_dir}: {now['status']} after step {now.get('step')}"
        # nobody looks at the file while the job waits to start, or to go on after a signal or the loss of a node
        waits = now.get("status") in ("queued", "preempted") or _silence(now) > _LATE_SECONDS
        if waits and _job_state(job_id) == "PENDING":
            return _cancel(run_dir, job_id)
        time.sleep(_LOOK_SECONDS)
    raise InputError(
        f"{run_dir} was asked to stop, but has not after {wait_seconds:.0f} s: it will after its current step, unless it hangs "
        f"(see {run_dir / 'log.txt'}); `scancel {job_id or 'JOB'}` ends it without a checkpoint"
    )


def _silence(state: dict[str, Any]) -> float:
    """Seconds since the last heartbeat."""
    return time.time() - (number(state, "heartbeat") or 0)


def _job_state(job_id: str) -> str:
    """SLURM's word for the state of a job, empty if it knows none."""
    job = find_jobs([job_id]).get(job_id)
    return job.state if job else ""


def _cancel(run_dir: Path, job_id: str) -> str:
    done = subprocess.run(["scancel", job_id], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"scancel {job_id} failed: {done.stderr.strip()}")
    mark_run(run_dir, "stopped", DONE)
    return f"{run_dir}: job {job_id} was still queued and is cancelled"
