"""Reading run folders from outside, whether the run is queued, running, over or damaged. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.cluster.jobs import Job
from trainer.errors import InputError

_BEAT_MISSED_SECONDS = 20.0  # a heartbeat comes every 15 s
LOST_SECONDS = 120.0  # a run without a heartbeat for this long is dead or hangs
FINAL = ("done", "paused", "stopped", "failed")  # status of a run that continues only if somebody starts it again
_MARKS = ("config.yaml", "state.json")  # a folder with one of these files is a run folder
_RESULT = re.compile(r"(linear|knn)_(\d+)\.json")


@dataclass(frozen=True)
class RunFiles:
    """Contents of the small files in a run folder. A missing or damaged file is an empty dict."""

    run_dir: Path
    state: dict[str, Any]
    launch: dict[str, Any]
    problems: tuple[str, ...]
    """Files that exist but cannot be read, each with the reason."""

    @property
    def status(self) -> str | None:
        """Status from state.json; "queued" if the run was submitted but never started, None if it is unknown."""
        return text(self.state, "status") or ("queued" if self.launch else None)

    @property
    def job_id(self) -> str | None:
        """Id of the SLURM job that runs this run, or ran it last."""
        if "job" not in self.state:  # the run has not started yet
            return text(self.launch, "job_id")
        job = self.state["job"]
        return text(job, "id") if isinstance(job, dict) else None

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last heartbeat; very many if the run never wrote one."""
        return time.time() - (number(self.state, "heartbeat") or 0)

    @property
    def process_is_gone(self) -> bool:
        """Return whether rank 0 ran on this machine and has ended. False if it ran on another machine.

        After a recent heartbeat it counts as alive: in a container its process may not be visible here."""
        pid = whole(self.state, "pid")
        here = self.state.get("host") == socket.gethostname() and os.path.isdir("/proc/self")
        is_silent = self.silent_seconds > _BEAT_MISSED_SECONDS
        return bool(here and pid and is_silent and not os.path.isdir(f"/proc/{pid}"))

    def is_over(self, job: Job | None) -> bool:
        """Return whether the run continues only if somebody starts it again. job: state of its job in SLURM.

        A failed run whose job is active is not over: SLURM requeues the job of a run that has lost a node."""
        job_is_active = job is not None and job.is_active
        if self.status == "failed" and job_is_active:
            return False
        return self.status in FINAL


def read_run(run_dir: Path) -> RunFiles:
    """Read state.json and launch.json. Never raises: other processes write these files, and disks fail."""
    problems: list[str] = []
    state = read_json(run_dir / "state.json", problems)
    launch = read_json(run_dir / "launch.json", problems)
    return RunFiles(run_dir, state, launch, tuple(problems))


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a small JSON object; empty if the file is missing.

    An unreadable file gives an empty dict and a line in `problems`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would block
            problems.append(f"{path.name} is not a file")
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"cannot read {path.name}: {error.strerror}")
        return {}
    except (ValueError, RecursionError):
        problems.append(f"{path.name} is damaged: it is not JSON")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} is damaged: it holds a {type(found).__name__}, not an object")
        return {}
    return found


def number(values: Mapping[str, Any], key: str) -> float | None:
    """Return the value of a key if it is a finite number, else None."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a damaged file may hold an integer of any length
        return None


def whole(values: Mapping[str, Any], key: str) -> int | None:
    """Return the value of a key as an int if it is a finite number, else None."""
    value = number(values, key)
    return None if value is None else int(value)


def text(values: Mapping[str, Any], key: str) -> str | None:
    """Return the value of a key if it is a text that is not empty, else None."""
    value = values.get(key)
    return value if isinstance(value, str) and value else None


def images_per_step(run_dir: Path, problems: list[str]) -> float | None:
    """Return the global batch size in the run's config.yaml; None if it is unknown."""
    # Read this one setting without `load_config`, which would refuse the config of another version.
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:80]
        problems.append(f"cannot read config.yaml: {reason}")
        return None
    data = config.get("data") if isinstance(config, dict) else None
    return number(data, "images_per_step") if isinstance(data, dict) else None


def newest_evaluation(run_dir: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return the results of the newest evaluated step: step, linear_top1, knn_top1; None without results.

    The accuracies are top-1, in percent; None if that evaluation is missing."""
    folder = run_dir / "eval"
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:  # in most cases the folder does not exist yet
        return None
    # step -> evaluation -> file
    found: dict[int, dict[str, Path]] = {}
    for name in names:
        match = _RESULT.fullmatch(name)
        if match:
            found.setdefault(int(match[2]), {})[match[1]] = folder / name
    if not found:
        return None
    step = max(found)
    results = {kind: read_json(path, problems) for kind, path in found[step].items()}
    return {
        "step": step,
        "linear_top1": number(results.get("linear", {}), "top1"),
        "knn_top1": number(results.get("knn", {}), "top1"),
    }


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Return the run folders among `folders`. A folder that is not a run stands for the runs in it, or one level below.

    Raises InputError for a folder that is missing or holds no run."""
    found: dict[Path, None] = {}
    for folder in folders:
        # A sweep has its runs two levels deep: row, then seed.
        runs = _runs_in(folder) or _runs_below(folder)
        if not runs:
            problem = "holds no run" if folder.is_dir() else "is not a folder"
            raise InputError(f"{folder} {problem}: give run folders, or a folder of run folders")
        found |= dict.fromkeys(runs)
    return list(found)


def find_all_runs(folder: Path) -> list[Path]:
    """Return every run folder in `folder` and one level below. Raises InputError if it holds no run."""
    runs = _runs_below(folder)
    if not runs:
        raise InputError(f"./{folder} holds no run: give run folders, or a folder of run folders")
    return runs


def _runs_below(folder: Path) -> list[Path]:
    """Return the runs in the folders in `folder`, such as those of a sweep."""
    return [run for child in _folders(folder) for run in _runs_in(child)]


def _runs_in(folder: Path) -> list[Path]:
    if _has(folder, *_MARKS):
        return [folder]
    # A run that was submitted and has not started yet only has a launch.json; so may the folder of an array.
    below = [child for child in _folders(folder) if _has(child, *_MARKS, "launch.json")]
    if below:
        return below
    return [folder] if _has(folder, "launch.json") else []


def _has(folder: Path, *names: str) -> bool:
    return any(os.path.exists(folder / name) for name in names)  # Path.exists could raise


def _folders(folder: Path) -> list[Path]:
    """Return the sub-folders, sorted so that seed-2 comes before seed-10."""
    try:
        children = [child for child in folder.iterdir() if os.path.isdir(child)]
    except OSError:
        return []

    def padded(child: Path) -> str:
        return re.sub(r"\d+", lambda number: number[0].zfill(12), child.name)

    return sorted(children, key=padded)
