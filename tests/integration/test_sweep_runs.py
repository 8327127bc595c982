"""A sweep that is interrupted passes the signal on or takes its run with it, and continues when it is started again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.conftest import TINY
from tests.integration.run_files import metrics
from tests.processes import Started, start_ranks, wait_until
from trainer.cli import main

EPOCHS = 20


@pytest.fixture
def words(tmp_path: Path, tiny_set: Path) -> list[str]:
    """Return the command of a sweep of one run, which takes long enough to be interrupted and saves every third step."""
    (tmp_path / "row.yaml").write_text(TINY)
    settings = ["--data.root", str(tiny_set), "--checkpoint.every_steps", "3", "--evaluate.protocols", "knn"]
    common = ["--config", str(tmp_path / "row.yaml"), "--out", str(tmp_path / "out")]
    return ["sweep", *common, *settings, "--optimizer.epochs", str(EPOCHS)]


def start_and_wait_for_step(words: list[str], folder: Path, step: int) -> Started:
    """Start the sweep as a process, and wait until its run has logged a step."""
    (sweep,) = start_ranks(main, [words], folder / "output")
    run_dir = folder / "out" / "row" / "seed_0"
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) >= step, sweep)
    return sweep


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_continues(number: int, words: list[str], tmp_path: Path) -> None:
    sweep = start_and_wait_for_step(words, tmp_path, 4)
    children = psutil.Process(sweep.pid).children()
    assert len(children) == 1
    sweep.signal(number)
    assert sweep.wait() == (75 if number == signal.SIGTERM else -number), sweep.output()
    psutil.wait_procs(children, timeout=10)
    assert not children[0].is_running(), "the run outlives its sweep"
    run_dir = tmp_path / "out" / "row" / "seed_0"
    state = json.loads((run_dir / "state.json").read_text())
    assert state["status"] == ("preempted" if number == signal.SIGTERM else "running")
    assert state["starts"] == 1

    (again,) = start_ranks(main, [words], tmp_path / "output")
    assert again.wait() == 0, again.output()
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, 3 * EPOCHS + 1))
    assert json.loads((run_dir / "state.json").read_text())["starts"] == 2
    assert "continuing after step" in (run_dir / "log.txt").read_text()
    (row,) = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]
    assert (row["row"], row["finished"], row["steps"]) == ("row", 1, 3 * EPOCHS)
    assert "[1/1] row, seed 0: finished" in again.output()
