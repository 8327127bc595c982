"""Which code this is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """What WMSE_COMMIT in the environment says, which whoever copies the program sets; else the commit of its checkout, with
    -changed behind it if tracked files differ from it; else None."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--exclude=*"]
    return os.environ.get("WMSE_COMMIT") or first_line([*command, "--dirty=-changed"])


def first_line(command: list[str]) -> str | None:
    """What a program says first; None where it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else None
