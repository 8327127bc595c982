"""The evaluator in a process of its own: beside a training, and ended by a scheduler's signal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ROOT
from trainer.cli import main


def start(*words: str | Path) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "trainer", "evaluate", "--poll_seconds", "0.1", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def wait_until(there: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not there():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_beside_a_training_and_through_a_preemption(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> None:
    """Ended while it waits and while it measures (75), started again (0): all that the run kept is measured, nothing twice."""
    run_dir = tmp_path / "run"
    waiting = start("--follow", run_dir)
    assert waiting.stderr is not None
    wait_until(lambda: "waiting for" in waiting.stderr.readline())
    waiting.send_signal(signal.SIGUSR1)
    assert waiting.wait(120) == 75

    measuring = start("--follow", run_dir, "--evaluate.probe_epochs", "300")
    words = ["--data.root", str(tiny_set), "--run_dir", str(run_dir), "--checkpoint.keep_every_epochs", "1"]
    assert main(["pretrain", "--config", str(tiny_config), *words]) == 0
    wait_until(lambda: list((run_dir / "eval").glob("*.json")))
    measuring.send_signal(signal.SIGTERM)
    assert measuring.wait(120) == 75
    assert measuring.stderr is not None
    assert "Traceback" not in measuring.stderr.read()
    before = {path: path.stat().st_mtime_ns for path in (run_dir / "eval").glob("*.json")}
    assert 1 <= len(before) < 6

    again = start("--follow", run_dir)
    assert again.wait(120) == 0
    names = {path.name for path in (run_dir / "eval").iterdir()}
    assert names == {f"{measure}_{step}.json" for measure in ("linear", "knn") for step in (3, 6, 9)}
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
