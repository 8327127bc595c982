"""The folder of a run: config.yaml, checkpoints/, metrics.jsonl, tensorboard/, eval/, quarantine.jsonl, state.json, log.txt."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from trainer.errors import InputError
from trainer.files import write_text

_FORMAT = "%(asctime)s %(levelname).1s %(message)s"


def open_run_folder(run_dir: str) -> Path:
    """The folder, made where it is missing. Raises InputError where it can't be."""
    if not run_dir:
        raise InputError("run_dir is not set: give --run_dir DIR, where checkpoints and logs of this run go")
    path = Path(run_dir)
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"can't make the run folder {path}: {error.strerror}") from error
    return path


class _CurrentStderr(logging.StreamHandler):
    """Writes to what sys.stderr is at the time: a progress bar puts itself in between, to stay below the lines."""

    stream = property(lambda self: sys.stderr, lambda self, _: None)


def start_logging(run_dir: Path | None, *, is_first: bool) -> None:
    """Plain lines on stderr and, on the first rank, appended to log.txt; other ranks report warnings only."""
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    handlers: list[logging.Handler] = [_CurrentStderr()]
    if run_dir is not None and is_first:
        handlers.append(logging.FileHandler(run_dir / "log.txt", encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
        root.addHandler(handler)
    root.setLevel(logging.INFO if is_first else logging.WARNING)


def write_state(run_dir: Path, status: str, exit_code: int | None, step: int) -> None:
    """state.json: what became of the run, for programs (torchrun flattens exit codes)."""
    state = {"status": status, "exit_code": exit_code, "step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_text(run_dir / "state.json", json.dumps(state) + "\n")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """One JSON object as a line at the end of a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
