"""Commit of the running code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def git_commit() -> str | None:
    """Return the commit of the running code; None if it is unknown.

    A copy of the code has no git history, so whoever makes the copy sets WMSE_COMMIT. In a checkout, "-changed" follows the
    commit if tracked files differ from it."""
    commit = os.environ.get("WMSE_COMMIT")
    if commit:
        return commit
    folder = str(Path(__file__).parent)
    options = ["--always", "--abbrev=12", "--exclude=*", "--dirty=-changed"]
    return first_line(["git", "-C", folder, "describe", *options])


def first_line(command: list[str]) -> str | None:
    """Run a program and return the first line of its output; None if it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    if done.returncode != 0:
        return None
    return done.stdout.partition("\n")[0].strip()
