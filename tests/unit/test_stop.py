"""wmse stop of runs that no process runs. tests/integration/test_cluster.py and tests/slurm test running ones."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.cluster.stop import stop_run
from trainer.errors import InputError
from trainer.run.state import stop_file

Slurm = Callable[[str], None]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Return a function that sets the state of all SLURM jobs. scancel writes its arguments to tmp_path/cancelled."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    def program(name: str, line: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)

    program("scancel", f"echo $@ >> {tmp_path}/cancelled")
    program("sacct", "true")

    def set_state(state: str) -> None:
        program("squeue", f"echo '12_3|{state}|N/A|None'")

    return set_state


def write_run(run_dir: Path, status: str, *, silent_seconds: float = 0, **state: Any) -> None:
    """Write the folder of a run whose last heartbeat is `silent_seconds` old."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "launch.json").write_text(json.dumps({"job_id": "12_3"}))
    content = {"status": status, "step": 5, "heartbeat": time.time() - silent_seconds, **state}
    (run_dir / "state.json").write_text(json.dumps(content))


@pytest.mark.parametrize("status", ["queued", "preempted", "running"])  # "running" remains after the loss of a node
def test_a_run_that_waits_in_the_queue_is_cancelled(status: str, slurm: Slurm, tmp_path: Path) -> None:
    slurm("PENDING")
    write_run(tmp_path / "run", status, silent_seconds=9000, total_steps=9)
    assert "job 12_3 was still queued and is now cancelled" in stop_run(tmp_path / "run", 5)
    assert (tmp_path / "cancelled").read_text() == "--state=PENDING 12_3\n"
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["status"], state["exit_code"], state["step"]) == ("stopped", 0, 5)


def test_a_running_job_is_not_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    slurm("RUNNING")
    write_run(tmp_path / "run", "running")
    with pytest.raises(
        InputError, match=r"asked to stop, but is still running after 0 s.*`scancel 12_3` ends it without"
    ):
        stop_run(tmp_path / "run", 0.1)
    assert stop_file(tmp_path / "run").exists()
    assert not (tmp_path / "cancelled").exists()


@pytest.mark.parametrize(
    ("status", "job_state"), [("running", "NODE_FAIL"), ("running", "COMPLETED"), ("preempted", "CANCELLED")]
)
def test_a_run_that_was_killed_is_marked_as_stopped(status: str, job_state: str, slurm: Slurm, tmp_path: Path) -> None:
    slurm(job_state)
    write_run(tmp_path / "run", status, silent_seconds=600)
    assert "no process was running it any more; it is now marked as stopped after step 5" in stop_run(
        tmp_path / "run", 60
    )
    assert json.loads((tmp_path / "run" / "state.json").read_text())["status"] == "stopped"


def test_a_dead_process_of_this_machine_is_not_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "running", silent_seconds=25, job=None, host=socket.gethostname(), pid=2**22 + 1)
    assert "no process was running it" in stop_run(tmp_path / "run", 60)


@pytest.mark.parametrize("odd", ["pipe", "folder"])
def test_odd_files_are_refused_with_a_reason(odd: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir, "running", job=None)
    if odd == "pipe":
        (run_dir / "state.json").unlink()
        os.mkfifo(run_dir / "state.json")
    else:
        (run_dir / "stop").mkdir()
    with pytest.raises(InputError, match=r"state\.json is not a file|cannot write .*stop"):
        stop_run(run_dir, 5)


def test_a_requeued_run_that_lost_a_node_is_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    slurm("PENDING")
    write_run(tmp_path / "run", "failed")
    assert "is now cancelled" in stop_run(tmp_path / "run", 5)
    slurm("FAILED")
    write_run(tmp_path / "run", "failed")
    assert "has already ended: failed" in stop_run(tmp_path / "run", 5)


def test_the_stop_file_names_the_job(slurm: Slurm, tmp_path: Path) -> None:
    slurm("RUNNING")
    write_run(tmp_path / "run", "queued", silent_seconds=600)  # the job runs, but still copies its data
    with pytest.raises(InputError, match="asked to stop"):
        stop_run(tmp_path / "run", 0.1)
    assert stop_file(tmp_path / "run").read_text() == "12_3"


def test_a_folder_without_a_run_is_refused_and_an_ended_run_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run folder"):
        stop_run(tmp_path, 1)
    write_run(tmp_path / "run", "done")
    assert "has already ended: done after step 5" in stop_run(tmp_path / "run", 1)
