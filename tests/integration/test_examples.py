"""The programs in examples/, run as their users run them."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, write_images
from tests.integration.launch import run
from trainer.files import shipped_folder

EXAMPLES = ROOT / "examples"


@pytest.mark.slow
def test_a_loop_in_plain_pytorch_trains_on_two_ranks(tmp_path: Path) -> None:
    words = [str(shipped_folder("demo_data")), "--split", "train", "--size", "32", "--steps", "2", "--images", "128"]
    done = run(str(EXAMPLES / "pytorch_loop.py"), *words, "--out", str(tmp_path / "encoder.pt"), ranks=2)
    assert done.returncode == 0, done.stderr
    # Every rank prints the loss of the joined batch.
    lines = [line for line in done.stdout.splitlines() if line.startswith("step 0")]
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert 0 < float(lines[0].split()[-1]) < 2.1
    assert "conv1.weight" in torch.load(tmp_path / "encoder.pt", weights_only=True)


@pytest.mark.slow
def test_a_lightning_module_trains(tmp_path: Path) -> None:
    for label, name in enumerate(("cats", "dogs")):
        write_images(tmp_path / "images" / name, 64, seed=label)
    words = [str(tmp_path / "images"), "--size", "32", "--epochs", "1", "--images", "128", "--workers", "0"]
    done = run(str(EXAMPLES / "lightning_module.py"), *words, "--out", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    checkpoint = next((tmp_path / "logs").rglob("*.ckpt"))
    assert "loss._extra_state" in torch.load(checkpoint, weights_only=True)["state_dict"]


def test_the_cells_of_the_notebook_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads((EXAMPLES / "whitening.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    program = tmp_path / "cells.py"
    program.write_text("\n".join(cells))
    runpy.run_path(str(program))
    shown = capsys.readouterr().out
    assert "equal views:     0.0" in shown
    assert "step 11  loss" in shown
