"""Cores of a rank, and the warning if they are too few."""

from pathlib import Path

import pytest

from trainer.distributed.cores import core_warnings, own_cores, quota_cores
from trainer.distributed.ranks import Ranks, find_ranks

SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_CPUS_ON_NODE": "16"}  # noqa: E501 # fmt: skip


def torchrun(local: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(local), "LOCAL_WORLD_SIZE": str(local)}


@pytest.mark.parametrize(
    ("bound", "env", "cores"),
    [
        (16, {}, 16),
        (16, torchrun(4), 4),
        (16, torchrun(32), 1),
        (16, SRUN, 4),  # srun has not bound the ranks: all four share the node
        (3, SRUN, 3),  # srun has bound each rank to three cores
        (16, {**SRUN, "SLURM_CPUS_PER_TASK": "2"}, 2),
        (1, {**SRUN, "SLURM_CPUS_PER_TASK": "4"}, 1),
    ],
)
def test_the_cores_of_a_rank_are_found(
    bound: int, env: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(bound))
    monkeypatch.setattr("trainer.distributed.cores.quota_cores", lambda: 64)
    assert own_cores(env) == cores


def test_the_quota_of_a_container_limits_the_cores(tmp_path: Path) -> None:
    process = tmp_path / "cgroup"
    process.write_text("0::/user/job\n")
    (tmp_path / "user" / "job").mkdir(parents=True)
    assert quota_cores(tmp_path, process) > 1000
    (tmp_path / "user" / "job" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "user" / "cpu.max").write_text("250000 100000\n")
    assert quota_cores(tmp_path, process) == 3
    (tmp_path / "user" / "job" / "cpu.max").write_text("150000 100000\n")
    assert quota_cores(tmp_path, process) == 2, "the strictest limit holds"
    process.write_text("4:memory:/x\n3:cpu,cpuacct:/box\n")
    (tmp_path / "cpu,cpuacct" / "box").mkdir(parents=True)
    (tmp_path / "cpu,cpuacct" / "box" / "cpu.cfs_quota_us").write_text("-1")
    assert quota_cores(tmp_path, process) > 1000
    (tmp_path / "cpu,cpuacct" / "box" / "cpu.cfs_quota_us").write_text("400000")
    (tmp_path / "cpu,cpuacct" / "box" / "cpu.cfs_period_us").write_text("100000")
    assert quota_cores(tmp_path, process) == 4


def test_too_few_cores_give_a_warning_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1))
    asked = {**SRUN, "SLURM_CPUS_PER_TASK": "8"}
    (warning,) = core_warnings(find_ranks(asked), 1, on_gpu=True, env=asked)
    assert "add --cpus-per-task=8" in warning
    (warning,) = core_warnings(find_ranks(SRUN), 1, on_gpu=True, env=SRUN)
    assert "has 1 core(s) and needs about 6" in warning
    assert core_warnings(Ranks(), 8, on_gpu=True, env={}) == []
    assert core_warnings(Ranks(), 1, on_gpu=False, env={}) == []
