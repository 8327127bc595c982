"""Snapshot of the code and the settings, so that later edits do not change a job that waits in the queue."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import trainer
from trainer.config.loading import save_config
from trainer.config.schema import Config
from trainer.errors import InputError

_SOURCE = Path(trainer.__file__).parents[1]
PACKAGES = (_SOURCE / "trainer", _SOURCE / "kernels")


def new_code_folder(folder: Path) -> Path:
    """Return a path below `folder` that is named after the current time. Does not create it."""
    return folder / time.strftime("%Y%m%d-%H%M%S")


def take_snapshot(code: Path) -> None:
    """Copy the program into the folder `code`. Raises InputError if a file cannot be written."""
    ignore = shutil.ignore_patterns("__pycache__")
    try:
        for package in PACKAGES:
            shutil.copytree(package, code / package.name, ignore=ignore, dirs_exist_ok=True)
    except shutil.Error as error:  # holds (source, target, reason) of each file that failed
        _, target, reason = error.args[0][0]
        raise InputError(f"cannot copy the program to {target}: {reason}") from error


def save_settings(config: Config, folder: Path) -> Path:
    """Write the resolved settings of one run into `folder`. Returns the path of the file."""
    # Runs of several folders may have the same name, such as seed_0.
    name = "-".join(Path(config.run_dir).parts[-2:])
    path = folder / f"launch-{name}.yaml"
    save_config(config, path)
    return path
