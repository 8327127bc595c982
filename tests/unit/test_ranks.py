"""Rank of a process, from its environment variables."""

import pytest

from trainer.distributed.ranks import Ranks, find_ranks, launch_warnings
from trainer.errors import InputError

SRUN = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, Ranks()),
        (TORCHRUN, Ranks(3, 8, 1, 2)),
        ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, Ranks(3, 8, 1, 2, restarts=2)),
        (SRUN, Ranks(2, 4, 0, 2, "123")),
        ({**SRUN, "SLURM_RESTART_COUNT": "3"}, Ranks(2, 4, 0, 2, "123", 3)),
        ({**SRUN, "SLURM_ARRAY_JOB_ID": "120", "SLURM_ARRAY_TASK_ID": "1"}, Ranks(2, 4, 0, 2, "120_1")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, Ranks(2, 4, 0, 1, "123")),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, Ranks(job_id="123")),  # srun --pty, or a single task
        ({"SLURM_JOB_ID": "123", "SLURM_PROCID": "0"}, Ranks(job_id="123")),  # a batch script without srun
        ({**SRUN, **TORCHRUN}, Ranks(3, 8, 1, 2, "123")),  # torchrun inside srun
    ],
)
def test_ranks_are_read_from_the_environment(env: dict[str, str], ranks: Ranks) -> None:
    assert find_ranks(env) == ranks


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is ''"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK is 'two'"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK is 5 and WORLD_SIZE 2"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "unset RANK WORLD_SIZE"),
        ({**SRUN, "SLURM_HET_SIZE": "2"}, "heterogeneous"),
        ({**SRUN, "SLURM_OVERCOMMIT": "1"}, "--overcommit"),
        ({**SRUN, "SLURM_PROCID": "7"}, "contradict each other"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "contradict each other"),
        ({key: value for key, value in SRUN.items() if key != "SLURM_LOCALID"}, "SLURM_LOCALID is not set"),
    ],
)
def test_a_contradicting_environment_is_refused_by_name(env: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_ranks(env)


def test_a_job_of_several_tasks_without_srun_gives_a_warning() -> None:
    env = {"SLURM_JOB_ID": "123", "SLURM_NTASKS": "8"}
    (warning,) = launch_warnings(find_ranks(env), env)
    assert "start the command with srun" in warning
    assert launch_warnings(find_ranks(SRUN), {**SRUN, "SLURM_NTASKS": "4"}) == []
