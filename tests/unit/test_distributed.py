"""Who this process is, and how ranks share a step. (Two real ranks: tests/integration/test_two_ranks.py.)"""

import socket
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from trainer.config import Config
from trainer.device import autocast_dtype
from trainer.distributed import (
    Ranks,
    find_ranks,
    make_slice_group,
    one_rank_a_node_first,
    own_rows,
    process_group,
    slice_group_size,
)
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


def test_the_group_waits_as_long_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: seen.update(options, backend=backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.update(destroyed=True))
    monkeypatch.setattr(dist, "TCPStore", lambda *arguments, **options: (arguments, options))
    with pytest.raises(RuntimeError, match="inside"), process_group(Ranks(1, 2, 1), torch.device("cpu"), 5):
        raise RuntimeError("inside")
    assert (seen["backend"], seen["rank"], seen["world_size"]) == ("gloo", 1, 2)
    assert seen["timeout"] == timedelta(minutes=4)  # a rank that waits for another says so before its watchdog ends it
    assert seen["store"] == (("localhost", 1, 2, False, timedelta(minutes=4)), {"master_listen_fd": None})
    assert seen["destroyed"]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with process_group(Ranks(1, 2, 1), torch.device("cpu"), 5):
        assert seen["store"] is None


def test_the_store_listens_on_the_address_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, store, **options: stores.append(store))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    plain = dist.TCPStore  # of one rank, so that nobody is waited for
    monkeypatch.setattr(
        dist, "TCPStore", lambda host, port, _, *more, **options: plain(host, port, 1, *more, **options)
    )
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(InputError, match=f"can't listen on MASTER_ADDR 127.0.0.1, MASTER_PORT {port} .*in use"):  # noqa: SIM117
            with process_group(Ranks(0, 2), torch.device("cpu"), 1):
                pass
    with process_group(Ranks(0, 2), torch.device("cpu"), 1):
        listening = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert ("127.0.0.1", port) in listening
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_only_one_rank_of_all_is_the_first() -> None:
    assert [Ranks(rank, 4, rank % 2).is_first for rank in range(4)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(Ranks(), ["work"]), (Ranks(2, 4, 0), ["work", "barrier"]), (Ranks(3, 4, 1), ["barrier", "work"])],
)
def test_one_rank_a_node_works_before_the_others(
    ranks: Ranks, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda: order.append("barrier"))
    one_rank_a_node_first(ranks, lambda: order.append("work") or "done")
    assert order == expected


def test_rows_are_consecutive_and_even() -> None:
    assert [own_rows(Ranks(r, 4), 64).first for r in range(4)] == [0, 16, 32, 48]
    with pytest.raises(InputError, match="take 63"):
        own_rows(Ranks(0, 3), 64)
    with pytest.raises(InputError, match="take 3584"):  # whole slices of 256 as well
        own_rows(Ranks(0, 7), 4096, 256)
    with pytest.raises(InputError, match="take 8"):
        own_rows(Ranks(0, 8), 1)


@pytest.mark.parametrize(
    ("images", "world", "together", "size"),
    [(256, 16, 256, 1), (512, 8, 256, 1), (64, 64, 256, 4), (128, 32, 256, 2), (96, 8, 128, 4), (16, 1, 16, 1)],
)
def test_slice_groups_are_as_small_as_they_can_be(images: int, world: int, together: int, size: int) -> None:
    assert slice_group_size(images, world, together) == size


def test_groups_that_do_not_fit_the_ranks() -> None:
    with pytest.raises(InputError, match=r"6 ranks of 64 images.*256.*multiple of 4"):
        slice_group_size(64, 6, 256)


def test_slice_groups_are_neighbours_and_made_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    timeouts = []

    def new_group(ranks: list[int], timeout: timedelta) -> list[int]:
        made.append(ranks)
        timeouts.append(timeout)
        return ranks

    monkeypatch.setattr(dist, "new_group", new_group)
    found = [make_slice_group(2, Ranks(rank, 6), 10.0) for rank in range(6)]
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert made == [[0, 1], [2, 3], [4, 5]] * 6
    assert set(timeouts) == {timedelta(minutes=8)}
    assert make_slice_group(1, Ranks(3, 6), 10.0) is None


def test_precision_by_name() -> None:
    from dataclasses import replace

    cpu = torch.device("cpu")
    assert autocast_dtype(replace(Config(), precision="bf16"), cpu) is torch.bfloat16
    assert autocast_dtype(replace(Config(), precision="fp32"), cpu) is None
