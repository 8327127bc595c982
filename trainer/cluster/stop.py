"""`wmse stop`: save a checkpoint and stop a running or queued run for good."""

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
_LATE_SECONDS = 30.0  # after this long without a heartbeat (one comes every 15 s), ask SLURM


def stop_run(run_dir: Path, wait_seconds: float) -> str:
    """Ask the run to stop and wait until it has stopped. Returns the outcome as a sentence.

    Cancels a job that still waits in SLURM's queue, and marks a run that was killed as stopped. Raises InputError if the
    folder holds no run, or if the run has not stopped after `wait_seconds`."""
    run = read_run(run_dir)
    state = run.state
    if not state:
        reason = "; ".join(run.problems) or "it has no state.json"
        raise InputError(f"{run_dir} is not a run folder: {reason}")
    job_id = run.job_id or ""
    job = find_job(job_id)
    if run.is_over(job):
        return f"{run_dir} has already ended: {state['status']} after step {state.get('step')}"
    if _nobody_runs(run, job):
        return _mark_stopped(run)
    try:
        write_text(stop_file(run_dir), job_id)  # the run looks for this file at its start and every few seconds
    except OSError as error:
        raise InputError(
            f"cannot write {stop_file(run_dir)}, the file that tells the run to stop: {error.strerror}"
        ) from error
    end = time.monotonic() + wait_seconds
    while time.monotonic() < end:
        now = read_run(run_dir)
        # No process looks for the file while the job waits for its first start, or for a requeue after a signal or a
        # lost node.
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
        f"{run_dir} was asked to stop, but is still running after {wait_seconds:.0f} s: it stops after its current step, "
        f"unless it hangs (see {run_dir / 'log.txt'}); `scancel {job_id or 'JOB'}` ends it without a checkpoint"
    )


def _nobody_runs(run: RunFiles, job: Job | None) -> bool:
    """Return whether no process runs the run and no job will, because it was killed or its job was cancelled."""
    if job and job.is_active:
        return False
    if run.status in ("queued", "preempted") or run.process_is_gone:
        return True
    # SLURM may report the end of a job before the run has written its last state.
    limit = LOST_SECONDS if job is None else _LATE_SECONDS
    return run.silent_seconds > limit


def _mark_stopped(run: RunFiles) -> str:
    """Write the state that the killed run could not write. Its evaluator then ends as well."""
    mark_run(run.run_dir, "stopped", DONE)
    step = run.state.get("step")
    return f"{run.run_dir}: no process was running it any more; it is now marked as stopped after step {step}"


def _cancel(run_dir: Path, job_id: str) -> str:
    done = subprocess.run(
        ["scancel", "--state=PENDING", job_id],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InputError(f"scancel {job_id} failed: {done.stderr.strip()}")
    mark_run(run_dir, "stopped", DONE)
    return f"{run_dir}: job {job_id} was still queued and is now cancelled"
