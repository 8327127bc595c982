"""Lower bounds on the time of the step and the loss, compared with calculations by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.test_methods import CONFIG
from trainer.bench.ceilings import Ceilings, count_flop_per_view, loss_floor, measure_ceilings
from trainer.bench.shapes import LossShape
from trainer.config.loading import load_config
from trainer.config.schema import METHODS

CPU = torch.device("cpu")


def test_the_floor_of_the_loss_is_the_longer_of_arithmetic_and_memory() -> None:
    """Each of 4 slices of 16 x 8 takes 10 M k^2 + 2/3 k^3 operations. v has 64 x 8 floats: read twice, gradient written."""
    shape = LossShape(2, 32, 16, 8, 1)
    flops = 4 * (10 * 16 * 64 + 2 / 3 * 512)
    floor = loss_floor(shape, Ceilings(1.0, {1024: 100.0, 4096: 1.0}))
    assert floor["flops"] == pytest.approx(flops)
    assert floor["bytes"] == 3 * 2048
    assert (floor["floor_us"], floor["bound"]) == (pytest.approx(flops / 1e3), "arithmetic")
    # the copy of 1,024 bytes is smaller than v and does not count
    floor = loss_floor(shape, Ceilings(100.0, {1024: 100.0, 4096: 1.0}))
    assert (floor["floor_us"], floor["bound"]) == (pytest.approx(3 * 2048 / 1e3), "memory")


def test_the_arithmetic_of_a_view_grows_with_the_projector(tiny_config: Path) -> None:
    """h more columns of a hidden layer cost 2 (inputs + outputs) h operations, three times for forward and backward."""
    narrow = count_flop_per_view(load_config(tiny_config, ["--model.projector_hidden", "[64]"]), CPU, torch.bfloat16)
    wide = count_flop_per_view(load_config(tiny_config, ["--model.projector_hidden", "[128]"]), CPU, None)
    per_column = (wide - narrow) / 64
    assert per_column % 6 == 0
    assert per_column / 6 > 8, "the encoder's features and the embedding's 8 columns"


@pytest.mark.parametrize("method", METHODS)
def test_the_arithmetic_of_every_method_is_counted(method: str) -> None:
    """A second network adds a forward, a third of the encoder's arithmetic. MoCo encodes each view by one of its networks."""
    wmse, found = (count_flop_per_view(replace(CONFIG, method=name), CPU, None) for name in ("wmse", method))
    ratio = {"byol": 4 / 3, "moco": 2 / 3, "align_uniform": 2 / 3}.get(method, 1.0)
    assert found / wmse == pytest.approx(ratio, rel=0.05)


def test_measured_ceilings_are_plausible() -> None:
    ceilings = measure_ceilings(CPU, 0.2, ((1, 64, 64), (1, 256, 256)))
    assert 0.01 < ceilings.gflops < 1e5
    assert all(0.01 < rate < 1e4 for rate in ceilings.copy_gb_per_s.values())
    assert "64 MiB" in ceilings.as_json()["copy_gb_per_s"]
