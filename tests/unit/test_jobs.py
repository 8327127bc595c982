"""Jobs as squeue and sacct report them. Scripts of these names print answers in the format of SLURM 22.05."""

import logging
import os
from pathlib import Path

import pytest

from trainer.cluster import jobs
from trainer.cluster.jobs import ACTIVE, Job, find_jobs


class Programs:
    """Scripts in place of SLURM's programs that record their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, *lines: str) -> None:
        path = self.folder / name
        path.write_text("\n".join(["#!/bin/sh", f'echo "$@" >> {self.folder}/{name}.calls', *lines]) + "\n")
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Put a SLURM that knows no job on the PATH, before a real one."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(jobs, "_said", set())
    programs = Programs(tmp_path)
    for name in ("squeue", "sacct"):
        programs.add(name)
    return programs


def test_squeue_reports_jobs_and_tasks_of_arrays(slurm: Programs) -> None:
    slurm.add(
        "squeue",
        "echo '52_0|RUNNING|2026-11-28T15:32:35|None'",
        "echo '52_1|PENDING|N/A|JobArrayTaskLimit'",
        "echo '54|PENDING|2026-11-28T16:00:00|Resources'",
        "echo '55|FAILED|2026-11-28T15:00:00|NonZeroExitCode'",
    )
    assert find_jobs(["52_0", "52_1", "54", "55"]) == {
        "52_0": Job("RUNNING", "", "2026-11-28T15:32:35"),
        "52_1": Job("PENDING", "JobArrayTaskLimit", ""),
        "54": Job("PENDING", "Resources", "2026-11-28T16:00:00"),
        "55": Job("FAILED", "", "2026-11-28T15:00:00"),
    }
    (call,) = slurm.calls("squeue")  # one call for all jobs
    assert "--jobs=52_0,52_1,54,55" in call
    # without these options finished jobs are missing, and all waiting tasks of an array share one line
    assert {"--states=all", "-r"} <= set(call.split())
    assert slurm.calls("sacct") == []


def test_sacct_is_asked_for_jobs_that_squeue_no_longer_knows(slurm: Programs) -> None:
    slurm.add("squeue", "echo '7|RUNNING|2026-11-28T15:32:35|None'")
    slurm.add("sacct", "echo '5|CANCELLED by 1000|2026-11-28T15:00:00'", "echo '6_[1%1]|PENDING|Unknown'")
    assert find_jobs(["5", "6_1", "7"]) == {
        "5": Job("CANCELLED", "", "2026-11-28T15:00:00"),
        "7": Job("RUNNING", "", "2026-11-28T15:32:35"),
    }
    assert "--jobs=5,6_1" in slurm.calls("sacct")[0]


def test_an_unknown_job_without_accounting_is_not_an_error(slurm: Programs, caplog: pytest.LogCaptureFixture) -> None:
    slurm.add("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2", "exit 1")
    slurm.add("sacct", "echo 'Slurm accounting storage is disabled' >&2", "exit 1")
    with caplog.at_level(logging.WARNING):
        assert find_jobs(["5"]) == {}
    assert caplog.text == ""


def test_a_controller_that_hangs_or_fails_is_logged_once(
    slurm: Programs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_SECONDS", 0.2)
    slurm.add("squeue", "exec sleep 5")
    slurm.add("sacct", "exit 1")
    unknown = {"5": Job("UNKNOWN", "", "")}  # the job may still run
    assert find_jobs(["5"]) == find_jobs(["5"]) == unknown
    assert unknown["5"].is_active
    assert caplog.text.count("squeue does not answer") == 1
    slurm.add("squeue", "echo 'Unable to contact slurm controller' >&2", "exit 1")
    assert find_jobs(["5"]) == find_jobs(["5"]) == unknown
    assert caplog.text.count("Unable to contact slurm controller") == 1


def test_without_slurm_no_job_is_found_and_nothing_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(jobs, "_said", set())
    assert find_jobs(["5", "6_0"]) == {}
    assert caplog.text == ""


def test_words_that_are_not_ids_are_never_passed_to_slurm(slurm: Programs) -> None:
    """Such a word could be an option of squeue, or make squeue refuse all ids."""
    slurm.add("squeue", "echo '7|RUNNING|N/A|None'")
    assert list(find_jobs(["7", "local", "--clusters=x", "7 8", ""])) == ["7"]
    assert slurm.calls("squeue")[0].endswith("--jobs=7")
    assert find_jobs([]) == {}
    assert len(slurm.calls("squeue")) == 1


def test_jobs_that_wait_run_or_return_are_active() -> None:
    assert {"PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"} <= ACTIVE
    assert not ACTIVE & {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
