"""How many cores this rank may use, and what to do if they are too few to feed its device."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.distributed.ranks import Ranks, find_ranks

_CORES_FOR_A_GPU = 6  # to decode and augment for one fast GPU; docs/measurements.md has what a core gives
_CGROUPS = Path("/sys/fs/cgroup")


def own_cores(env: Mapping[str, str] | None = None) -> int:
    """Cores of this rank: those it is bound to, at most its cgroup's quota, shared with the ranks of its node if they are not
    bound each to their own."""
    env = os.environ if env is None else env
    ranks = find_ranks(env)
    cores = min(len(os.sched_getaffinity(0)), quota_cores())
    if ranks.local_world_size == 1:
        return cores
    if "SLURM_STEP_ID" in env and "RANK" not in env:
        per_task = env.get("SLURM_CPUS_PER_TASK", "")
        if per_task.isdecimal():
            return max(1, min(cores, int(per_task)))
        on_node = env.get("SLURM_CPUS_ON_NODE", "")
        if on_node.isdecimal() and cores < int(on_node):
            return cores  # srun bound each task to its own
    return max(1, cores // ranks.local_world_size)


def quota_cores(cgroups: Path = _CGROUPS, process: Path = Path("/proc/self/cgroup")) -> int:
    """Whole cores that the cgroup's CPU quota allows, rounded up (containers have one); a large number if there is none."""
    lines = process.read_text().splitlines() if process.exists() else []
    limits = [limit for line in lines for limit in _limits(cgroups, line)]
    # "max" and -1 stand for no limit; the strictest of all levels holds
    shares = [int(quota) / int(period) for quota, period in limits if quota.isdecimal() and period.isdecimal()]
    return max(1, math.ceil(min(shares, default=1 << 20)))


def _limits(cgroups: Path, line: str) -> Iterator[tuple[str, str]]:
    """(quota, period) at each level of the group that a line of /proc/self/cgroup names, in version 2 or 1 of cgroups."""
    _, controllers, path = line.split(":", 2)
    own = path.lstrip("/")
    if controllers == "":
        folder = cgroups / own
        for level in (folder, *folder.parents):
            quota, _, period = _read(level / "cpu.max").partition(" ")
            yield quota, period
    elif "cpu" in controllers.split(","):
        for level in (cgroups / controllers / own, cgroups / "cpu" / own, cgroups / "cpu"):
            yield _read(level / "cpu.cfs_quota_us"), _read(level / "cpu.cfs_period_us")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def core_warnings(ranks: Ranks, threads: int, *, on_gpu: bool, env: Mapping[str, str] | None = None) -> list[str]:
    """What makes the loader slow for want of cores, with the fix, as sentences for the log. threads: those of the loader."""
    env = os.environ if env is None else env
    bound = len(os.sched_getaffinity(0))
    per_task = env.get("SLURM_CPUS_PER_TASK", "")
    if "SLURM_STEP_ID" in env and per_task.isdecimal() and bound < int(per_task):
        return [
            f"this job asked for {per_task} cores per task, but rank {ranks.rank} may use {bound}: srun takes the number on "
            f"its own command line only, so add --cpus-per-task={per_task} there"
        ]
    needed = _CORES_FOR_A_GPU if on_gpu else 2
    if ("SLURM_STEP_ID" in env or on_gpu) and threads < needed:
        return [
            f"the loader of rank {ranks.rank} has {threads} core(s) and needs about {needed}: submit with "
            f"--cpus_per_task {needed} or more (srun and sbatch: --cpus-per-task), or the device waits for images"
        ]
    return []
