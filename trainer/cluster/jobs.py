"""What SLURM says of jobs: squeue for those it still holds in memory, sacct for older ones."""

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
_NOTHING = ("N/A", "None", "Unknown")  # SLURM's words for an empty field

# States in which a job waits, runs, or is about to be put back into the queue.
ACTIVE = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED"),
        *("RESIZING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
    }
)


NO_ANSWER = "UNKNOWN"  # SLURM is installed and does not answer: the job may well be there


class Job(NamedTuple):
    """One job, or one task of an array, as SLURM sees it."""

    state: str
    """SLURM's word: PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, CANCELLED, NODE_FAIL, PREEMPTED, ..."""
    reason: str
    """Why the job waits, as SLURM says it; empty if it does not wait."""
    start: str
    """Start as local ISO time, of a waiting job the expected one; empty if SLURM does not say."""

    @property
    def is_active(self) -> bool:
        """Whether it waits, runs, or may do so, since SLURM does not answer."""
        return self.state in ACTIVE or self.state == NO_ANSWER


def find_job(job_id: str | None) -> Job | None:
    """One job; None if there is no id, no SLURM, or SLURM has forgotten it."""
    return find_jobs([job_id]).get(job_id) if job_id else None


def find_jobs(ids: Iterable[str]) -> dict[str, Job]:
    """Look up jobs by id ("123", or "123_4" for a task of an array).

    Jobs that SLURM has forgotten are missing from the result; all are if it is not installed. If it does not answer, their
    state is UNKNOWN.
    """
    wanted = {job_id for job_id in ids if _JOB_ID.fullmatch(job_id)}
    # without -r the waiting tasks of an array come as one line, "123_[4-7]"
    jobs = _ask(["squeue", "--noheader", "-r", "--states=all", "--format=%i|%T|%S|%r"], wanted)
    older = wanted - jobs.keys()
    return jobs | _ask(["sacct", "--noheader", "-P", "-X", "--format=JobID,State,Start"], older)


def _ask(command: Sequence[str], ids: set[str]) -> dict[str, Job]:
    if not ids or not shutil.which(command[0]):
        return {}
    env = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(
            [*command, f"--jobs={','.join(sorted(ids))}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _say_once(f"SLURM's {command[0]} does not answer: {error}")
        return _no_answer(command, ids)
    # squeue fails for a single job that it has forgotten, and sacct where no accounting is kept: both are as good as no answer
    if done.returncode and "Invalid job id" not in done.stderr and command[0] == "squeue":
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        _say_once(f"SLURM's squeue fails: {reason}")
        return _no_answer(command, ids)
    return {job_id: job for job_id, job in map(_job, done.stdout.splitlines()) if job_id in ids}


def _no_answer(command: Sequence[str], ids: set[str]) -> dict[str, Job]:
    """sacct only knows more of jobs that squeue has forgotten: without it they are forgotten."""
    return {job_id: Job(NO_ANSWER, "", "") for job_id in ids} if command[0] == "squeue" else {}


def _job(line: str) -> tuple[str, Job]:
    """One line: id|state|start|reason, sacct's without the reason."""
    job_id, state, start, reason = (*line.split("|", 3), "", "", "", "")[:4]
    state = state.partition(" ")[0]  # "CANCELLED by 1000"
    waits = state == "PENDING" and reason not in _NOTHING
    return job_id.strip(), Job(state, reason if waits else "", "" if start in _NOTHING else start)


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)
