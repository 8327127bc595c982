"""state.json: the status of a run that other programs read."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.distributed.ranks import Ranks
from trainer.errors import InputError, TrainingFailedError
from trainer.run import state as run_state
from trainer.run.folder import lock_run_folder
from trainer.run.signals import STOP, StopRequest
from trainer.run.state import RunState, mark_run, note_lost_rank_0, stop_file, wait_for_end

REQUEUED = Ranks(job_id="123", restarts=1)


def state_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "state.json").read_text())
    return found


def started(run_dir: Path, ranks: Ranks, *, checkpoint: int = 0, most: int = 3) -> RunState:
    """Return the state of a new start. checkpoint: step of a checkpoint to create; most: starts without a new one."""
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    if checkpoint:
        (run_dir / "checkpoints" / f"step_{checkpoint:08d}.pt").touch()
    state = RunState(run_dir, ranks)
    state.start(most)
    return state


def test_starts_are_counted_and_the_job_is_named(tmp_path: Path) -> None:
    assert [started(tmp_path, ranks).starts for ranks in (Ranks(), REQUEUED)] == [1, 2]
    found = state_of(tmp_path)
    assert (found["status"], found["exit_code"], found["job"]) == ("starting", None, {"id": "123", "restarts": 1})
    (tmp_path / "state.json").write_text("[garbage")
    assert started(tmp_path, Ranks()).starts == 1


def test_the_cost_of_all_starts_is_added_up(tmp_path: Path) -> None:
    started(tmp_path, Ranks())
    found = state_of(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps(found | {"cost": {"core_seconds": 1e6, "joules": 5.0}}))
    mark_run(tmp_path, "queued")
    started(tmp_path, Ranks())
    cost = state_of(tmp_path)["cost"]
    assert 1e6 < cost["core_seconds"] < 1e6 + 1e3
    assert cost["joules"] >= 5


def test_a_job_requeued_repeatedly_without_a_new_checkpoint_fails(tmp_path: Path) -> None:
    started(tmp_path, Ranks(job_id="123"), most=2)
    started(tmp_path, REQUEUED, most=2)
    with pytest.raises(
        TrainingFailedError, match=r"2 starts in a row produced no checkpoint beyond step 0.*not requeued"
    ):
        started(tmp_path, REQUEUED, most=2)
    # a newly submitted job starts counting again
    started(tmp_path, Ranks(job_id="124"), most=2)
    started(tmp_path, REQUEUED, most=2)


def test_a_new_checkpoint_counts_as_progress(tmp_path: Path) -> None:
    started(tmp_path, Ranks(job_id="123"), most=1)
    for step in (5, 10, 15):
        started(tmp_path, REQUEUED, checkpoint=step, most=1)
    assert state_of(tmp_path)["first_step"] == 15


def test_only_the_first_end_of_a_run_is_written(tmp_path: Path) -> None:
    state = started(tmp_path, Ranks())
    state.ended("done", 0, step=9)
    state.preempted()
    state.failed(RuntimeError("too late"))
    found = state_of(tmp_path)
    assert (found["status"], found["exit_code"], found["step"]) == ("done", 0, 9)


def test_only_rank_0_writes(tmp_path: Path) -> None:
    state = RunState(tmp_path, Ranks(1, 2))
    state.note(step=3)
    state.ended("failed", 1)
    state.failed(RuntimeError("boom"))
    assert not (tmp_path / "state.json").exists()


def test_another_rank_writes_the_failure_if_rank_0_was_killed(tmp_path: Path) -> None:
    started(tmp_path, Ranks(0, 2), checkpoint=8).write(status="running", step=11)
    before = state_of(tmp_path)
    with lock_run_folder(tmp_path):  # rank 0 is alive and writes the failure itself
        note_lost_rank_0(tmp_path, RuntimeError("Connection reset"))
        assert state_of(tmp_path) == before
    note_lost_rank_0(tmp_path, RuntimeError("Connection reset\nby peer"))
    found = state_of(tmp_path)
    assert (found["status"], found["exit_code"], found["step"]) == ("failed", 1, 8)
    assert found["message"] == "rank 0 was lost: Connection reset"
    assert found["starts"] == before["starts"]


def test_another_rank_keeps_the_end_that_rank_0_wrote(tmp_path: Path) -> None:
    started(tmp_path, Ranks(0, 2)).ended("preempted", 75)
    before = state_of(tmp_path)
    note_lost_rank_0(tmp_path, RuntimeError("Connection reset"))
    assert state_of(tmp_path) == before


def test_an_error_before_locking_the_folder_does_not_change_the_state(tmp_path: Path) -> None:
    started(tmp_path, Ranks())
    before = state_of(tmp_path)
    RunState(tmp_path, Ranks()).failed(RuntimeError("in use"))
    assert state_of(tmp_path) == before


def test_each_heartbeat_writes_the_noted_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_state, "_LOOK_SECONDS", 0.02)
    state = started(tmp_path, Ranks())
    with state.heartbeat(StopRequest()):
        state.note(step=7, loss=1.5)
        first = state_of(tmp_path)["heartbeat"]
        end = time.monotonic() + 5
        while state_of(tmp_path)["heartbeat"] == first and time.monotonic() < end:
            time.sleep(0.02)
    found = state_of(tmp_path)
    assert (found["step"], found["loss"]) == (7, 1.5)
    assert 0 < found["cost"]["core_seconds"] <= state.cost.content()["core_seconds"]
    assert found["heartbeat"] > first


def test_wmse_stop_reaches_the_run_and_the_next_start_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "_LOOK_SECONDS", 0.02)
    state, stop = started(tmp_path, Ranks()), StopRequest()
    with state.heartbeat(stop):
        assert not stop.asked
        stop_file(tmp_path).touch()
        end = time.monotonic() + 5
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.02)
    assert stop.level == STOP
    started(tmp_path, Ranks())
    assert not stop_file(tmp_path).exists()


@pytest.mark.parametrize(("named", "kept"), [("123", True), ("122", False), ("", False)])
def test_a_job_obeys_a_stop_of_this_job_from_before_its_start(named: str, kept: bool, tmp_path: Path) -> None:
    """Such a job copied its data when `wmse stop` was called, or was requeued after the loss of a node."""
    (tmp_path / "checkpoints").mkdir()
    stop_file(tmp_path).write_text(named)
    started(tmp_path, REQUEUED)
    assert stop_file(tmp_path).exists() == kept


def test_a_hanging_write_does_not_block_other_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = started(tmp_path, Ranks())
    monkeypatch.setattr(run_state, "_LOCK_SECONDS", 0.1)
    release = threading.Event()
    monkeypatch.setattr(run_state, "write_text", lambda path, text: release.wait(10))
    thread = threading.Thread(target=state.write)
    thread.start()
    began = time.monotonic()
    state.preempted()
    assert time.monotonic() - began < 5
    release.set()
    thread.join()


def test_an_idle_rank_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(run_state, "_SILENT_SECONDS", 5.0)
    started(tmp_path, Ranks()).ended("failed", 1)  # an earlier start
    codes: list[int] = []
    idle = threading.Thread(target=lambda: codes.append(wait_for_end(tmp_path, StopRequest(), 60)), daemon=True)
    idle.start()
    time.sleep(0.2)
    assert codes == []
    started(tmp_path, Ranks()).ended("preempted", 75)
    idle.join(5)
    assert codes == [75]


def test_an_idle_rank_gives_up_without_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(run_state, "_SILENT_SECONDS", 0.1)
    assert wait_for_end(tmp_path, StopRequest(), 60) == 0


def test_a_queued_run_keeps_its_progress(tmp_path: Path) -> None:
    started(tmp_path, Ranks()).ended("preempted", 75, step=40, total_steps=100)
    mark_run(tmp_path, "queued")
    found = state_of(tmp_path)
    assert (found["status"], found["step"], found["total_steps"], found["starts"]) == ("queued", 40, 100, 1)
    assert found["exit_code"] is None
    assert "pid" not in found


@pytest.mark.parametrize(("status", "kept"), [("done", True), ("stopped", True), ("running", False)])
def test_wrong_settings_do_not_make_a_finished_run_fail(status: str, kept: bool, tmp_path: Path) -> None:
    before = {"status": status, "exit_code": 0 if kept else None, "step": 9, "starts": 1}
    (tmp_path / "state.json").write_text(json.dumps(before))
    state = RunState(tmp_path, Ranks())
    state.start(max_idle_restarts=3)
    state.failed(InputError("another learning rate"))
    found = json.loads((tmp_path / "state.json").read_text())
    assert (found == before) == kept
    assert (found["status"] == "failed") != kept
    # Any other failure counts.
    state = RunState(tmp_path, Ranks())
    state.start(max_idle_restarts=3)
    state.failed(RuntimeError("no more memory"))
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "failed"


def test_a_full_disk_does_not_hide_why_a_finished_run_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"status": "done", "exit_code": 0, "step": 9, "starts": 1}))
    state = RunState(tmp_path, Ranks())
    state.start(max_idle_restarts=3)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_state, "write_text", refuse)
    state.failed(InputError("another learning rate"))
    assert "cannot write" in caplog.text
