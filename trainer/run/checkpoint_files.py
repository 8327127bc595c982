"""File names of a run's checkpoints. Imports no torch, so that commands that only inspect a run start quickly."""

from __future__ import annotations

import re
from pathlib import Path

# Zeros in front keep the alphabetical order that of the steps, up to 99,999,999 steps.
_NAME = re.compile(r"step_(\d{8,})\.pt")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step_{step:08d}.pt"


def step_of(path: Path) -> int | None:
    """Return the step in the file name of a checkpoint; None if the file has another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """List all checkpoints in a folder as (step, path), in the order of their steps. A missing folder holds none."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        step = step_of(path)
        if step is not None and not path.is_dir():
            found.append((step, path))
    return sorted(found)


def newest_step(run_dir: Path) -> int:
    """Return the step of a run's newest checkpoint; 0 if it has none."""
    found = list_checkpoints(run_dir / "checkpoints")
    return found[-1][0] if found else 0
