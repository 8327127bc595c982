"""wmse status: all kinds of run folders, with and without SLURM, the width of the table, and the keys of --json."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.conftest import ROOT
from trainer.cli import main
from trainer.cluster import status
from trainer.cluster.jobs import Job
from trainer.cluster.runs import number, whole
from trainer.cluster.status import describe_runs, print_status

FULL = {
    "status": "running", "exit_code": None, "step": 123456, "total_steps": 312000, "epoch": 158.27, "images_per_s": 5123.4,
    "loss": 0.53211, "checkpoint_step": 123000, "starts": 3, "idle_starts": 0, "world_size": 8, "host": "n1", "pid": 7,
    "job": None, "doing": "makes step 123457", "message": None, "time": "2026-01-01T00:00:00+0000",
}  # fmt: skip
KEYS = {
    "run", "status", "state", "exit_code", "step", "total_steps", "epoch", "images_per_s", "loss", "checkpoint_step",
    "restarts", "cost", "eta_seconds", "heartbeat_age_seconds", "job_id", "job_state", "job_reason", "job_start", "evaluation",
    "doing", "message", "problems",
}  # fmt: skip
Slurm = Callable[..., None]


def write_run(folder: Path, age: float = 1.0, **changed: Any) -> Path:
    """Write the folder of a run whose last heartbeat is `age` seconds old."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps(FULL | {"heartbeat": time.time() - age} | changed))
    (folder / "config.yaml").write_text("data: {images_per_step: 4096}\n")
    return folder


def write_result(run_dir: Path, name: str, **result: float) -> None:
    (run_dir / "eval").mkdir(exist_ok=True)
    (run_dir / "eval" / name).write_text(json.dumps(result))


def table(width: int, *run_dirs: Path) -> list[str]:
    """Return the lines of the table that a terminal of this width shows."""
    out = StringIO()
    print_status(describe_runs(run_dirs), Console(file=out, width=width))
    return out.getvalue().splitlines()


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Return a function that adds a job to those that SLURM knows."""
    known: dict[str, Job] = {}
    monkeypatch.setattr(status, "find_jobs", lambda ids: {i: known[i] for i in ids if i in known})

    def knows(job_id: str, state: str, reason: str = "", start: str = "") -> None:
        known[job_id] = Job(state, reason, start)

    return knows


def test_a_running_run_is_shown_with_job_and_evaluation(tmp_path: Path, slurm: Slurm) -> None:
    run = write_run(tmp_path / "a", job={"id": "52_0", "restarts": 2})
    slurm("52_0", "RUNNING", start="2026-01-01T00:00:00")
    write_result(run, "knn_99.json", top1=99.0)
    write_result(run, "linear_100000.json", top1=91.55, top5=99.0)
    write_result(run, "knn_100000.json", top1=89.69)
    write_result(run, "linear_random.json", top1=10.0)
    (row,) = describe_runs([run])
    assert set(row) == KEYS
    assert (row["state"], row["step"], row["checkpoint_step"], row["restarts"]) == ("running", 123456, 123000, 2)
    assert row["eta_seconds"] == pytest.approx((312000 - 123456) * 4096 / 5123.4, rel=1e-3)
    assert (row["job_id"], row["job_state"]) == ("52_0", "RUNNING")
    assert row["evaluation"] == {"step": 100000, "linear_top1": 91.55, "knn_top1": 89.69}
    text = "\n".join(table(300, run))
    for part in (
        "123456/312000",
        "158.27",
        "5123",
        "0.5321",
        "123000",
        "1 d 17 h",
        "52_0 RUNNING",
        "linear 91.55 k-nn 89.69",
    ):
        assert part in text


def test_a_run_that_was_never_started_is_queued(tmp_path: Path, slurm: Slurm) -> None:
    """Its folder holds only launch.json."""
    (tmp_path / "launch.json").write_text(json.dumps({"cluster": "slurm", "job_id": "77"}))
    (row,) = describe_runs([tmp_path])
    assert set(row) == KEYS
    assert (row["state"], row["job_id"], row["job_state"], row["step"]) == ("queued", "77", None, None)
    slurm("77", "PENDING", "Priority", "2026-01-02T00:00:00")
    assert "77 PENDING (Priority)" in "\n".join(table(300, tmp_path))
    assert describe_runs([tmp_path])[0]["job_start"] == "2026-01-02T00:00:00"


@pytest.mark.parametrize(
    ("job_state", "age", "shown"),
    [
        (None, 100, "running"),
        (None, 300, "lost (no heartbeat for 5 min)"),
        ("FAILED", 300, "lost (no heartbeat for 5 min)"),
        ("RUNNING", 300, "hangs? (no heartbeat for 5 min)"),
        ("PENDING", 300, "requeued"),
    ],
)
def test_a_missing_heartbeat_is_judged_by_the_job(
    job_state: str | None, age: float, shown: str, tmp_path: Path, slurm: Slurm
) -> None:
    if job_state:
        slurm("5", job_state)
    run = write_run(tmp_path, age=age, job={"id": "5", "restarts": 0})
    (row,) = describe_runs([run])
    assert (row["state"], row["status"]) == (shown, "running")
    assert (row["eta_seconds"] is not None) == (shown == "running")
    assert ("the run makes step 123457" in "\n".join(table(300, run))) == ("no heartbeat" in shown)


@pytest.mark.parametrize("final", ["done", "paused", "stopped", "failed", "preempted", "queued"])
def test_a_run_that_has_ended_is_not_lost(final: str, tmp_path: Path) -> None:
    assert describe_runs([write_run(tmp_path, age=1e6, status=final)])[0]["state"] == final


@pytest.mark.parametrize(
    ("status", "job_state", "shown"),
    [
        ("failed", "PENDING", "requeued"),  # the run lost a node
        ("failed", "FAILED", "failed"),
        ("queued", "FAILED", "queued (job FAILED)"),  # the job ended while it copied its data
        ("preempted", "CANCELLED", "preempted (job CANCELLED)"),
        ("preempted", "PENDING", "preempted"),
    ],
)
def test_slurm_overrides_the_state_of_the_run(
    status: str, job_state: str, shown: str, tmp_path: Path, slurm: Slurm
) -> None:
    slurm("5", job_state)
    (row,) = describe_runs([write_run(tmp_path, status=status, job={"id": "5", "restarts": 0})])
    assert (row["state"], row["status"]) == (shown, status)


def test_runs_of_older_versions_are_shown(tmp_path: Path) -> None:
    old = {"status": "running", "exit_code": None, "step": 4, "starts": 1, "time": "2025-01-01T00:00:00+0000"}
    (tmp_path / "state.json").write_text(json.dumps(old))
    (row,) = describe_runs([tmp_path])
    assert set(row) == KEYS
    assert (row["state"], row["step"], row["restarts"], row["problems"]) == ("running?", 4, 0, [])
    (tmp_path / "state.json").write_text(json.dumps({"status": "done"}))
    assert describe_runs([tmp_path])[0]["state"] == "done"
    assert "done" in "\n".join(table(80, tmp_path))


@pytest.mark.parametrize("content", ["", '{"status": "runn', "[]", "null", "[" * 100_000, b"\xff\xfe"])
def test_damaged_files_are_reported(content: str | bytes, tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    data = content if isinstance(content, bytes) else content.encode()
    (run / "state.json").write_bytes(data)
    (run / "eval").mkdir()
    (run / "eval" / "knn_5.json").write_bytes(data)
    text = "\n".join(table(300, run))
    assert "unreadable" in text
    assert "state.json is damaged" in text
    assert "knn_5.json is damaged" in text
    (run / "launch.json").write_text('{"job_id": "5"}')
    assert describe_runs([run])[0]["problems"] != []


def test_values_of_wrong_types_are_unknown(tmp_path: Path) -> None:
    wrong = {
        "step": "many",
        "total_steps": True,
        "epoch": [],
        "loss": float("nan"),
        "starts": None,
        "job": 5,
        "doing": 3,
    }
    run = write_run(tmp_path, **wrong)
    (run / "config.yaml").write_text("data: [1")
    (row,) = describe_runs([run])
    assert [row[key] for key in ("step", "total_steps", "epoch", "loss", "restarts", "job_id", "doing")] == [None] * 7
    json.dumps(row, allow_nan=False)
    assert "cannot read config.yaml" in "\n".join(table(200, run))


def test_texts_of_a_run_cannot_move_the_cursor_or_be_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path, message="[red]\x1b[2J", status="failed", job={"id": "\x1b[1A", "restarts": 0})
    text = "\n".join(table(300, run))
    assert "[red]\\x1b[2J" in text
    assert "\x1b" not in text


def test_a_read_only_run_folder_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    run.chmod(0o555)
    try:
        assert describe_runs([run])[0]["state"] == "running"
    finally:
        run.chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == before


def test_the_table_fits_80_columns_and_a_wide_terminal_shows_a_line_for_each_run(tmp_path: Path, slurm: Slurm) -> None:
    runs = [
        write_run(tmp_path / f"seed-{seed}", job={"id": f"1234567_{seed}", "restarts": 0}, age=300) for seed in range(3)
    ]
    for seed, run in enumerate(runs):
        slurm(f"1234567_{seed}", "PENDING", "JobArrayTaskLimit")
        write_result(run, "knn_123000.json", top1=89.69)
        write_result(run, "linear_123000.json", top1=91.55)
    narrow = table(80, *runs)
    assert max(map(len, narrow)) <= 80
    text = "\n".join(narrow)
    for part in (
        "seed-0",
        "seed-1",
        "seed-2",
        "1234567_2",
        "123456/312000",
        "linear 91.55",
        "k-nn 89.69",
        "158.27",
        "0.5321",
    ):
        assert part in text
    wide = [line for line in table(400, *runs) if "seed-" in line]
    assert len(wide) == 3
    assert all(str(run) in line and "k-nn 89.69" in line for run, line in zip(runs, wide, strict=True))


# --- the command ---


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the runs that `wmse status ARGUMENTS` shows."""
    assert main(["status", *arguments, "--json"]) == 0
    return [row["run"] for row in json.loads(capsys.readouterr().out)]


def test_folders_of_several_runs_are_expanded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks of an array are sorted by number. Without arguments all runs in ./runs are shown."""
    for name in ("runs/array/seed-10", "runs/array/seed-2", "runs/one", "elsewhere"):
        write_run(tmp_path / name)
    (tmp_path / "runs" / "array" / "slurm").mkdir()
    (tmp_path / "runs" / "array" / "launch.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert shown(["runs/array"], capsys) == ["runs/array/seed-2", "runs/array/seed-10"]
    assert shown(["elsewhere", "runs/one", "elsewhere"], capsys) == ["elsewhere", "runs/one"]
    assert shown([], capsys) == ["runs/array/seed-2", "runs/array/seed-10", "runs/one"]


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2
    assert "./runs holds no run" in capsys.readouterr().err
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["status", str(tmp_path / "gone")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_status_imports_neither_torch_nor_timm_nor_dali(tmp_path: Path) -> None:
    write_run(tmp_path)
    program = (
        "import sys; from trainer.cli import main; code = main(sys.argv[1:]); "
        "print(code, {'torch', 'timm', 'nvidia.dali', 'numpy', 'submitit'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, "status", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert done.stdout.splitlines()[-1] == "0 set()"


def test_an_integer_of_any_length_is_no_number() -> None:
    assert number({"step": 10**400}, "step") is None
    assert whole({"step": 7}, "step") == 7
