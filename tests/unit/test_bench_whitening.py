"""Benchmark of the whitening: the table of the automatic backend, and the lines of the sweep."""

import json
from pathlib import Path

import pytest
import torch

from kernels.whitening import whiten
from trainer.bench.plot import draw
from trainer.bench.whitening import LINES, WhiteningSize, bench_sweep, main, measure_grid, whitening_steps

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


def test_the_table_names_the_fastest_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    main(["--seconds", "0.5", "--slices", "2", "1", "--sizes", "4", "--device", "cpu", "--out", str(out)])
    assert capsys.readouterr().out.strip() == str(out)
    table = json.loads(out.read_text())
    assert table["device_type"] == "cpu"
    assert [(cell["slices"], cell["rows"], cell["size"]) for cell in table["cells"]] == [(1, 8, 4), (2, 8, 4)]
    for cell in table["cells"]:
        assert set(cell["microseconds"]) == {"reference", "torch"}
        assert cell["microseconds"][cell["fastest"]] == min(cell["microseconds"].values())


def test_cells_that_are_too_large_or_slow_are_skipped_with_the_reason() -> None:
    table = measure_grid(CPU, 1.0, slices=(1, 10_000_000), sizes=(4,))
    assert [cell["slices"] for cell in table["cells"]] == [1]
    assert [cell["reason"] for cell in table["left_out"]] == ["x has 1220 MiB, more than 128"]
    slow = measure_grid(CPU, 1e-6, slices=(1, 64), sizes=(64,))["left_out"]
    assert [cell["slices"] for cell in slow] == [64]
    assert "give more --seconds" in slow[0]["reason"]
