"""Counted costs of a model against counts by hand."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from trainer.bench.roofline import ModelCost, _count, count_model_cost, measure_machine

from trainer.bench import floor, roofline
from trainer.config.loading import load_config

CPU = torch.device("cpu")


class OneConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.conv(pixels.float())


def test_one_convolution() -> None:
    """Forward and the weights' gradient; pixels want none. The same products each, two operations a multiplication."""
    rows, side = 2, 8
    flops, num_bytes = _count(OneConvolution(), rows, side, CPU, None)
    products = rows * 4 * side * side * 3 * 9
    assert flops == 2 * 2 * products
    pixels, x, y, weights = (rows * 3 * side**2, 4 * rows * 3 * side**2, 4 * rows * 4 * side**2, 4 * 4 * 3 * 9)
    cast, ones = pixels + x, y
    assert num_bytes == cast + (x + weights + y) + ones + (y + x + weights + weights)


def test_second_passes() -> None:
    """BatchNorm reads x twice forward, x and its result's gradient twice backward; a convolution whose input wants a gradient
    reads that of its result twice."""
    rows, side = 2, 8
    found = []
    for layers in ((), (nn.BatchNorm2d(4),), (nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1, bias=False))):
        model = nn.Sequential(OneConvolution(), *layers)
        found.append(_count(model, rows, side, CPU, None)[1])
    y = 4 * rows * 4 * side * side
    channel, weights = 4 * 4, 4 * 4 * 4
    norm = found[1] - found[0]
    forward, backward = 3 * y, 5 * y  # x, x, result; x, gradient, x, gradient, result
    assert forward + backward <= norm <= forward + backward + 20 * channel
    assert found[2] - found[1] == (2 * y + weights) + (4 * y + 2 * weights)  # gradient, x, gradient, result; W twice


def test_a_view_more_costs_what_is_counted(tiny_config: Path) -> None:
    """What two small batches say holds for a third, and weights are no part of a view's bytes."""
    config = load_config(tiny_config, ["--model.projector_hidden", "[512]", "--model.encoder_batch_norm", "per_view"])
    cost = count_model_cost(config, CPU, None)
    from trainer.models.networks import EncoderProjector

    flops, num_bytes = _count(EncoderProjector(config), 10, 32, CPU, None)
    assert flops == 10 * cost.flop_per_view
    assert num_bytes == pytest.approx(cost.bytes_per_step + 10 * cost.bytes_per_view, rel=1e-6)
    parameters = sum(p.numel() for p in EncoderProjector(config).parameters())
    assert cost.bytes_per_step > 2.9 * 4 * parameters  # read in forward and backward, gradients written
    bf16 = count_model_cost(config, CPU, torch.bfloat16)
    assert bf16.flop_per_view == cost.flop_per_view
    assert bf16.bytes_per_view < 0.8 * cost.bytes_per_view


def test_the_smaller_bound_counts() -> None:
    """2 GFLOP and 10 MB + 100 MB / 100 views a view: 500 views/s of 1 TFLOP/s, 1,000 of 11 GB/s."""
    cost = ModelCost(flop_per_view=2e9, bytes_per_view=10e6, bytes_per_step=100e6)
    found = roofline.roofline(cost, {"matmul_tflops": 1.0, "copy_gb_per_s": 11.0}, 100, 400.0)
    assert found["roofline_views_per_s"] == 500
    assert found["roofline_bound"] == "arithmetic"
    assert found["flop_utilisation"] == pytest.approx(0.8)
    assert found["traffic_utilisation"] == pytest.approx(0.4)
    found = roofline.roofline(cost, {"matmul_tflops": 4.0, "copy_gb_per_s": 11.0}, 100, 400.0)
    assert (found["roofline_views_per_s"], found["roofline_bound"]) == (1000, "memory")


@pytest.mark.parametrize(("slow", "best"), [(False, 400), (True, 100)])
def test_rates_of_the_machine(monkeypatch: pytest.MonkeyPatch, slow: bool, best: int) -> None:
    """The best window of the best size: 2 n^3 operations in its time. Where a small one takes long, no larger is tried."""
    monkeypatch.setattr(roofline, "MATMUL_SIZES", {"cpu": (100, 200, 400)})
    monkeypatch.setattr(roofline, "timed", lambda function, device: lambda calls: 1.0 if slow else 1e-3)
    monkeypatch.setattr(roofline, "take_turns", lambda windows, seconds: {n: [9e9, n * 10.0] for n in windows})
    monkeypatch.setattr(
        roofline, "measure_ceilings", lambda device, seconds: floor.Ceilings(1.0, {2**20: 99.0, 2**26: 7.0, 2**28: 8.0})
    )
    machine = measure_machine(CPU, None, 3.0)
    assert machine == {"matmul_tflops": pytest.approx(2 * best**3 / (best * 10e-6) / 1e12), "copy_gb_per_s": 8.0}
