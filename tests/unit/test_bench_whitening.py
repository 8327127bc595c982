"""Benchmark of the whitening: the lines of the sweep."""

import json
from pathlib import Path

import torch

from kernels.whitening import whiten
from trainer.bench.plot import draw
from trainer.bench.whitening import LINES, WhiteningSize, bench_sweep, whitening_steps

CPU = torch.device("cpu")


def test_a_step_is_forward_and_backward_of_the_named_backend() -> None:
    size = WhiteningSize(2, 8, 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator).requires_grad_()
    expected = torch.autograd.grad(whiten(x), x, torch.randn(size, generator=generator))
    for name, step in whitening_steps(size, CPU, ("reference", "torch")).items():
        torch.testing.assert_close(step(), expected, rtol=1e-3, atol=1e-4, msg=name)


def test_every_line_of_the_sweep_varies_one_size() -> None:
    for name, points in LINES.items():
        grown = [getattr(point, name) for point in points]
        assert grown == sorted(set(grown))
        assert all(point.rows > point.size for point in points)


def test_the_sweep_is_measured_and_drawn(tmp_path: Path) -> None:
    result = bench_sweep("cpu", 0.05, {"slices": (WhiteningSize(1, 8, 4), WhiteningSize(2, 8, 4))})
    (line,) = json.loads(json.dumps(result))["lines"]
    assert [point["slices"] for point in line["points"]] == [1, 2]
    assert all(set(point["figures"]) == {"reference", "torch"} for point in line["points"])
    draw(result, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 0
