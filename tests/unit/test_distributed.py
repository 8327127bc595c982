"""Division of a step among ranks, and process groups. tests/integration/test_two_ranks.py tests two real ranks."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.config.schema import Config
from trainer.distributed.device import autocast_dtype
from trainer.distributed.geometry import images_of_rank, loss_group_size
from trainer.distributed.peers import Peers
from trainer.distributed.process_group import (
    collective_timeout,
    make_batch_norm_group,
    make_loss_group,
    one_rank_a_node_first,
    step_seconds,
)
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError


def test_only_rank_0_is_the_first() -> None:
    assert [Ranks(rank, 4, rank % 2).is_first for rank in range(4)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (Ranks(), ["work", "check", "check"]),
        (Ranks(2, 4, 0), ["work", "check", "check"]),
        (Ranks(3, 4, 1), ["check", "work", "check"]),
    ],
)
def test_one_rank_of_each_node_works_before_the_others(
    ranks: Ranks, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(Peers, "check", lambda self, error: order.append("check"))
    assert one_rank_a_node_first(ranks, lambda: order.append("work") or "done") == "done"
    assert order == expected


def test_images_of_a_rank_are_consecutive_and_even() -> None:
    assert [images_of_rank(Ranks(r, 4), 64).first for r in range(4)] == [0, 16, 32, 48]
    with pytest.raises(InputError, match="use 63, or start 2 rank"):
        images_of_rank(Ranks(0, 3), 64)
    with pytest.raises(InputError, match="use 3584"):  # whole slices of 256 as well
        images_of_rank(Ranks(0, 7), 4096, 256)
    with pytest.raises(InputError, match=r"use 8, or start 1 rank"):
        images_of_rank(Ranks(0, 8), 1)


@pytest.mark.parametrize(
    ("images", "world", "together", "size"),
    [(256, 16, 256, 1), (512, 8, 256, 1), (64, 64, 256, 4), (128, 32, 256, 2), (96, 8, 128, 4), (16, 1, 16, 1)],
)
def test_loss_groups_are_as_small_as_possible(images: int, world: int, together: int, size: int) -> None:
    assert loss_group_size(images, world, together) == size


def test_loss_groups_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(InputError, match=r"6 ranks of 64 images.*256.*multiple of 4"):
        loss_group_size(64, 6, 256)


def test_loss_groups_are_neighbours_and_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    timeouts = []

    def new_group(ranks: list[int], timeout: timedelta, pg_options: None) -> list[int]:
        made.append(ranks)
        timeouts.append(timeout)
        return ranks

    monkeypatch.setattr(dist, "new_group", new_group)
    cpu = torch.device("cpu")
    found = [make_loss_group(2, Config(), Ranks(rank, 6), cpu) for rank in range(6)]
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert made == [[0, 1], [2, 3], [4, 5]] * 6
    assert set(timeouts) == {timedelta(minutes=8)}
    assert make_loss_group(1, Config(), Ranks(3, 6), cpu) is None


def test_the_autocast_dtype_follows_the_precision() -> None:
    cpu = torch.device("cpu")
    assert autocast_dtype(replace(Config(), precision="bf16"), cpu) is torch.bfloat16
    assert autocast_dtype(replace(Config(), precision="fp32"), cpu) is None


def test_batch_norm_has_a_separate_group(group_of_one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In DDP's group its few numbers would wait behind the gradients. On a GPU its stream has high priority."""
    real, asked = dist.new_group, []

    def new_group(members: list[int], **options: Any) -> Any:
        asked.append((members, options.pop("pg_options")))
        return real(**options)

    monkeypatch.setattr(dist, "new_group", new_group)
    config = Config(model=replace(Config().model, batch_norm_ranks="all"))
    group = make_batch_norm_group(config, Ranks(0, 2), torch.device("cpu"))
    assert group
    assert group != group_of_one
    assert make_batch_norm_group(config, Ranks(), torch.device("cpu")) is None
    assert make_batch_norm_group(Config(), Ranks(0, 2), torch.device("cpu")) is None
    make_batch_norm_group(config, Ranks(0, 2), torch.device("cuda", 0))
    members, options = asked[-1]
    assert members == [0, 1]
    assert options.is_high_priority_stream


@pytest.mark.parametrize("compile_model", ["true", "false"])
def test_the_watchdog_ends_a_hanging_step_before_nccl_does(compile_model: Any) -> None:
    config, gpu = replace(Config(), compile=compile_model), torch.device("cuda", 0)
    usual, first = (step_seconds(config, Ranks(0, 2), gpu, may_compile=may_compile) for may_compile in (False, True))
    assert usual is not None
    assert first is not None
    # a rank that waits for files must end first, because it is the cause
    assert usual > 60 * config.timeout_minutes
    assert (first > usual + 600) == (compile_model == "true")  # autotuning takes minutes
    assert collective_timeout(config, gpu).total_seconds() > first


def test_a_step_has_a_time_limit_only_with_several_ranks_over_nccl() -> None:
    assert step_seconds(Config(), Ranks(), torch.device("cuda", 0), may_compile=False) is None
    assert step_seconds(Config(), Ranks(0, 2), torch.device("cpu"), may_compile=False) is None
    assert collective_timeout(Config(), torch.device("cpu")) == timedelta(minutes=8)  # before the watchdog's limit


def test_an_error_of_a_single_rank_names_no_rank() -> None:
    def work() -> None:
        raise InputError("no folder")

    with pytest.raises(InputError, match=r"^no folder$"):
        one_rank_a_node_first(Ranks(), work)
