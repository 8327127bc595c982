"""State of SLURM jobs: from squeue for jobs that SLURM still holds in memory, from sacct for older ones."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_log = logging.getLogger(__name__)
_SECONDS = 10.0  # a busy controller may not answer at all
_JOB_ID = re.compile(r"\d+(_\d+)?")  # a single malformed id makes squeue reject the whole list
_NOTHING = ("N/A", "None", "Unknown")  # SLURM's values of an empty field

# States of a job that waits, runs, or returns to the queue soon.
ACTIVE = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED"),
        *("RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
    }
)


NO_ANSWER = "UNKNOWN"  # SLURM is installed but does not answer, so the job may exist


class Job(NamedTuple):
    """State of one job, or of one task of an array, in SLURM."""

    state: str
    """SLURM's name of the state: PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, CANCELLED, NODE_FAIL, PREEMPTED, ..."""
    reason: str
    """SLURM's reason why the job waits; empty if it does not wait."""
    start: str
    """Start (the expected one if the job waits) as local ISO time; empty if unknown."""

    @property
    def is_active(self) -> bool:
        """True if the job waits or runs, or may do so because SLURM does not answer."""
        return self.state in ACTIVE or self.state == NO_ANSWER


def find_job(job_id: str | None) -> Job | None:
    """Look up one job. None without an id, without SLURM, or if SLURM no longer knows the job."""
    if not job_id:
        return None
    return find_jobs([job_id]).get(job_id)


def find_jobs(ids: Iterable[str]) -> dict[str, Job]:
    """Look up jobs by id ("123", or "123_4" for a task of an array).

    The result lacks jobs that SLURM no longer knows, and all jobs if SLURM is not installed. If SLURM does not answer,
    the state of the jobs is UNKNOWN.
    """
    wanted = {job_id for job_id in ids if _JOB_ID.fullmatch(job_id)}
    # Without -r, squeue lists the waiting tasks of an array in one line, "123_[4-7]".
    jobs = _ask(["squeue", "--noheader", "-r", "--states=all", "--format=%i|%T|%S|%r"], wanted)
    older = wanted - jobs.keys()
    return jobs | _ask(["sacct", "--noheader", "-P", "-X", "--format=JobID,State,Start"], older)


def _ask(command: Sequence[str], ids: set[str]) -> dict[str, Job]:
    """Run squeue or sacct for some jobs and read its lines."""
    program = command[0]
    if not ids or not shutil.which(program):
        return {}
    env = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    listed = ",".join(sorted(ids))
    try:
        done = subprocess.run(
            [*command, f"--jobs={listed}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _warn_once(f"SLURM's {program} does not answer: {error}")
        return _without_answer(program, ids)
    # Two failures are harmless: squeue fails for a single job that it no longer knows, and sacct on sites without
    # accounting.
    if done.returncode and "Invalid job id" not in done.stderr and program == "squeue":
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        _warn_once(f"SLURM's squeue fails: {reason}")
        return _without_answer(program, ids)
    jobs = [_parse_job(line) for line in done.stdout.splitlines()]
    return {job_id: job for job_id, job in jobs if job_id in ids}


def _without_answer(program: str, ids: set[str]) -> dict[str, Job]:
    """Return the jobs as UNKNOWN if squeue failed. sacct is only asked for jobs that squeue no longer knows."""
    if program != "squeue":
        return {}
    return {job_id: Job(NO_ANSWER, "", "") for job_id in ids}


def _parse_job(line: str) -> tuple[str, Job]:
    """Read a line of squeue, id|state|start|reason, or of sacct, which has no reason."""
    fields = [*line.split("|", 3), "", "", ""]
    job_id, state, start, reason = fields[:4]
    state = state.partition(" ")[0]  # "CANCELLED by 1000"
    if state != "PENDING" or reason in _NOTHING:
        reason = ""
    if start in _NOTHING:
        start = ""
    return job_id.strip(), Job(state, reason, start)


_said: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)
