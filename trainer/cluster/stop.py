"""`wmse stop`: saves a checkpoint and stops a run for good, running or queued."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from trainer.cluster.jobs import Job, find_job
from trainer.cluster.runs import LOST_SECONDS, RunFiles, read_run
from trainer.errors import DONE, InputError
from trainer.files import write_text
from trainer.run.state import mark_run, stop_file

_LOOK_SECONDS = 1.0
_LATE_SECONDS = 30.0  # without a heartbeat, which comes every 15 s: time to ask SLURM


def stop_run(run_dir: Path, wait_seconds: float) -> str:
    """Ask the run to stop and wait until it has; returns what became of it in a sentence.

    A job that still waits in SLURM's queue is cancelled, and a run that was killed is marked as stopped. Raises InputError if
    there is no such run, or if it has not stopped after `wait_seconds`."""
    run = read_run(run_dir)
    state = run.state
    if not state:
        raise InputError(f"{run_dir} is no run folder: {'; '.join(run.problems) or 'it has no state.json'}")
    job_id = run.job_id or ""
    job = find_job(job_id)
    if run.is_over(job):
        return f"{run_dir} has already ended: {state['status']} after step {state.get('step')}"
    if _nobody_runs(run, job):
        return _mark_stopped(run)
    try:
        write_text(stop_file(run_dir), job_id)  # the job looks for it when it starts, and every few seconds
    except OSError as error:
        raise InputError(f"can't write {stop_file(run_dir)}, by which a run is stopped: {error.strerror}") from error
    end = time.monotonic() + wait_seconds
    while time.monotonic() < end:
        now = read_run(run_dir)
        # nobody looks at the file while the job waits to start, or to go on after a signal or the loss of a node
        if now.status in ("queued", "preempted", "failed") or now.silent_seconds > _LATE_SECONDS:
            job = find_job(job_id)
            if job and job.state == "PENDING":
                return _cancel(run_dir, job_id)
        if now.is_over(job if now.status == "failed" else None):
            return f"{run_dir}: {now.status} after step {now.state.get('step')}"
        if _nobody_runs(now, job):
            return _mark_stopped(now)
        time.sleep(_LOOK_SECONDS)
    raise InputError(
        f"{run_dir} was asked to stop, but has not after {wait_seconds:.0f} s: it will after its current step, unless it hangs "
        f"(see {run_dir / 'log.txt'}); `scancel {job_id or 'JOB'}` ends it without a checkpoint"
    )


def _nobody_runs(run: RunFiles, job: Job | None) -> bool:
    """Whether no process runs the run and no job will, though it did not say so: it was killed, or its job cancelled."""
    if job and job.is_active:
        return False
    if run.status in ("queued", "preempted") or run.process_is_gone:
        return True
    # SLURM may have seen the end of a job before the run has written its own
    return run.silent_seconds > (LOST_SECONDS if job is None else _LATE_SECONDS)


def _mark_stopped(run: RunFiles) -> str:
    """Write the last word that the run could not: its evaluator then ends, too."""
    mark_run(run.run_dir, "stopped", DONE)
    return f"{run.run_dir}: no process was running it any more; it is marked as stopped, after step {run.state.get('step')}"


def _cancel(run_dir: Path, job_id: str) -> str:
    done = subprocess.run(["scancel", "--state=PENDING", job_id], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"scancel {job_id} failed: {done.stderr.strip()}")
    mark_run(run_dir, "stopped", DONE)
    return f"{run_dir}: job {job_id} was still queued and is cancelled"
