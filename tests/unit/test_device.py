"""Which GPU a rank takes. There is none here: torch is told that there are some."""

from typing import Any

import pytest
import torch

from trainer.config.schema import Config
from trainer.distributed.device import choose_device, compiles
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    return monkeypatch


@pytest.mark.parametrize(("count", "local_rank", "index"), [(8, 3, 3), (1, 0, 0), (1, 5, 0)])
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_it_sees(
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
def test_the_model_is_compiled_on_a_gpu_unless_told_otherwise(setting: Any, on_gpu: bool, on_cpu: bool) -> None:
    config = Config(compile=setting)
    assert compiles(config, torch.device("cuda", 0)) is on_gpu
    assert compiles(config, torch.device("cpu")) is on_cpu
