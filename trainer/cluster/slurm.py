"""Submission of `wmse` commands to SLURM through submitit."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import _make_sbatch_string

from trainer.cluster.nodes import parse_minutes
from trainer.cluster.site import Site
from trainer.cluster.task import WmseTask
from trainer.errors import InputError
from trainer.run.commit import git_commit

# After one rank has ended, srun kills the others this much later: the default of timeout_minutes, so rank 0 can finish a
# save.
_WAIT_SECONDS = 600
# The batch script's last lines; the sbatch scripts in slurm/ end in the same way.
_REQUEUE = """\
code=$?
# 75: the run has saved and must continue. The others: USR1, USR2 or TERM arrived before Python handled signals.
case "$code" in 75|138|140|143)
    id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    for attempt in 1 2 3; do scontrol requeue "${id:-$SLURM_JOB_ID}" && sleep 60; sleep 10; done ;;
esac
exit "$code"
"""


# Options that have the same name in sbatch, submitit and Site.
_SAME_NAMES = (
    "partition",
    "account",
    "qos",
    "constraint",
    "nodelist",
    "exclude",
    "dependency",
    "mail_user",
    "mail_type",
)


def job_parameters(site: Site, *, name: str, nodes: tuple[int, int], tasks_per_node: int, code: Path) -> dict[str, Any]:
    """Return the parameters of the batch script, as submitit takes them.

    nodes: smallest and largest number. code: folder of the code that the job runs.
    """
    least, most = nodes
    more = {
        "requeue": True,
        "exclusive": site.exclusive or None,
        "mem": site.memory or None,
        **site.sbatch,
    }
    tasks = []
    if least != most:
        more["nodes"] = f"{least}-{most}"
        # Some versions of SLURM set SLURM_NTASKS for the smallest number of nodes.
        tasks.append(f"export SLURM_NTASKS=$((SLURM_JOB_NUM_NODES * {tasks_per_node}))")
    # A rank that fails may not kill one that is still saving. srun does not inherit --cpus-per-task from sbatch.
    srun = [f"--wait={_WAIT_SECONDS}", "--kill-on-bad-exit=0"]
    if site.cpus_per_task:
        srun.append(f"--cpus-per-task={site.cpus_per_task}")
    # The copied code has no git history, so the job gets the commit for its logs and results.
    environment = {"WMSE_COMMIT": git_commit() or "unknown", **site.environment}
    exports = [f"export {key}={shlex.quote(value)}" for key, value in environment.items()]
    parameters = {
        "job_name": re.sub(r"[^\w.+-]", "_", name),
        "time": parse_minutes(site.time),
        "nodes": most,
        # With --ntasks-per-node=1, SLURM 22.05 gives a range of nodes its smallest number. The default is one task anyway.
        "ntasks_per_node": None if tasks_per_node == 1 and least != most else tasks_per_node,
        "signal_delay_s": site.signal_seconds,
        "gpus_per_node": site.gpus_per_node or None,
        "cpus_per_task": site.cpus_per_task or None,
        **{key: getattr(site, key) for key in _SAME_NAMES},
        "setup": [*site.setup, *exports, *tasks, *_use_code(code)],
        "teardown": _REQUEUE.splitlines(),
        "srun_args": [*srun, *site.srun],
        "stderr_to_stdout": True,
        "additional_parameters": {key: value for key, value in more.items() if value is not None},
    }
    given = {key: value for key, value in parameters.items() if value not in (None, "")}
    return given | {"wckey": None}  # submitit would set a wckey, which clusters without wckeys refuse


def _use_code(code: Path) -> list[str]:
    """Return shell lines that make Python import the packages in `code` instead of installed ones.

    `python -m` looks into the current folder first. A container that starts in another folder still has PYTHONPATH."""
    folder = shlex.quote(str(code))
    return [f"export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}", f"cd {folder}"]


def batch_script(folder: Path, parameters: dict[str, Any], count: int) -> str:
    """Return the batch script that `submit` gives to sbatch, also without SLURM.

    count: tasks of the array, 1 without array."""
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    tasks = count if count > 1 else None
    script = _make_sbatch_string(
        command=command,
        folder=folder,
        map_count=tasks,
        **parameters,
    )
    return str(script)


def submit(folder: Path, parameters: dict[str, Any], commands: Sequence[Sequence[str]]) -> list[str]:
    """Submit one command as a job, several as an array. Returns the ids: "123", or "123_0", "123_1", ...

    folder: folder for submitit's files and the jobs' output. Raises InputError if SLURM is not installed or refuses the
    job."""
    try:
        # submitit sets no limit on requeueing: RunState ends a run that makes no progress.
        executor = submitit.SlurmExecutor(folder, max_num_timeout=1 << 30)
    except RuntimeError as error:
        raise InputError(
            "srun was not found: run this command on a login node of the cluster, or use --cluster local"
        ) from error
    executor.update_parameters(**parameters)
    try:
        jobs = executor.submit_array([WmseTask(command) for command in commands])
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        last_line = str(error).strip().rpartition("\n")[2]
        raise InputError(f"sbatch refused the job: {last_line}") from error
    return [job.job_id for job in jobs]
