"""Number of CPU cores of this rank, and advice if they are too few to feed its device."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.distributed.ranks import Ranks, find_ranks

_CORES_FOR_A_GPU = 6  # enough to decode and augment for one fast GPU, see benchmarks/results/README.md
_CGROUPS = Path("/sys/fs/cgroup")


def own_cores(env: Mapping[str, str] | None = None) -> int:
    """Return the number of cores that this rank may use.

    The affinity of the process and the CPU quota of its cgroup limit them. Ranks of one node share the cores, unless
    srun has bound each rank to different ones."""
    env = os.environ if env is None else env
    ranks = find_ranks(env)
    cores = min(len(os.sched_getaffinity(0)), quota_cores())
    if ranks.local_world_size == 1:
        return cores
    started_by_srun = "SLURM_STEP_ID" in env and "RANK" not in env
    if started_by_srun:
        per_task = env.get("SLURM_CPUS_PER_TASK", "")
        if per_task.isdecimal():
            return max(1, min(cores, int(per_task)))
        # Fewer cores than the node gives to the job: srun has bound each rank to different ones.
        on_node = env.get("SLURM_CPUS_ON_NODE", "")
        if on_node.isdecimal() and cores < int(on_node):
            return cores
    return max(1, cores // ranks.local_world_size)


def quota_cores(cgroups: Path = _CGROUPS, process: Path = Path("/proc/self/cgroup")) -> int:
    """Return the CPU quota of this process's cgroup in cores, rounded up; a very large number without a quota.

    Containers usually have a quota. cgroups: where the cgroup file system is mounted. process: the list of this process's
    cgroups."""
    lines = process.read_text().splitlines() if process.exists() else []
    limits = [limit for line in lines for limit in _limits(cgroups, line)]
    # "max" and -1 mean no limit. The strictest limit of all levels applies.
    shares = []
    for quota, period in limits:
        if quota.isdecimal() and period.isdecimal():
            shares.append(int(quota) / int(period))
    return max(1, math.ceil(min(shares, default=1 << 20)))


def _limits(cgroups: Path, line: str) -> Iterator[tuple[str, str]]:
    """Yield (quota, period) of each level of the cgroup that a line of /proc/self/cgroup names, for cgroups v2 and v1."""
    _, controllers, path = line.split(":", 2)
    path = path.lstrip("/")
    # Only v2 lists no controllers. Its file holds both numbers, as in "200000 100000".
    if controllers == "":
        folder = cgroups / path
        for level in (folder, *folder.parents):
            quota, _, period = _read(level / "cpu.max").partition(" ")
            yield quota, period
    elif "cpu" in controllers.split(","):
        # v1: inside a container the path of the host may not exist, so look at the root as well.
        for level in (cgroups / controllers / path, cgroups / "cpu" / path, cgroups / "cpu"):
            yield _read(level / "cpu.cfs_quota_us"), _read(level / "cpu.cfs_period_us")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def core_warnings(ranks: Ranks, threads: int, *, on_gpu: bool, env: Mapping[str, str] | None = None) -> list[str]:
    """Return warnings for the log if the loader has too few cores, with advice. threads: number of the loader's threads."""
    env = os.environ if env is None else env
    under_slurm = "SLURM_STEP_ID" in env
    bound = len(os.sched_getaffinity(0))
    per_task = env.get("SLURM_CPUS_PER_TASK", "")
    if under_slurm and per_task.isdecimal() and bound < int(per_task):
        return [
            f"this job asked for {per_task} cores per task, but rank {ranks.rank} may use {bound}: srun only reads the number "
            f"on the srun command line, so add --cpus-per-task={per_task} there"
        ]
    # A GPU takes in images faster than two cores can decode them.
    needed = _CORES_FOR_A_GPU if on_gpu else 2
    if (under_slurm or on_gpu) and threads < needed:
        return [
            f"the loader of rank {ranks.rank} has {threads} core(s) and needs about {needed}: submit with "
            f"--cpus_per_task {needed} or more (srun and sbatch: --cpus-per-task), or the device waits for images"
        ]
    return []
