"""The sweep of the whitening, its picture, and the table for the automatic backend."""

import json
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
import torch
from PIL import Image
from trainer.bench.sweep import LINES, WhiteningSize, bench_sweep, whitening_steps

from kernels.whitening import whiten
from trainer.bench.implementations import runnable_backends

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = {
    "slices": (WhiteningSize(1, 8, 4), WhiteningSize(2, 8, 4)),
    "size": (WhiteningSize(2, 4, 2), WhiteningSize(2, 8, 4)),
    "rows": (WhiteningSize(2, 5, 4), WhiteningSize(2, 8, 4)),
}


def test_every_line_varies_what_it_says_and_can_be_whitened() -> None:
    for name, points in LINES.items():
        grown = [getattr(point, name) for point in points]
        assert grown == sorted(set(grown))
        assert all(point.rows > point.size for point in points)
    assert {point[1:] for point in LINES["slices"]} == {(128, 64)}
    assert all((point.slices, point.rows) == (8, 2 * point.size) for point in LINES["size"])
    assert {(point.slices, point.size) for point in LINES["rows"]} == {(8, 64)}


def test_a_step_is_forward_and_backward_of_the_named_backend() -> None:
    size = WhiteningSize(2, 8, 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator).requires_grad_()
    expected = torch.autograd.grad(whiten(x), x, torch.randn(size, generator=generator))
    for name, step in whitening_steps(size, CPU, ("reference", "torch")).items():
        torch.testing.assert_close(step(), expected, rtol=1e-3, atol=1e-4, msg=name)
    with pytest.raises(ValueError, match="'none'"):
        whitening_steps(size, CPU, ("none",))["none"]()


def test_the_sweep_is_plain_and_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench_sweep("cpu", seconds=0.05, lines=TINY)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "slices" in captured.err
    assert json.loads(json.dumps(result)) == result
    for line, (name, points) in zip(result["lines"], TINY.items(), strict=True):
        assert line["line"] == name
        assert [(p["slices"], p["rows"], p["size"]) for p in line["points"]] == list(points)
        for point in line["points"]:
            assert set(point["figures"]) == set(runnable_backends(CPU)[0])
            assert all(0 < f["quartile_1"] <= f["median"] <= f["quartile_3"] for f in point["figures"].values())
    (tmp_path / "sweep.json").write_text(json.dumps(result))
    done = plot(tmp_path / "sweep.json", tmp_path / "sweep.png")
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "sweep.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 2 * picture.height, "three panels beside each other"
    (tmp_path / "other.json").write_text(json.dumps({"bench": "loss"}))
    done = plot(tmp_path / "other.json", tmp_path / "other.png")
    assert done.returncode == 2
    assert "is no sweep" in done.stderr
    assert not (tmp_path / "other.png").exists()


def plot(result: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "plot_loss.py"), str(result), str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_table_of_backends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = run_path(str(ROOT / "benchmarks" / "whitening_backends.py"))
    out = tmp_path / "table.json"
    words = ["--seconds", "30", "--slices", "2", "1", "4000", "--sizes", "4", "--device", "cpu", "--out", str(out)]
    script["measure"].__globals__["take_turns"] = lambda windows, seconds: {
        name: [1.0, 30.0 if name == "reference" else 5.0, 100.0] for name in windows
    }
    script["main"](words)
    assert capsys.readouterr().out.strip() == str(out)
    table = json.loads(out.read_text())
    assert table["device_type"] == "cpu"
    assert table["versions"]["torch"] == torch.__version__
    first, second, third = table["cells"]
    assert [(c["slices"], c["rows"], c["size"]) for c in (first, second, third)] == [(1, 8, 4), (2, 8, 4), (4000, 8, 4)]
    for cell in table["cells"]:
        assert cell["microseconds"] == {
            name: 30.0 if name == "reference" else 5.0 for name in runnable_backends(CPU)[0]
        }
        assert cell["fastest"] == "torch"


def test_cells_too_large_are_left_out_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    script = run_path(str(ROOT / "benchmarks" / "whitening_backends.py"))
    table = script["measure"](CPU, 1.0, slices=(1, 2, 10_000_000), sizes=(4,))
    assert [cell["slices"] for cell in table["cells"]] == [1, 2]
    assert all(min(cell["microseconds"].values()) > 0 for cell in table["cells"])
    (left_out,) = table["left_out"]
    assert left_out["slices"] == 10_000_000
    assert left_out["reason"] == "x has 1220 MiB, more than 128"
    too_large = script["_too_large"]
    assert too_large(WhiteningSize(4, 8, 4), one_turn=0.1, share=0.2) is None
    assert "give more --seconds" in too_large(WhiteningSize(4, 8, 4), one_turn=0.11, share=0.2)
