"""`wmse status`: the state of runs as a table or as JSON, from run folders and SLURM. Imports no torch."""

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
from trainer.run.cost import describe_hours

_PATH_WIDTH = 14  # width of a run's folder, and of its name, in a narrow terminal
_UNLIMITED = 10_000  # terminal columns that fit any table
Row = dict[str, Any]

# In a narrow terminal the cells of a group are stacked.
_GROUPS = (
    ("run",),
    ("state", "ETA"),
    ("step", "epoch"),
    ("images/s", "loss"),
    ("saved", "restarts"),
    ("cost",),
    ("SLURM",),
    ("evaluation",),
)


def show_status(folders: Sequence[Path], *, as_json: bool) -> None:
    """Print the state of runs. folders: run folders, or folders of run folders; empty: all runs in ./runs."""
    found = runs.find_runs(folders) if folders else runs.find_all_runs(Path("runs"))
    rows = describe_runs(found)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_status(rows, Console())


def describe_runs(run_dirs: Sequence[Path]) -> list[Row]:
    """Return one dict for each run, always with the same keys. An unknown value is None."""
    all_files = [read_run(run_dir) for run_dir in run_dirs]
    # Ask SLURM once for the jobs of all runs.
    job_ids = [files.job_id for files in all_files if files.job_id]
    jobs = find_jobs(job_ids)
    now = time.time()
    rows = []
    for files in all_files:
        job = jobs.get(files.job_id or "")
        rows.append(_describe(files, job, now))
    return rows


def _describe(files: RunFiles, job: Job | None, now: float) -> Row:
    state = files.state
    problems = list(files.problems)
    # The clock of another node may be ahead of this one.
    heartbeat = runs.number(state, "heartbeat")
    age = None if heartbeat is None else max(now - heartbeat, 0.0)
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
        "cost": state["cost"] if isinstance(state.get("cost"), dict) else None,
        "evaluation": runs.newest_evaluation(files.run_dir, problems),
        "doing": runs.text(state, "doing"),
        "message": runs.text(state, "message"),
        "problems": problems,
    }


def _state(files: RunFiles, age: float | None, job: Job | None) -> str:
    """Return the state to show: that of state.json, unless a missing heartbeat or SLURM contradicts it.

    age: seconds since the last heartbeat."""
    # First the cases without a heartbeat to judge by, then those of a run that says it is active.
    status = files.status
    if status is None:
        return "unreadable" if files.problems else "unknown"
    # The queue may hold the next start of a run that failed.
    if status == "failed" and job and job.state == "PENDING":
        return "requeued"
    # SLURM has ended the job before the run could start or continue.
    if status in ("queued", "preempted") and job and not job.is_active:
        return f"{status} (job {job.state})"
    if status not in ("starting", "running"):
        return status
    if age is None:
        return f"{status}?"  # written by a version without heartbeats
    if age <= runs.LOST_SECONDS and not files.process_is_gone:
        return status
    # From here on, the run claims to be active but is silent.
    silent = f"(no heartbeat for {age / 60:.0f} min)"
    if job is None or not job.is_active:
        return f"lost {silent}"
    # When a node dies, state.json still says running while the job waits in the queue again.
    return "requeued" if job.state != "RUNNING" else f"hangs? {silent}"


def _seconds_left(files: RunFiles, problems: list[str]) -> float | None:
    """Estimate the rest of the training time from the speed of the last logged line."""
    step = runs.number(files.state, "step")
    total_steps = runs.number(files.state, "total_steps")
    images_per_s = runs.number(files.state, "images_per_s")
    images_per_step = runs.images_per_step(files.run_dir, problems)
    if step is None or total_steps is None or not images_per_s or not images_per_step:
        return None
    steps_left = max(total_steps - step, 0)
    return round(steps_left * images_per_step / images_per_s, 1)


def print_status(rows: Sequence[Row], console: Console) -> None:
    """Print a table with one line for each run, or several lines in a narrow terminal. Messages follow below the table."""
    cells = [_cells(row) for row in rows]
    # Outside SLURM nothing is requeued, and many runs have no evaluation yet.
    empty = {
        name for name in ("restarts", "SLURM", "evaluation") if all(cell[name] in (["-"], ["0"]) for cell in cells)
    }
    shown = [tuple(name for name in group if name not in empty) for group in _GROUPS]
    groups = [group for group in shown if group]
    single_columns = [(name,) for group in groups for name in group]
    table = _table(cells, single_columns, " ")
    # Measure the table in an unlimited terminal. If it is too wide for this one, stack the cells of each group.
    unlimited = console.options.update(width=_UNLIMITED)
    if Measurement.get(console, unlimited, table).maximum > console.width:
        for cell in cells:
            cell["run"] = _in_lines(cell["run"][0])
        table = _table(cells, groups, "\n")
    console.print(table)
    for row in rows:
        for note in _notes(row):
            console.print(Text(printable(f"{row['run']}: {note}")), soft_wrap=True)


def _cells(row: Row) -> dict[str, list[str]]:
    """Return the texts of each column by its name. A cell with several texts shows them side by side or stacked."""
    # The end of the run is only known after its start.
    step = _format(row["step"], "d")
    if row["total_steps"] is not None:
        step = f"{step}/{row['total_steps']}"
    reason = f"({row['job_reason']})" if row["job_reason"] else None
    # Outside SLURM there is nothing to show in these columns.
    job = [part for part in (row["job_id"], row["job_state"], reason) if part]
    evaluation = ["-"]
    found = row["evaluation"]
    if found:
        linear = _format(found["linear_top1"], ".2f")
        knn = _format(found["knn_top1"], ".2f")
        evaluation = [f"step {found['step']}", f"linear {linear}", f"k-nn {knn}"]
    return {
        "run": [row["run"]],
        "state": [row["state"]],
        "ETA": [_duration(row["eta_seconds"])],
        "step": [step],
        "epoch": [_format(row["epoch"], ".2f")],
        "images/s": [_format(row["images_per_s"], ".0f")],
        "loss": [_format(row["loss"], ".4f")],
        "saved": [_format(row["checkpoint_step"], "d")],
        "restarts": [_format(row["restarts"], "d")],
        # Two units of time stand below each other in a narrow terminal, like all texts of a cell.
        "cost": describe_hours(row["cost"]).split(" and ") if row["cost"] else ["-"],
        "SLURM": job or ["-"],
        "evaluation": evaluation,
    }


def _table(cells: Sequence[dict[str, list[str]]], groups: Sequence[tuple[str, ...]], separator: str) -> Table:
    """Build the table. groups: names of the columns that share one column of the table. separator: between their texts."""
    stacked = separator == "\n"
    # Stacked cells are separated by lines instead of spaces.
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0) if stacked else (0, 1))
    for group in groups:
        wraps = group[0] in ("run", "state", "SLURM")
        table.add_column(Text("\n".join(group)), overflow="fold", no_wrap=not wraps)
    for cell in cells:
        row = []
        for group in groups:
            # Texts from files may hold control characters.
            parts = [printable(part) for name in group for part in cell[name]]
            row.append(Text(separator.join(parts)))
        table.add_row(*row)
        if stacked:
            table.add_section()
    return table


def _notes(row: Row) -> list[str]:
    """Return the messages about a run that are too long for the table."""
    notes = list(row["problems"])
    silent = "no heartbeat" in row["state"]
    # What a silent run was doing last may explain why it hangs.
    if silent and row["doing"]:
        notes.append(f"its last report: the run {row['doing']}")
    if row["message"]:
        notes.append(row["message"])
    return notes


def _in_lines(run: str) -> list[str]:
    """Return folder and name of a run as two lines. Long ones keep their ends, because the ends tell runs apart."""
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
    # Show days and hours, or hours and minutes, or minutes alone.
    whole_hours, minutes_of_hour = divmod(minutes, 60)
    days, hours = divmod(whole_hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes_of_hour:02d} min" if hours else f"{minutes} min"
