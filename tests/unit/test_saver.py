"""Checkpoints written in the background hold the values at the call, and a failed one does not end the run."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.test_checkpoint import files_up_to
from trainer.models.batch_norm import stop_counting_batches
from trainer.models.untrained_state import UntrainedState
from trainer.run import saver as saver_module
from trainer.run.checkpoint import load_checkpoint
from trainer.run.checkpoint_files import checkpoint_path, list_checkpoints
from trainer.run.saver import HostCopy, Saver


def content(step: int, value: float | None = None, numel: int = 3) -> dict[str, Any]:
    return {"step": step, "model": {"w": torch.full((numel,), float(step) if value is None else value)}}


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    """Return a saver that keeps two checkpoints in tmp_path."""
    made = Saver(tmp_path, keep_last=2)
    yield made
    made.close()


class Gate:
    """Gate at which the writing thread waits until the test opens it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        real = saver_module.save_checkpoint

        def held(*args: Any) -> Path:
            self.reached.set()
            assert self.opened.wait(30)
            return real(*args)

        monkeypatch.setattr(saver_module, "save_checkpoint", held)


def test_the_file_holds_the_values_at_the_call(saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop continues at once, and changes weights, momentum and settings in place while the file is being written."""
    gate = Gate(monkeypatch)
    weight = nn.Parameter(torch.ones(1000))
    state = {"step": 5, "model": {"w": weight}, "optimizer": {"groups": [{"lr": 0.5, "m": torch.zeros(7)}]}}
    saver.save(state)
    assert gate.reached.wait(30)
    assert saver.under_way()
    with torch.no_grad():
        weight.fill_(9)
    state["optimizer"]["groups"][0]["m"].fill_(9)
    state["optimizer"]["groups"][0]["lr"] = 9
    gate.opened.set()
    saver.wait()
    assert not saver.under_way()
    found = load_checkpoint(checkpoint_path(tmp_path, 5))
    assert torch.equal(found["model"]["w"], torch.ones(1000))
    assert not found["model"]["w"].requires_grad
    assert found["optimizer"]["groups"][0]["lr"] == 0.5
    assert torch.equal(found["optimizer"]["groups"][0]["m"], torch.zeros(7))


def test_consecutive_saves_keep_the_newest_checkpoints(saver: Saver, tmp_path: Path) -> None:
    """Each save waits for the previous one, because they share the memory of the copy."""
    for step in range(1, 8):
        saver.save(content(step, numel=300_000))
    saver.wait()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [6, 7]
    for step in (6, 7):
        assert load_checkpoint(checkpoint_path(tmp_path, step))["model"]["w"].unique().tolist() == [step]


def test_kept_steps_are_not_deleted(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep_last=1, kept_steps={10, 20})
    for step in (10, 13, 20, 23, 24):
        saver.save(content(step))
    saver.wait()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 20, 24]


def test_a_second_save_waits_for_the_first_and_logs_it(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(saver_module, "_SLOW_SECONDS", 0.1)
    monkeypatch.setattr(saver_module, "_STUCK_SECONDS", 0.2)
    saver.save(content(1))
    threading.Timer(0.3, gate.opened.set).start()
    began = time.perf_counter()
    saver.save(content(2))
    assert time.perf_counter() - began > 0.25
    assert checkpoint_path(tmp_path, 1).exists()
    assert "still waiting for a checkpoint" in caplog.text
    assert "training waited 0." in caplog.text


def test_a_short_wait_is_not_logged(saver: Saver, caplog: pytest.LogCaptureFixture) -> None:
    saver.save(content(1))
    saver.save(content(2))
    saver.wait()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_full_disk_is_reported_once_and_the_next_save_may_succeed(
    saver: Saver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver.save(content(1))
    saver.wait()
    with files_up_to(1_000_000):
        for step in (2, 3):
            saver.save(content(step, numel=1_000_000))
            saver.close()  # waits without raising
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.pt"]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    for text, step, row in zip(errors, (2, 3), (1, 2), strict=True):
        assert (
            f"step {step} was NOT saved: cannot write {checkpoint_path(tmp_path, step)}: File too large (3.8 MiB"
            in text
        )
        assert f"{row} save(s) in a row failed; a restart continues from step_00000001.pt" in text
    assert saver.failed_in_a_row == 2
    error = saver.failure()
    assert isinstance(error, OSError)
    assert "too large" in str(error)
    assert saver.failure() is None
    saver.save(content(4, numel=1_000_000))
    saver.wait()
    assert saver.failed_in_a_row == 0
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 4]


def test_wait_raises_if_the_last_checkpoint_is_not_on_the_disk(saver: Saver) -> None:
    """Also if `failure` has returned the error: a run asks after each step and again at the end."""
    with files_up_to(100):
        saver.save(content(2))
        with pytest.raises(OSError, match="too large"):
            saver.wait()
        assert saver.failure() is None
        saver.save(content(3))
        saver.close()
    assert saver.failure() is not None
    with pytest.raises(OSError, match="too large"):
        saver.wait()
    saver.save(content(4))
    saver.wait()


def test_a_missing_folder_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    saver = Saver(run_dir / "checkpoints", 2)
    saver.save(content(1))
    saver.wait()
    shutil.rmtree(run_dir)
    saver.save(content(2))
    with pytest.raises(FileNotFoundError):
        saver.wait()
    assert "NOT saved" in caplog.text
    assert "the run has no checkpoint to continue from" in caplog.text


def test_a_bug_in_the_thread_is_raised_by_the_next_call(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(saver_module, "save_checkpoint", fault)
    later: list[Callable[[], object]] = [saver.wait, saver.close, lambda: saver.save(content(2))]
    for method in later:
        saver.save(content(1))
        with pytest.raises(ZeroDivisionError, match="ours"):
            method()
    saver.save(content(1))
    while saver.under_way():
        time.sleep(0.001)
    with pytest.raises(ZeroDivisionError, match="ours"):
        saver.failure()


def test_content_that_cannot_be_saved_is_refused_at_the_call(saver: Saver) -> None:
    with pytest.raises(TypeError, match=r"not a Path|not a PosixPath"):
        saver.save({"step": 1, "model": {}, "config": {"root": Path("x")}})


def test_each_tensor_has_a_separate_storage(saver: Saver, tmp_path: Path) -> None:
    """In a run the statistics of all BatchNorms are views of one tensor."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    )
    stop_counting_batches(model)
    UntrainedState(model)
    saver.save({"step": 1, "model": model.state_dict()})
    saver.wait()
    state = load_checkpoint(checkpoint_path(tmp_path, 1))["model"]
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state) == 10
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values())
    assert state["0.weight"].is_contiguous(memory_format=torch.channels_last)
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_host_memory_is_reused_if_it_fits() -> None:
    copy = HostCopy()
    first, _ = copy.take({"a": torch.zeros(3), "b": torch.zeros(3)})
    second, events = copy.take({"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int32), "c": [torch.ones(2)]})
    assert second["a"] is first["a"]
    assert second["a"].tolist() == [1, 1, 1]
    assert second["b"].dtype == torch.int32
    assert second["c"][0].tolist() == [1, 1]
    assert events == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_host_does_not_wait_for_the_copy(saver: Saver, tmp_path: Path) -> None:
    weights = [torch.full((1000, 1000), float(i), device="cuda") for i in range(8)]
    saver.save({"step": 1, "model": {str(i): w for i, w in enumerate(weights)}})  # allocates the pinned memory
    saver.wait()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)  # the device is busy for a fraction of a second
        began = time.perf_counter()
        saver.save({"step": 2, "model": {str(i): w for i, w in enumerate(weights)}})
        for w in weights:
            w.add_(100)  # queued behind the copies
        held = time.perf_counter() - began
    finally:
        torch.cuda.set_sync_debug_mode("default")
    began = time.perf_counter()
    saver.wait()
    assert held < time.perf_counter() - began
    state = load_checkpoint(checkpoint_path(tmp_path, 2))["model"]
    assert [state[str(i)].unique().tolist() for i in range(8)] == [[i] for i in range(8)]
