"""The demo runs all its parts, here with a few steps."""

import json
from pathlib import Path

from tests.integration.launch import run

FIGURES = ("linear_top1", "linear_standardised_top1", "knn_top1", "random_linear_top1", "random_linear_standardised_top1",
           "random_knn_top1", "pixels_knn_top1")  # fmt: skip


def test_the_demo_writes_a_report_a_page_and_a_table(tmp_path: Path) -> None:
    done = run("-m", "trainer", "demo", "--run_dir", str(tmp_path / "demo"), "--max_steps", "12", "--views.size", "16",
               "--views.eval_resize", "16", "--log.every_steps", "4",
               "--linear.epochs", "2", timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert all(10 < report[name] < 100 for name in FIGURES)
    assert report["test_images"] == 2000
    assert 70 < report["pixels_knn_top1"] < 90
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000
    assert "5-nn of raw pixels" in done.stdout
