"""Submits `wmse` commands to SLURM through submitit."""

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

# seconds until srun ends the other ranks after one has ended: as long as timeout_minutes, so that rank 0 can finish its save
_WAIT_SECONDS = 600
# The batch script's last lines; the sbatch scripts in slurm/ end in the same way.
_REQUEUE = """\
code=$?
# 75: saved, and wants to go on. The others: USR1, USR2 or TERM came before Python listened to signals.
case "$code" in 75|138|140|143)
    id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    for attempt in 1 2 3; do scontrol requeue "${id:-$SLURM_JOB_ID}" && sleep 60; sleep 10; done ;;
esac
exit "$code"
"""


# options that sbatch, submitit and a Site call alike
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
    """What submitit writes into the batch script.

    nodes: smallest and largest number. code: folder of the code that the job runs; its commit goes into logs and results.
    """
    least, most = nodes
    more = {"requeue": True, "exclusive": site.exclusive or None, "mem": site.memory or None, **site.sbatch}
    if least != most:
        more["nodes"] = f"{least}-{most}"
        # some versions fill in the number of tasks of the smallest number of nodes
        tasks = [f"export SLURM_NTASKS=$((SLURM_JOB_NUM_NODES * {tasks_per_node}))"]
    else:
        tasks = []
    # srun does not inherit --cpus-per-task from sbatch; a rank that fails must not kill one that is still saving
    srun = [f"--wait={_WAIT_SECONDS}", "--kill-on-bad-exit=0"]
    srun += [f"--cpus-per-task={site.cpus_per_task}"] if site.cpus_per_task else []
    environment = {"WMSE_COMMIT": git_commit() or "unknown", **site.environment}
    exports = [f"export {key}={shlex.quote(value)}" for key, value in environment.items()]
    parameters = {
        "job_name": re.sub(r"[^\w.+-]", "_", name),
        "time": parse_minutes(site.time),
        "nodes": most,
        # with --ntasks-per-node=1 a range of nodes gets its smallest number (SLURM 22.05); one is the default
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
    return given | {"wckey": None}  # submitit would set one, which sites without it refuse


def _use_code(code: Path) -> list[str]:
    """Lines that have Python take the packages in `code` before any that are installed: python -m looks into the current folder
    first, and a container that begins in another one still has the path."""
    folder = shlex.quote(str(code))
    return [f"export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}", f"cd {folder}"]


def batch_script(folder: Path, parameters: dict[str, Any], count: int) -> str:
    """The text that `submit` hands to sbatch; works where SLURM is not installed. count: tasks of the array, 1 for no array."""
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return str(
        _make_sbatch_string(command=command, folder=folder, map_count=count if count > 1 else None, **parameters)
    )


def submit(folder: Path, parameters: dict[str, Any], commands: Sequence[Sequence[str]]) -> list[str]:
    """Submit each command as a job, several as one array -> their ids ("123", or "123_0", "123_1", ...).

    folder: where submitit keeps its files and the jobs' output. Raises InputError if SLURM is not there or refuses."""
    try:
        executor = submitit.SlurmExecutor(folder, max_num_timeout=1 << 30)  # RunState decides when requeueing is no use
    except RuntimeError as error:
        raise InputError(
            "srun was not found: run this on a login node of the cluster, or take --cluster local"
        ) from error
    executor.update_parameters(**parameters)
    try:
        jobs = executor.submit_array([WmseTask(command) for command in commands])
    except (FailedJobError, FailedSubmissionError, subprocess.CalledProcessError) as error:
        said = str(error).strip().rpartition("\n")[2]
        raise InputError(f"sbatch refused the job: {said}") from error
    return [job.job_id for job in jobs]
