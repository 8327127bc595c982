"""Rank of this process, as torchrun, srun or `wmse launch` assigned it. Needs neither torch nor SLURM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainer.cluster.nodes import expand_tasks
from trainer.errors import InputError


@dataclass(frozen=True)
class Ranks:
    """Place of this process among all ranks of the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Number of this rank on its node, from 0. The rank uses the GPU of this number."""
    local_world_size: int = 1
    """Number of ranks on this node."""
    job_id: str = ""
    """SLURM's job id, as 123 or 123_4 for a task of an array; empty outside SLURM."""
    restarts: int = 0
    """Number of times that SLURM has requeued the job, or torchrun has restarted its workers."""

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes files and logs."""
        return self.rank == 0


@dataclass(frozen=True)
class ImageRange:
    """Consecutive images of a step: those of a rank, of a micro-batch, or of a loss group."""

    first: int
    count: int

    def group(self, size: int) -> ImageRange:
        """Return the images of the group of `size` neighbouring ranges that this range belongs to."""
        # Groups follow each other from image 0 on, each with the images of `size` ranks.
        count = self.count * size
        number = self.first // count
        return ImageRange(number * count, count)


def find_ranks(env: Mapping[str, str] | None = None) -> Ranks:
    """Return the place of this process from the environment variables of torchrun, srun or `wmse launch`.

    Without such variables this process is the only rank. Raises InputError naming the variable if one is missing, is not a
    number or contradicts another. Also raises InputError for SLURM jobs that cannot train: heterogeneous jobs, and
    several tasks on one core.
    """
    env = os.environ if env is None else env
    _refuse_heterogeneous(env)
    # srun may have started torchrun, whose variables then count.
    if "RANK" in env or "WORLD_SIZE" in env:
        ranks = _from_torchrun(env)
    elif "SLURM_STEP_ID" in env and _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        ranks = _from_srun(env)
    else:
        ranks = Ranks()
    restarts = _number(env, "SLURM_RESTART_COUNT", 0) + _number(env, "TORCHELASTIC_RESTART_COUNT", 0)
    return replace(ranks, job_id=slurm_job_id(env), restarts=restarts)


def slurm_job_id(env: Mapping[str, str]) -> str:
    """Return the id of this job as squeue shows it; empty outside SLURM."""
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '')}"
    return env.get("SLURM_JOB_ID", "")


def job_key() -> str:
    """Return a key that only the ranks of this start of this job share; empty if the ranks were started by hand."""
    if "WMSE_LAUNCH" in os.environ:  # set by `wmse launch --cluster local`
        return os.environ["WMSE_LAUNCH"]
    if "SLURM_STEP_ID" not in os.environ:
        return ""
    # A requeued job keeps its id, so the number of restarts is part of the key.
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(os.environ.get(name, "0") for name in names)


def _from_torchrun(env: Mapping[str, str]) -> Ranks:
    rank = _number(env, "RANK")
    world_size = _number(env, "WORLD_SIZE")
    if world_size < 1 or rank >= world_size:
        raise InputError(
            f"RANK is {rank} and WORLD_SIZE {world_size}, but ranks count from 0 to WORLD_SIZE - 1. If the variables are left "
            "over from another job, run `unset RANK WORLD_SIZE`"
        )
    return Ranks(
        rank,
        world_size,
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", 1),
    )


def _refuse_heterogeneous(env: Mapping[str, str]) -> None:
    for name in ("SLURM_HET_SIZE", "SLURM_PACK_SIZE"):
        if _number(env, name, 1) > 1:
            raise InputError(
                f"this is a heterogeneous SLURM job ({name} is {env[name]}), but all ranks need the same kind of node: submit "
                "one job without components (no ':' or '#SBATCH hetjob')"
            )


def _from_srun(env: Mapping[str, str]) -> Ranks:
    if env.get("SLURM_OVERCOMMIT", "0") not in ("", "0"):
        raise InputError(
            "srun was called with --overcommit, so ranks would share cores: request at least one core per task"
        )
    rank = _number(env, "SLURM_PROCID")
    world_size = _number(env, "SLURM_STEP_NUM_TASKS")
    # Nodes may have different numbers of tasks, so the list gives the number on this node.
    tasks = expand_tasks(env.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))
    node = _number(env, "SLURM_NODEID", 0)
    if rank >= world_size or sum(tasks) != world_size or node >= len(tasks):
        raise InputError(
            f"srun's variables contradict each other: SLURM_PROCID {rank}, SLURM_STEP_NUM_TASKS {world_size}, "
            f"SLURM_STEP_TASKS_PER_NODE {env.get('SLURM_STEP_TASKS_PER_NODE')}, SLURM_NODEID {node}"
        )
    return Ranks(
        rank,
        world_size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=tasks[node],
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        found = "not set" if text is None else repr(text)
        raise InputError(
            f"the environment variable {name} is {found}: it must be a whole number, as torchrun or srun sets it"
        )
    return int(text)


def launch_warnings(ranks: Ranks, env: Mapping[str, str] | None = None) -> list[str]:
    """Return warnings for the log if this process was probably started in a wrong way."""
    env = os.environ if env is None else env
    # A batch script runs in a job of several tasks, but only srun starts a process for each task.
    tasks = env.get("SLURM_NTASKS", "1")
    without_srun = "SLURM_STEP_ID" not in env
    if ranks.world_size == 1 and without_srun and tasks.isdecimal() and int(tasks) > 1:
        return [f"this SLURM job has {tasks} tasks, but only one rank runs: start the command with srun"]
    return []
