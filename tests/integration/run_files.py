"""Functions that read the files of a run folder and compare two runs."""

import json
from pathlib import Path
from typing import Any

import torch

SAME = ("step", "epoch", "loss", "lr", "min_pivot", "effective_rank", "skipped_steps")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without times and other values that differ between equal runs."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in SAME} for line in lines]


def state(run_dir: Path) -> tuple[str, int | None, int]:
    """Return status, exit code and step of state.json."""
    found = json.loads((run_dir / "state.json").read_text())
    return found["status"], found["exit_code"], found["step"]


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints, in ascending order."""
    return sorted(int(path.stem.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*.pt"))


def checkpoint(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the content of the checkpoint of a step."""
    return torch.load(run_dir / "checkpoints" / f"step_{step:08d}.pt", weights_only=True)


def assert_same_run(run_dir: Path, whole: Path) -> None:
    """Check that two runs have the same metrics, weights and optimizer state, bit for bit."""
    assert metrics(run_dir) == metrics(whole)
    last = metrics(whole)[-1]["step"]
    ours, theirs = checkpoint(run_dir, last), checkpoint(whole, last)
    assert all(torch.equal(ours["model"][name], value) for name, value in theirs["model"].items())
    for i, moments in theirs["optimizer"]["state"].items():
        assert all(torch.equal(ours["optimizer"]["state"][i][name], value) for name, value in moments.items())
