"""Runs that are struck by what `tests/faults.py` injects, and go on from the same command as if nothing had been."""

from __future__ import annotations

import errno
import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.conftest import TINY
from tests.faults import Faults, Started, start

SAME = ("step", "epoch", "loss", "lr", "min_pivot", "effective_rank", "failed_steps")
STEPS = 9
Words = list[str | Path]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in SAME} for line in lines]


def state(run_dir: Path) -> tuple[str, int | None, int]:
    found = json.loads((run_dir / "state.json").read_text())
    return found["status"], found["exit_code"], found["step"]


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*.pt"))


def saved(run_dir: Path, step: int) -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / f"step_{step:08d}.pt", weights_only=True)


def assert_same_run(run_dir: Path, whole: Path) -> None:
    """The same lines, weights and moments, bit for bit."""
    assert metrics(run_dir) == metrics(whole)
    ours, theirs = saved(run_dir, STEPS), saved(whole, STEPS)
    assert all(torch.equal(ours["model"][name], value) for name, value in theirs["model"].items())
    for i, moments in theirs["optimizer"]["state"].items():
        assert all(torch.equal(ours["optimizer"]["state"][i][name], value) for name, value in moments.items())


@pytest.fixture
def command(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> Callable[..., Words]:
    """The words of a run in tmp_path/run that is saved after every second step."""

    def words(*more: str, root: Path = tiny_set) -> Words:
        return ["pretrain", "--config", tiny_config, "--data.root", root, "--run_dir", tmp_path / "run",
                "--log.every_steps", "2", "--checkpoint.every_steps", "2", *more]  # fmt: skip

    return words


class Whole(NamedTuple):
    folder: Path
    seconds: float  # from the start of its process to the end


@pytest.fixture(scope="module")
def whole_run(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.yaml").write_text(TINY)
    words = ["pretrain", "--config", folder / "tiny.yaml", "--data.root", tiny_set, "--run_dir", folder / "run"]
    assert finish(start([*words[:-1], folder / "first", "--max_steps", "1"], folder)) == [0]  # starts the fork server
    began = time.monotonic()
    assert finish(start([*words, "--log.every_steps", "2"], folder)) == [0]
    return Whole(folder / "run", time.monotonic() - began)


def finish(processes: list[Started], timeout: float = 60.0) -> list[int]:
    """Exit codes."""
    return [process.wait(timeout) for process in processes]


# --- killed ---


def test_killed_at_random_moments(command: Callable[..., Words], whole_run: Whole, tmp_path: Path) -> None:
    """From the start of a process to its end, also inside a save; every fifth start is left alone for longer."""
    rng, kills = random.Random(0), 0
    while True:
        (process,) = start(command("--checkpoint.every_steps", "1"), tmp_path)
        patience = rng.uniform(0, whole_run.seconds) * (3 if kills % 5 == 4 else 1)
        try:
            assert process.wait(patience) == 0, process.output()
        except TimeoutError:  # and killed it
            kills += 1
            continue
        break
    assert kills > 0
    assert_same_run(tmp_path / "run", whole_run.folder)


@pytest.mark.parametrize("place", ["writing", "fsync", "rename", "renamed"])
def test_killed_inside_a_save(place: str, command: Callable[..., Words], whole_run: Whole, tmp_path: Path) -> None:
    """The second save. What it left half done is not taken for a checkpoint, and goes."""
    assert finish(start(command(), tmp_path, Faults(kill_in_save=(1, place)))) == [-signal.SIGKILL]
    assert saved_steps(tmp_path / "run") == ([2, 4] if place == "renamed" else [2])
    (process,) = start(command(), tmp_path)
    assert process.wait() == 0, process.output()
    assert f"going on after step {4 if place == 'renamed' else 2}" in process.output()
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert_same_run(tmp_path / "run", whole_run.folder)
