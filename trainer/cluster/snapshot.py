"""A copy of the code and the settings, so that later edits do not change a job that waits in the queue."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import trainer
from trainer.config import Config
from trainer.config_load import save_config

_PACKAGES = ("trainer", "kernels")


def take_snapshot(folder: Path) -> Path:
    """Copy the program into a new folder below `folder`, named by the time; returns that folder."""
    source = Path(trainer.__file__).parents[1]
    code = folder / time.strftime("%Y%m%d-%H%M%S")
    code.mkdir(parents=True, exist_ok=True)
    for package in _PACKAGES:
        shutil.copytree(
            source / package, code / package, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
    return code


def save_settings(config: Config, folder: Path) -> Path:
    """Write the resolved settings of one run into `folder`; returns the file."""
    path = folder / f"launch-{Path(config.run_dir).name}.yaml"
    save_config(config, path)
    return path
