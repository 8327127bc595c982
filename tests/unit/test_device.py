"""Choice of the GPU of a rank, with a torch that reports GPUs that do not exist."""

from typing import Any

import pytest
import torch

from trainer.config.checks import check
from trainer.config.schema import Config
from trainer.distributed.device import choose_device, compiles, names_nondeterministic
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make torch report GPUs. Return the monkeypatch, to set their number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    return monkeypatch


@pytest.mark.parametrize(("count", "local_rank", "index"), [(8, 3, 3), (1, 0, 0), (1, 5, 0)])
def test_a_rank_uses_the_gpu_of_its_local_rank_or_the_only_visible_one(
    count: int, local_rank: int, index: int, visible: pytest.MonkeyPatch
) -> None:
    visible.setattr(torch.cuda, "device_count", lambda: count)
    assert choose_device(Config(), Ranks(local_rank, 8, local_rank, 8)) == torch.device("cuda", index)


def test_more_ranks_than_gpus_are_refused(visible: pytest.MonkeyPatch) -> None:
    visible.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"local rank 2 on its node, but sees only 2 GPU\(s\): start one rank per GPU"):
        choose_device(Config(), Ranks(2, 4, 2, 4))


@pytest.mark.parametrize(
    ("setting", "on_gpu", "on_cpu"), [("auto", True, False), ("true", True, True), ("false", False, False)]
)
def test_auto_compiles_the_model_on_a_gpu_only(setting: Any, on_gpu: bool, on_cpu: bool) -> None:
    config = Config(compile=setting)
    assert compiles(config, torch.device("cuda", 0)) is on_gpu
    assert compiles(config, torch.device("cpu")) is on_cpu


def test_an_operation_without_a_deterministic_algorithm_is_named() -> None:
    choose_device(Config(device="cpu", deterministic=True), Ranks())
    try:
        named = "deterministic is true, but the operation put_ has no deterministic"
        with pytest.raises(InputError, match=named), names_nondeterministic():
            torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
        with pytest.raises(RuntimeError, match="other"), names_nondeterministic():
            raise RuntimeError("other")
    finally:
        choose_device(Config(device="cpu"), Ranks())


def test_autotuning_is_refused_in_deterministic_runs() -> None:
    (problem,) = check(Config(deterministic=True, autotune=True))
    assert problem.startswith("autotune is true with deterministic true")
