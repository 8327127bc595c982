"""`wmse status`: where runs stand, as one table or as JSON. Reads their folders and asks SLURM; imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from trainer.cluster import runs
from trainer.cluster.jobs import Job, find_jobs
from trainer.cluster.runs import RunFiles, read_run
from trainer.data.printable import printable

_PATH_WIDTH = 14  # of a run's folder, and of its name, in a narrow terminal
_UNLIMITED = 10_000  # columns of a terminal
Row = dict[str, Any]

# In a narrow terminal the columns of a group stand one below the other.
_GROUPS = (
    ("run",),
    ("state", "ETA"),
    ("step", "epoch"),
    ("images/s", "loss"),
    ("saved", "restarts"),
    ("SLURM",),
    ("evaluation",),
)


def show_status(folders: Sequence[Path], *, as_json: bool) -> None:
    """Print the state of runs on stdout. folders: runs, or folders of runs; none: all in ./runs."""
    found = runs.find_runs(folders) if folders else runs.find_all_runs(Path("runs"))
    rows = describe_runs(found)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_status(rows, Console())


def describe_runs(run_dirs: Sequence[Path]) -> list[Row]:
    """One dict a run, always with the same keys; None stands for what is not known."""
    files = [read_run(run_dir) for run_dir in run_dirs]
    jobs = find_jobs(job_id for job_id in (f.job_id for f in files) if job_id)
    now = time.time()
    return [_describe(f, jobs.get(f.job_id or ""), now) for f in files]


def _describe(files: RunFiles, job: Job | None, now: float) -> Row:
    state, problems = files.state, list(files.problems)
    beat = runs.number(state, "heartbeat")
    age = None if beat is None else max(now - beat, 0.0)
    starts = runs.whole(state, "starts")
    shown = _state(files, age, job)
    return {
        "run": str(files.run_dir),
        "status": files.status,
        "state": shown,
        "exit_code": runs.whole(state, "exit_code"),
        "step": runs.whole(state, "step"),
        "total_steps": runs.whole(state, "total_steps"),
        "epoch": runs.number(state, "epoch"),
        "images_per_s": runs.number(state, "images_per_s"),
        "loss": runs.number(state, "loss"),
        "checkpoint_step": runs.whole(state, "checkpoint_step"),
        "restarts": None if starts is None else max(starts - 1, 0),
        "eta_seconds": _seconds_left(files, problems) if shown == "running" else None,
        "heartbeat_age_seconds": None if age is None else round(age, 1),
        "job_id": files.job_id,
        "job_state": job.state if job else None,
        "job_reason": (job.reason or None) if job else None,
        "job_start": (job.start or None) if job else None,
        "evaluation": runs.newest_evaluation(files.run_dir, problems),
        "doing": runs.text(state, "doing"),
        "message": runs.text(state, "message"),
        "problems": problems,
    }


def _state(files: RunFiles, age: float | None, job: Job | None) -> str:
    """The run's own word, unless its silence or SLURM says otherwise."""
    status = files.status
    if status is None:
        return "unreadable" if files.problems else "unknown"
    if status == "failed" and job and job.state == "PENDING":
        return "requeued"
    if status in ("queued", "preempted") and job and not job.is_active:
        return f"{status} (job {job.state})"
    if status not in ("starting", "running"):
        return status
    if age is None:
        return f"{status}?"  # a version without heartbeats
    if age <= runs.LOST_SECONDS and not files.process_is_gone:
        return status
    silent = f"(no heartbeat for {age / 60:.0f} min)"
    if job is None or not job.is_active:
        return f"lost {silent}"
    # a dead node writes no last word: its job waits in the queue again while state.json still says running
    return "requeued" if job.state != "RUNNING" else f"hangs? {silent}"


def _seconds_left(files: RunFiles, problems: list[str]) -> float | None:
    step, total = runs.number(files.state, "step"), runs.number(files.state, "total_steps")
    rate, images = runs.number(files.state, "images_per_s"), runs.images_per_step(files.run_dir, problems)
    if step is None or total is None or not rate or not images:
        return None
    return round(max(total - step, 0) * images / rate, 1)


def print_status(rows: Sequence[Row], console: Console) -> None:
    """One line a run if the terminal is wide enough, else several; below the table what needs a sentence."""
    cells = [_cells(row) for row in rows]
    table = _table(cells, [(name,) for group in _GROUPS for name in group], " ")
    if Measurement.get(console, console.options.update(width=_UNLIMITED), table).maximum > console.width:
        for cell in cells:
            cell["run"] = _in_lines(cell["run"][0])
        table = _table(cells, _GROUPS, "\n")
    console.print(table)
    for row in rows:
        for note in _notes(row):
            console.print(Text(printable(f"{row['run']}: {note}")), soft_wrap=True)


def _cells(row: Row) -> dict[str, list[str]]:
    """Column: its parts, which stand side by side or one below the other."""
    step = "-" if row["step"] is None else str(row["step"])
    found = row["evaluation"]
    reason = f"({row['job_reason']})" if row["job_reason"] else None
    return {
        "run": [row["run"]],
        "state": [row["state"]],
        "ETA": [_duration(row["eta_seconds"])],
        "step": [step if row["total_steps"] is None else f"{step}/{row['total_steps']}"],
        "epoch": [_format(row["epoch"], ".2f")],
        "images/s": [_format(row["images_per_s"], ".0f")],
        "loss": [_format(row["loss"], ".4f")],
        "saved": [_format(row["checkpoint_step"], "d")],
        "restarts": [_format(row["restarts"], "d")],
        "SLURM": [part for part in (row["job_id"], row["job_state"], reason) if part] or ["-"],
        "evaluation": ["-"]
        if found is None
        else [
            f"step {found['step']}",
            f"linear {_format(found['linear_top1'], '.2f')}",
            f"k-nn {_format(found['knn_top1'], '.2f')}",
        ],
    }


def _table(cells: Sequence[dict[str, list[str]]], groups: Sequence[tuple[str, ...]], between: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0) if between == "\n" else (0, 1))
    for group in groups:
        wraps = group[0] in ("run", "state", "SLURM")
        table.add_column(Text("\n".join(group)), overflow="fold", no_wrap=not wraps)
    for cell in cells:
        parts = [[printable(part) for name in group for part in cell[name]] for group in groups]
        table.add_row(*(Text(between.join(part)) for part in parts))
        if between == "\n":
            table.add_section()
    return table


def _notes(row: Row) -> list[str]:
    silent = "no heartbeat" in row["state"]
    doing = [f"its last word: the run {row['doing']}"] if silent and row["doing"] else []
    message = [row["message"]] if row["message"] else []
    return [*row["problems"], *doing, *message]


def _in_lines(run: str) -> list[str]:
    """Folder and name of a run one below the other, each cut to its end: that is what tells runs apart."""
    folder, slash, name = run.rpartition("/")
    lines = [folder + slash, name] if slash else [name]
    return [line if len(line) <= _PATH_WIDTH else "…" + line[1 - _PATH_WIDTH :] for line in lines]


def _format(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    days, hours = divmod(minutes // 60, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60:02d} min" if hours else f"{minutes} min"
