"""Runs of real ranks without SLURM: signals, stops, idle ranks, and ranks that do not match."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.integration.run_files import metrics, state
from tests.processes import Started, wait_until
from trainer.cli import main

Arguments = list[str | Path]
LONG = ("--optimizer.epochs", "100000", "--log.every_steps", "50")


@pytest.fixture
def arguments(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> Callable[..., Arguments]:
    """Return a function that makes the arguments of a run in tmp_path/NAME."""

    def make(*more: str, name: str = "run") -> Arguments:
        return ["pretrain", "--config", tiny_config, "--data.root", tiny_set, "--run_dir", tmp_path / name, *more]

    return make


def is_training(run_dir: Path) -> bool:
    """Return whether the run has logged a step."""
    return (run_dir / "metrics.jsonl").exists() and len((run_dir / "metrics.jsonl").read_text()) > 0


def test_wmse_stop_saves_and_the_next_start_continues(
    arguments: Callable[..., Arguments],
    begin: Callable[..., list[Started]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = begin(arguments(*LONG), 2)
    wait_until(lambda: is_training(tmp_path / "run"))
    assert main(["stop", str(tmp_path / "run")]) == 0
    assert "stopped after step" in capsys.readouterr().out
    assert [rank.wait() for rank in ranks] == [0, 0]
    status, code, step = state(tmp_path / "run")
    assert (status, code) == ("stopped", 0)
    assert (tmp_path / "run" / "checkpoints" / f"step_{step:08d}.pt").exists()
    assert main(["stop", str(tmp_path / "run")]) == 0
    assert "has already ended: stopped" in capsys.readouterr().out
    assert begin(arguments(*LONG, "--max_steps", str(step + 1)))[0].wait() == 0
    assert state(tmp_path / "run") == ("paused", 0, step + 1)


def test_a_requeued_job_that_was_asked_to_stop_saves_and_ends(
    arguments: Callable[..., Arguments], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens if `wmse stop` is called after the loss of a node, while no process runs."""
    monkeypatch.setattr("trainer.run.state._LOOK_SECONDS", 0.01)
    assert main([str(word) for word in arguments(*LONG, "--max_steps", "1")]) == 0
    (tmp_path / "run" / "stop").write_text("5")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert main([str(word) for word in arguments(*LONG)]) == 0
    assert state(tmp_path / "run")[:2] == ("stopped", 0)
    # a new job continues the run
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    step = state(tmp_path / "run")[2] + 2
    assert main([str(word) for word in arguments(*LONG, "--max_steps", str(step))]) == 0
    assert state(tmp_path / "run") == ("paused", 0, step)


def test_a_signal_ends_a_run_whose_reads_hang(
    arguments: Callable[..., Arguments], begin: Callable[..., list[Started]], tmp_path: Path
) -> None:
    (rank,) = begin(arguments("--stop_timeout_seconds", "1"), bad_reads=tuple(range(48)), bad_read="hangs")
    wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    rank.signal(signal.SIGTERM)
    assert rank.wait(90) == 75
    assert state(tmp_path / "run") == ("preempted", 75, 0)
    assert "it hangs, and ends without another checkpoint" in rank.output()


def test_a_signal_ends_ranks_that_wait_for_each_other(
    arguments: Callable[..., Arguments], begin: Callable[..., list[Started]], tmp_path: Path
) -> None:
    """Rank 1 is frozen, so rank 0 hangs in a collective and cannot agree on a stop."""
    first, second = begin(arguments(*LONG, "--stop_timeout_seconds", "1"), 2, on_rank=1, freeze_at_step=3)
    wait_until(lambda: psutil.Process(second.pid).status() == psutil.STATUS_STOPPED)
    first.signal(signal.SIGUSR1)
    assert first.wait(90) == 75
    assert state(tmp_path / "run")[:2] == ("preempted", 75)


def test_all_ranks_end_if_another_run_holds_the_folder(
    arguments: Callable[..., Arguments], begin: Callable[..., list[Started]], tmp_path: Path
) -> None:
    begin(arguments(*LONG))
    wait_until(lambda: is_training(tmp_path / "run"))
    late = begin(arguments(*LONG), 2)
    assert [rank.wait(90) for rank in late] == [2, 2]  # long before the time-out of 8 minutes
    assert all("is in use by another process" in rank.output() for rank in late)
    assert state(tmp_path / "run")[0] == "running"


def test_ranks_with_different_copies_of_the_set_end_before_the_first_step(
    arguments: Callable[..., Arguments], begin: Callable[..., list[Started]], tiny_set: Path, tmp_path: Path
) -> None:
    for rank in range(2):
        shutil.copytree(tiny_set, tmp_path / f"copy{rank}")
    next((tmp_path / "copy1/train").rglob("*.JPEG")).unlink()
    ranks = begin(arguments("--data.root", tmp_path / "copy{rank}"), 2)
    assert [rank.wait(90) for rank in ranks] == [2, 2]
    for rank in ranks:
        assert "the images of train are not the same on all ranks:" in rank.output()
        assert f"rank 1 on {socket.gethostname()} has " in rank.output()
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_ranks_that_the_batch_cannot_be_divided_among_stay_idle(
    arguments: Callable[..., Arguments], begin: Callable[..., list[Started]], tmp_path: Path
) -> None:
    more = ("--data.images_per_step", "32", "--log.every_steps", "1")
    assert [rank.wait() for rank in begin(arguments(*more, name="two"), 2)] == [0, 0]
    three = begin(arguments(*more, "--allow_idle_ranks", "true"), 3)
    assert [rank.wait() for rank in three] == [0, 0, 0]
    assert "this rank stays idle" in three[2].output()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "two")


def test_a_run_continues_with_the_same_losses_on_fewer_ranks(
    arguments: Callable[..., Arguments], begin: Callable[..., list[Started]], tmp_path: Path
) -> None:
    """Two ranks have 16 images each, and then one rank has two micro-batches of 16.

    BatchNorm sees the same rows in both cases, so the losses are equal up to rounding.
    """
    more = ("--data.images_per_step", "32", "--optimizer.images_per_micro_batch", "16", "--optimizer.epochs", "6")
    assert [rank.wait() for rank in begin(arguments(*more, name="whole"), 2)] == [0, 0]
    assert [rank.wait() for rank in begin(arguments(*more, "--max_steps", "3"), 2)] == [0, 0]
    (alone,) = begin(arguments(*more))
    assert alone.wait() == 0
    assert "2 rank(s) saved the checkpoint, the run continues with 1" in alone.output()
    assert "images, views and slices of each step stay the same, BatchNorm too" in alone.output()
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_a_local_launch_starts_all_ranks_and_a_signal_ends_them(
    arguments: Callable[..., Arguments], tmp_path: Path, tiny_config: Path
) -> None:
    command = [sys.executable, "-m", "trainer", "launch", "--cluster", "local", "--ranks_per_node", "2"]
    more = [str(word) for word in arguments(*LONG)[1:]]
    launcher = subprocess.Popen([*command, *more], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: is_training(tmp_path / "run"))
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        assert len(ranks) >= 2
        assert json.loads((tmp_path / "run" / "state.json").read_text())["world_size"] == 2
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 75, errors
    assert state(tmp_path / "run")[:2] == ("preempted", 75)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
