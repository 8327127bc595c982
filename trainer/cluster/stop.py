"""`wmse stop`: saves a checkpoint and stops a run for good, running or queued."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from trainer.cluster.jobs import find_job
from trainer.cluster.runs import number, read_run
from trainer.errors import DONE, InputError
from trainer.files import write_text
from trainer.run_state import mark_run, stop_file

_LOOK_SECONDS = 1.0
_LATE_SECONDS = 30.0  # without a heartbeat, which comes every 15 s: time to ask SLURM
_STALE_SECONDS = 120.0  # nothing is running it any more


def stop_run(run_dir: Path, wait_seconds: float) -> str:
    """Ask the run to stop and wait until it has; returns what became of it in a sentence.

    A job that still waits in SLURM's queue is cancelled. Raises InputError if there is no such run, none that runs, or if it
    has not stopped after `wait_seconds`."""
    run = read_run(run_dir)
    state = run.state
    if not state:
        raise InputError(f"{run_dir} is no run folder: it has no state.json")
    job_id = run.job_id or ""
    job = find_job(job_id)
    if run.is_over(job):
        return f"{run_dir} has already ended: {state['status']} after step {state.get('step')}"
    silent = _silence(state)
    if silent > _STALE_SECONDS and not (job and job.is_active):
        raise InputError(f"no process is running {run_dir}: its last heartbeat was {silent / 60:.0f} minutes ago")
    write_text(stop_file(run_dir), job_id)  # the job looks for it when it starts, and every few seconds
    end = time.monotonic() + wait_seconds
    while time.monotonic() < end:
        now = read_run(run_dir)
        # nobody looks at the file while the job waits to start, or to go on after a signal or the loss of a node
        if now.status in ("queued", "preempted", "failed") or _silence(now.state) > _LATE_SECONDS:
            job = find_job(job_id)
            if job and job.state == "PENDING":
                return _cancel(run_dir, job_id)
        if now.is_over(job if now.status == "failed" else None):
            return f"{run_dir}: {now.status} after step {now.state.get('step')}"
        time.sleep(_LOOK_SECONDS)
    raise InputError(
        f"{run_dir} was asked to stop, but has not after {wait_seconds:.0f} s: it will after its current step, unless it hangs "
        f"(see {run_dir / 'log.txt'}); `scancel {job_id or 'JOB'}` ends it without a checkpoint"
    )


def _silence(state: dict[str, Any]) -> float:
    """Seconds since the last heartbeat."""
    return time.time() - (number(state, "heartbeat") or 0)


def _cancel(run_dir: Path, job_id: str) -> str:
    done = subprocess.run(["scancel", "--state=PENDING", job_id], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"scancel {job_id} failed: {done.stderr.strip()}")
    mark_run(run_dir, "stopped", DONE)
    return f"{run_dir}: job {job_id} was still queued and is cancelled"
