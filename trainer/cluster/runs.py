"""What can be read of runs from outside, while they are queued, running, over, or damaged. Imports no torch."""

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
LOST_SECONDS = 120.0  # without a heartbeat, which comes every 15 s: the run is dead or hangs
FINAL = ("done", "paused", "stopped", "failed")  # continues only if somebody starts it again
_MARKS = ("config.yaml", "state.json")  # files that make a folder a run's
_RESULT = re.compile(r"(linear|knn)_(\d+)\.json")


@dataclass(frozen=True)
class RunFiles:
    """The small files of a run folder. What is missing or damaged is an empty dict."""

    run_dir: Path
    state: dict[str, Any]
    launch: dict[str, Any]
    problems: tuple[str, ...]
    """Files that are there and can't be read, each with the reason."""

    @property
    def status(self) -> str | None:
        """As state.json has it; a run that was submitted and never started is queued."""
        return text(self.state, "status") or ("queued" if self.launch else None)

    @property
    def job_id(self) -> str | None:
        """The SLURM job that runs it, or last did."""
        if "job" not in self.state:  # it has not started yet
            return text(self.launch, "job_id")
        job = self.state["job"]
        return text(job, "id") if isinstance(job, dict) else None

    @property
    def silent_seconds(self) -> float:
        """Time since the last heartbeat; very long if there never was one."""
        return time.time() - (number(self.state, "heartbeat") or 0)

    @property
    def process_is_gone(self) -> bool:
        """Whether rank 0 ran on this machine and runs no more; False if it is another machine's.

        A fresh heartbeat proves that it lives, in a container whose processes are not visible here."""
        pid = whole(self.state, "pid")
        here = self.state.get("host") == socket.gethostname() and os.path.isdir("/proc/self")
        is_silent = self.silent_seconds > _BEAT_MISSED_SECONDS
        return bool(here and pid and is_silent and not os.path.isdir(f"/proc/{pid}"))

    def is_over(self, job: Job | None) -> bool:
        """Whether the run continues only if somebody starts it again. job: what SLURM says of its job.

        A run that failed because it lost a node is not over: SLURM requeues its job."""
        return self.status in FINAL and not (self.status == "failed" and job is not None and job.is_active)


def read_run(run_dir: Path) -> RunFiles:
    """Read state.json and launch.json. Raises nothing: other processes write them, and disks fail."""
    problems: list[str] = []
    state = read_json(run_dir / "state.json", problems)
    launch = read_json(run_dir / "launch.json", problems)
    return RunFiles(run_dir, state, launch, tuple(problems))


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """A small JSON object; empty where there is none. One that can't be read is empty too, and added to `problems`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a named pipe would be waited for
            problems.append(f"{path.name} is not a file")
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"can't read {path.name}: {error.strerror}")
        return {}
    except (ValueError, RecursionError):
        problems.append(f"{path.name} is damaged: it is no JSON")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} is damaged: it holds a {type(found).__name__}, not an object")
        return {}
    return found


def number(values: Mapping[str, Any], key: str) -> float | None:
    """A finite number under a key, None for anything else."""
    value = values.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def whole(values: Mapping[str, Any], key: str) -> int | None:
    """A number under a key as an int, None for anything else."""
    value = number(values, key)
    return None if value is None else int(value)


def text(values: Mapping[str, Any], key: str) -> str | None:
    """A text under a key, None for anything else and for an empty one."""
    value = values.get(key)
    return value if isinstance(value, str) and value else None


def images_per_step(run_dir: Path, problems: list[str]) -> float | None:
    """The global batch size of the run's config."""
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(f"can't read config.yaml: {' '.join(str(error).split())[:80]}")
        return None
    data = config.get("data") if isinstance(config, dict) else None
    return number(data, "images_per_step") if isinstance(data, dict) else None


def newest_evaluation(run_dir: Path, problems: list[str]) -> dict[str, Any] | None:
    """Top-1 of the newest step that eval/ has a result of: step, linear_top1, knn_top1; None where there is none."""
    found: dict[int, dict[str, Path]] = {}
    try:
        names = [path.name for path in (run_dir / "eval").iterdir()]
    except OSError:  # mostly that nothing was evaluated yet
        return None
    for match in filter(None, map(_RESULT.fullmatch, names)):
        found.setdefault(int(match[2]), {})[match[1]] = run_dir / "eval" / match[0]
    if not found:
        return None
    step = max(found)
    results = {measure: read_json(path, problems) for measure, path in found[step].items()}
    return {"step": step} | {f"{m}_top1": number(results.get(m, {}), "top1") for m in ("linear", "knn")}


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The run folders among `folders` and, for one that is none itself, right below it (the tasks of an array).

    Raises InputError for a folder that is missing or holds no run."""
    found: dict[Path, None] = {}
    for folder in folders:
        runs = _runs_in(folder)
        if not runs:
            what = "holds no run" if folder.is_dir() else "is no folder"
            raise InputError(f"{folder} {what}: give run folders, or a folder of run folders")
        found |= dict.fromkeys(runs)
    return list(found)


def find_all_runs(folder: Path) -> list[Path]:
    """Every run folder in `folder` and one level below. Raises InputError where there is none."""
    runs = [run for child in _folders(folder) for run in _runs_in(child)]
    if not runs:
        raise InputError(f"no runs in ./{folder}: give the run folders, or a folder of run folders")
    return runs


def _runs_in(folder: Path) -> list[Path]:
    if _has(folder, *_MARKS):
        return [folder]
    below = [child for child in _folders(folder) if _has(child, *_MARKS, "launch.json")]
    return below or ([folder] if _has(folder, "launch.json") else [])


def _has(folder: Path, *names: str) -> bool:
    return any(os.path.exists(folder / name) for name in names)  # unlike Path's it raises nothing


def _folders(folder: Path) -> list[Path]:
    """Sub-folders, with numbers in their names in the order of the numbers."""
    try:
        children = [child for child in folder.iterdir() if os.path.isdir(child)]
    except OSError:
        return []
    return sorted(children, key=lambda child: re.sub(r"\d+", lambda number: number[0].zfill(12), child.name))
