"""What a run left in its folder, as tests compare it."""

import json
from pathlib import Path
from typing import Any

import torch

SAME = ("step", "epoch", "loss", "lr", "min_pivot", "effective_rank", "failed_steps")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in SAME} for line in lines]


def state(run_dir: Path) -> tuple[str, int | None, int]:
    found = json.loads((run_dir / "state.json").read_text())
    return found["status"], found["exit_code"], found["step"]


def checkpoint(run_dir: Path, step: int) -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / f"step_{step:08d}.pt", weights_only=True)
