"""Who this process is, and how ranks share a step. (Two real ranks: tests/integration/test_two_ranks.py.)"""

import pytest
import torch

from trainer.config import Config
from trainer.device import autocast_dtype
from trainer.distributed import Ranks, find_ranks, own_rows, process_group, slice_group_size
from trainer.errors import InputError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID",
         "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, Ranks()),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Ranks(3, 8, 1)),
        (
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"},
            Ranks(2, 4, 0),
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Ranks()),
        ({"SLURM_PROCID": "0"}, Ranks()),  # a batch script, no job step
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
            Ranks(1, 2, 1),  # torchrun inside srun
        ),
    ],
)
def test_ranks_from_the_environment(env: dict[str, str], ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert find_ranks() == ranks


def test_several_ranks_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT not set"),
        process_group(Ranks(0, 2, 0), torch.device("cpu"), 1),
    ):
        pass


def test_rows_are_consecutive_and_even() -> None:
    assert [own_rows(Ranks(r, 4), 64).first for r in range(4)] == [0, 16, 32, 48]
    with pytest.raises(InputError, match="take 63"):
        own_rows(Ranks(0, 3), 64)


@pytest.mark.parametrize(
    ("images", "world", "together", "size"),
    [(256, 16, 256, 1), (512, 8, 256, 1), (64, 64, 256, 4), (128, 32, 256, 2), (96, 8, 128, 4), (16, 1, 16, 1)],
)
def test_slice_groups_are_as_small_as_they_can_be(images: int, world: int, together: int, size: int) -> None:
    assert slice_group_size(images, world, together) == size


def test_groups_that_do_not_fit_the_ranks() -> None:
    with pytest.raises(InputError, match=r"6 ranks of 64 images.*256.*multiple of 4"):
        slice_group_size(64, 6, 256)


def test_precision_by_name() -> None:
    from dataclasses import replace

    cpu = torch.device("cpu")
    assert autocast_dtype(replace(Config(), precision="bf16"), cpu) is torch.bfloat16
    assert autocast_dtype(replace(Config(), precision="fp32"), cpu) is None
