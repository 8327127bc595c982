"""Signals, values that are not finite, and full disks in the middle of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults import Faults, start
from tests.integration.conftest import Arguments, UnbrokenRun
from tests.integration.run_files import assert_same_run, checkpoint, metrics, saved_steps, state
from tests.processes import Started, finish, wait_until

STEPS = 9


# --- signals ---


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_to_one_rank_stops_all_ranks_after_one_checkpoint(
    number: signal.Signals, two_ranks: Callable[..., list[Started]], command: Callable[..., Arguments], tmp_path: Path
) -> None:
    assert finish(two_ranks("--checkpoint.every_steps", "0", signal_at_step=(3, number))) == [75, 75]
    _, _, step = state(tmp_path / "run")
    assert state(tmp_path / "run") == ("preempted", 75, step)
    assert saved_steps(tmp_path / "run") == [step]
    assert 4 <= step <= 6
    assert finish(start(command(), tmp_path, ranks=2)) == [0, 0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [2, 4, 6, 8, 9]


def test_a_second_interrupt_ends_the_process_at_once(command: Callable[..., Arguments], tmp_path: Path) -> None:
    """The first interrupt cannot end the run, because its reads hang."""
    faults = Faults(bad_reads=tuple(range(48)), bad_read="hangs", bad_reads_after=60)
    (process,) = start(command("--log.stall_seconds", "0.5"), tmp_path, faults)
    wait_until(lambda: "no progress for" in process.output(), process)
    process.signal(signal.SIGINT)
    wait_until(lambda: "SIGINT" in process.output(), process)
    process.signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT  # 130 in a shell


# --- values that are not finite ---


@pytest.mark.parametrize(
    ("poison", "cause"),
    [
        ("embeddings", "rank 0: a slice of view 1 cannot be whitened"),
        ("loss", "rank 0: the loss is not finite"),
        ("gradient", "a gradient is not finite, though the loss is"),
    ],
)
def test_values_that_are_not_finite_skip_the_update(
    poison: str, cause: str, command: Callable[..., Arguments], tmp_path: Path
) -> None:
    """The updates of steps 3 and 4 are skipped and counted; the weights stay finite."""
    arguments = command("--log.every_steps", "3")
    (process,) = start(arguments, tmp_path, Faults(poison=poison, poison_steps=(3, 5)))
    assert process.wait() == 0, process.output()
    for number, step in enumerate((3, 4), 1):
        assert f"step {step}: {cause}; all ranks skipped the update ({number} in a row)" in process.output()
    assert [line["skipped_steps"] for line in metrics(tmp_path / "run")] == [0, 2, 0]
    assert all(0 < line["loss"] < 4 for line in metrics(tmp_path / "run"))
    model = checkpoint(tmp_path / "run", STEPS)["model"]
    assert all(value.isfinite().all() for value in model.values())
    assert all(
        moments["step"] == STEPS - 2 for moments in checkpoint(tmp_path / "run", STEPS)["optimizer"]["state"].values()
    )


def test_a_rank_whose_embeddings_are_not_finite_is_named_and_all_ranks_skip_the_update(
    two_ranks: Callable[..., list[Started]], tmp_path: Path
) -> None:
    slices = ("--model.embedding_size", "4", "--wmse.slice_size", "8", "--max_skipped_steps", "2")
    first, second = two_ranks(*slices, poison="embeddings", poison_steps=(3, 99))
    assert finish([first, second]) == [1, 1]
    reason = "the last in step 5: rank 1: a slice of view 1"
    assert f"the run skipped 3 updates in a row (max_skipped_steps is 2), {reason}" in first.output()
    assert "Try a smaller optimizer.learning_rate" in first.output()
    assert "Traceback" not in first.output() + second.output()
    assert state(tmp_path / "run") == ("failed", 1, 4)  # the run ends before it saves step 6
    assert all(value.isfinite().all() for value in checkpoint(tmp_path / "run", 4)["model"].values())


# --- disks ---


def test_a_full_disk_is_logged_and_training_continues(
    command: Callable[..., Arguments], unbroken_run: UnbrokenRun, tmp_path: Path
) -> None:
    (process,) = start(command(), tmp_path, Faults(full_disk=(1, 3)))
    assert process.wait() == 0, process.output()
    assert "the checkpoint of step 4 was NOT saved" in process.output()
    assert "2 save(s) in a row failed; a restart continues from step_00000002.pt" in process.output()
    assert saved_steps(tmp_path / "run") == [2, 8, 9]
    assert_same_run(tmp_path / "run", unbroken_run.folder)


def test_a_full_disk_ends_the_run_if_on_failure_is_stop(
    command: Callable[..., Arguments], unbroken_run: UnbrokenRun, tmp_path: Path
) -> None:
    arguments = command("--checkpoint.on_failure", "stop")
    (process,) = start(arguments, tmp_path, Faults(full_disk=(1, 99)))
    assert process.wait() == 1
    assert "a checkpoint could not be saved (checkpoint.on_failure is stop)" in process.output()
    assert saved_steps(tmp_path / "run") == [2]
    assert finish(start(arguments, tmp_path)) == [0]
    assert_same_run(tmp_path / "run", unbroken_run.folder)


def test_a_run_fails_if_its_last_checkpoint_cannot_be_saved(command: Callable[..., Arguments], tmp_path: Path) -> None:
    (process,) = start(command(), tmp_path, Faults(full_disk=(4, 99)))
    assert process.wait() == 1
    assert "the last checkpoint could not be saved" in process.output()
    assert "Traceback" not in process.output()
    assert state(tmp_path / "run") == ("failed", 1, 8)


def test_two_runs_in_one_folder_are_refused(command: Callable[..., Arguments], tmp_path: Path) -> None:
    (first,) = start(command(), tmp_path, Faults(freeze_at_step=3))
    wait_until(lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED, first)
    before = state(tmp_path / "run")
    (second,) = start(command(), tmp_path)
    assert second.wait() == 2
    assert f"run is in use by another process (process {first.pid} on " in second.output()
    assert state(tmp_path / "run") == before
    first.signal(signal.SIGCONT)
    assert first.wait() == 0
