"""Where a run's checkpoints are stored. Needs no torch, so that a run can be inspected quickly."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step_(\d{8,})\.pt")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step_{step:08d}.pt"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint; None for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """List all checkpoints as (step, file), in the order of their steps."""
    found = ((step_of(path), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((step, path) for step, path in found if step is not None and not path.is_dir())


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    found = list_checkpoints(run_dir / "checkpoints")
    return found[-1][0] if found else 0
