"""Runs that are struck by what `tests/faults.py` injects, and go on from the same command as if nothing had been."""

from __future__ import annotations

import errno
import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch

from tests.conftest import TINY
from tests.faults import Faults, Started, start
from tests.integration.launch import run, start_ranks
from tests.integration.run_files import assert_same_run, checkpoint, metrics, state

STEPS = 9
Words = list[str | Path]


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*.pt"))


@pytest.fixture
def command(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> Callable[..., Words]:
    """The words of a run in tmp_path/run that is saved after every second step."""

    def words(*more: str, root: Path = tiny_set) -> Words:
        return ["pretrain", "--config", tiny_config, "--data.root", root, "--run_dir", tmp_path / "run",
                "--log.every_steps", "2", "--checkpoint.every_steps", "2", *more]  # fmt: skip

    return words


class Whole(NamedTuple):
    folder: Path
    seconds: float  # from the start of its process to the end


@pytest.fixture(scope="module")
def whole_run(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.yaml").write_text(TINY)
    words = ["pretrain", "--config", folder / "tiny.yaml", "--data.root", tiny_set, "--run_dir", folder / "run"]
    assert finish(start([*words[:-1], folder / "first", "--max_steps", "1"], folder)) == [0]  # starts the fork server
    began = time.monotonic()
    assert finish(start([*words, "--log.every_steps", "2"], folder)) == [0]
    return Whole(folder / "run", time.monotonic() - began)


def finish(processes: list[Started], timeout: float = 60.0) -> list[int]:
    """Exit codes."""
    return [process.wait(timeout) for process in processes]


# --- killed ---


def test_killed_at_random_moments(command: Callable[..., Words], whole_run: Whole, tmp_path: Path) -> None:
    """From the start of a process to its end, also inside a save; every fifth start is left alone for longer."""
    rng, kills, words = random.Random(0), 1, command("--checkpoint.every_steps", "1")
    (process,) = start(words, tmp_path)
    wait_for(lambda: bool(saved_steps(tmp_path / "run")), process)
    process.kill()
    while True:
        (process,) = start(words, tmp_path)
        patience = rng.uniform(0, whole_run.seconds) * (3 if kills % 5 == 4 else 1)
        try:
            assert process.wait(patience) == 0, process.output()
        except TimeoutError:  # and killed it
            kills += 1
            continue
        break
    assert_same_run(tmp_path / "run", whole_run.folder)


@pytest.mark.parametrize("place", ["writing", "fsync", "rename", "renamed"])
def test_killed_inside_a_save(place: str, command: Callable[..., Words], whole_run: Whole, tmp_path: Path) -> None:
    """The second save. What it left half done is not taken for a checkpoint, and goes."""
    assert finish(start(command(), tmp_path, Faults(kill_in_save=(1, place)))) == [-signal.SIGKILL]
    assert saved_steps(tmp_path / "run") == ([2, 4] if place == "renamed" else [2])
    (process,) = start(command(), tmp_path)
    assert process.wait() == 0, process.output()
    assert f"continuing after step {4 if place == 'renamed' else 2}" in process.output()
    assert "start 2 of this run" in process.output()
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert_same_run(tmp_path / "run", whole_run.folder)


def test_from_one_rank_to_two_to_one(
    command: Callable[..., Words], tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    """The same images, order and augmentations; losses equal to rounding, with BatchNorm over all ranks."""
    more = ("--model.batch_norm_ranks", "all", "--optimizer.name", "lars", "--log.every_steps", "1")
    for ranks, end in ((1, "3"), (2, "6"), (1, "0")):
        assert finish(start(command(*more, "--max_steps", end), tmp_path, ranks=ranks)) == [0] * ranks
    assert finish(start(command(*more, "--run_dir", str(tmp_path / "whole")), tmp_path)) == [0]
    for ours, whole in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert (ours["step"], ours["lr"]) == (whole["step"], whole["lr"])
        assert ours["loss"] == pytest.approx(whole["loss"], rel=2e-3)


# --- ranks that fail ---


@pytest.fixture
def two_ranks(command: Callable[..., Words], tmp_path: Path) -> Iterator[Callable[..., list[Started]]]:
    """Starts two ranks, the second struck; whatever is left of them ends with the test."""
    started: list[Started] = []

    def begin(*more: str, **faults: Any) -> list[Started]:
        started.extend(start(command(*more), tmp_path, Faults(on_rank=1, **faults), ranks=2))
        return started

    yield begin
    for process in started:
        process.kill()


def test_a_rank_that_raises_ends_the_job_and_its_traceback_is_the_only_one(
    two_ranks: Callable[..., list[Started]],
) -> None:
    first, second = two_ranks(raise_at_step=3)
    assert finish([first, second]) == [1, 1]
    assert second.output().rstrip().endswith("RuntimeError: the fault that was injected")
    assert "Traceback" not in first.output()
    assert "rank 1 fails and tells the other ranks: RuntimeError: the fault that was injected" in second.output()
    assert re.search(r"this rank ends, because rank 1 on \S+ failed: RuntimeError: the fault that was", first.output())


def test_a_rank_that_is_killed_ends_the_job(two_ranks: Callable[..., list[Started]], tmp_path: Path) -> None:
    assert finish(two_ranks(kill_at_step=3)) == [1, -signal.SIGKILL]
    assert state(tmp_path / "run") == ("failed", 1, 2)


def test_rank_0_that_is_killed_leaves_a_state_that_says_so(command: Callable[..., Words], tmp_path: Path) -> None:
    processes = start(command(), tmp_path, Faults(on_rank=0, kill_at_step=3), ranks=2)
    assert finish(processes) == [-signal.SIGKILL, 1]
    saved = saved_steps(tmp_path / "run")  # the second step's may have been under way
    assert state(tmp_path / "run") == ("failed", 1, saved[-1] if saved else 0)


def test_a_rank_that_is_frozen_ends_the_job_within_the_time_out(two_ranks: Callable[..., list[Started]]) -> None:
    first, second = two_ranks("--timeout_minutes", "0.2", freeze_at_step=3)
    assert first.wait(60) == 1
    assert "another rank is gone or late" in first.output()
    assert second.is_running()  # whoever started it ends it: torchrun and srun do


def test_a_rank_whose_reads_hang_ends_the_job_within_the_time_out(two_ranks: Callable[..., list[Started]]) -> None:
    """No exception can end a thread that hangs in a read."""
    everything = tuple(range(48))
    times = ("--timeout_minutes", "0.2", "--log.stall_seconds", "1")
    first, second = two_ranks(*times, bad_reads=everything, bad_read="hangs", bad_reads_after=30)
    assert finish([first, second], 60) == [1, 1]
    said = second.output()
    assert "rank 1: no progress for" in said
    assert "waits for the images of step" in said
    assert "(reads " in said
    assert "The process ends" in said
    assert "in read" in said  # where each thread was


def test_a_set_that_is_not_there_ends_every_rank_with_exit_code_2(
    command: Callable[..., Words], tmp_path: Path
) -> None:
    """One rank looks before the others, which wait for it: they must learn what it found."""
    processes = start(command(root=tmp_path / "nothing"), tmp_path, ranks=2)
    assert finish(processes, 30) == [2, 2]
    for process in processes:
        assert "nothing" in process.output()
        assert "Traceback" not in process.output()
    assert state(tmp_path / "run")[:2] == ("failed", 2)


@pytest.mark.parametrize(
    "kind",
    [
        "stand_in",
        pytest.param(
            "nccl",
            marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")],
        ),
    ],
)
@pytest.mark.parametrize(
    ("struck", "error", "code"), [(1, "RuntimeError", 1), (0, "RuntimeError", 1), (1, "InputError", 2)]
)
def test_a_rank_that_fails_under_nccl_ends_all_in_seconds(kind: str, struck: int, error: str, code: int) -> None:
    """The other rank hangs in a collective, and so would NCCL's clean-up."""
    processes = start_ranks("tests/integration/nccl_worker.py", 2, kind, str(struck), error)
    began = time.monotonic()
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - began < 45  # imports and start take 10 to 20 of it
    assert [process.returncode for process in processes] == [code, code]
    assert f"rank {struck} fails and tells the other ranks: " in outputs[struck]
    assert outputs[struck].rstrip().endswith("what went wrong")
    assert "before exit: rank " in outputs[1 - struck]
    assert re.search(rf"this rank ends, because rank {struck} on \S+ failed: .*what went wrong", outputs[1 - struck])


SET_UP_FAILS = """
import os, sys, time
import trainer.loop

def set_up(*_):
    if os.environ["RANK"] == "1":
        raise RuntimeError("no room")
    time.sleep(20)

trainer.loop.set_up = set_up
from trainer.cli import main
sys.exit(main())
"""


def test_a_failure_before_the_first_step_is_no_preemption_under_torchrun(
    command: Callable[..., Words], tmp_path: Path
) -> None:
    """torchrun ends rank 0 by a signal, before rank 0 has heard that rank 1 failed."""
    script = tmp_path / "set_up_fails.py"
    script.write_text(SET_UP_FAILS)
    done = run(str(script), *map(str, command()), ranks=2)
    assert done.returncode == 1
    found = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert "no room" in found["message"]


def test_torchrun_ends_all_and_prints_the_first_traceback_last(command: Callable[..., Words]) -> None:
    done = run("-m", "tests.faults", '{"on_rank": 1, "raise_at_step": 3}', *map(str, command()), ranks=2)
    assert done.returncode == 1
    summary = done.stderr[done.stderr.rindex("Root Cause") :]
    assert "rank      : 1" in summary
    assert "RuntimeError: the fault that was injected" in summary


# --- signals ---


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name
)
def test_a_signal_to_one_rank_stops_all_with_one_checkpoint(
    number: signal.Signals, two_ranks: Callable[..., list[Started]], command: Callable[..., Words], tmp_path: Path
) -> None:
    assert finish(two_ranks("--checkpoint.every_steps", "0", signal_at_step=(3, number))) == [75, 75]
    _, _, step = state(tmp_path / "run")
    assert state(tmp_path / "run") == ("preempted", 75, step)
    assert saved_steps(tmp_path / "run") == [step]
    assert 4 <= step <= 6
    assert finish(start(command(), tmp_path, ranks=2)) == [0, 0]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [2, 4, 6, 8, 9]


def test_a_second_interrupt_stops_at_once(command: Callable[..., Words], tmp_path: Path) -> None:
    """Where the first one can't be met: the files hang."""
    faults = Faults(bad_reads=tuple(range(48)), bad_read="hangs", bad_reads_after=60)
    (process,) = start(command("--log.stall_seconds", "0.5"), tmp_path, faults)
    wait_for(lambda: "no progress for" in process.output(), process)
    process.signal(signal.SIGINT)
    wait_for(lambda: "SIGINT" in process.output(), process)
    process.signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT  # 130 in a shell


def wait_for(condition: Callable[[], bool], process: Started, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.is_running(), process.output()
        assert time.monotonic() < deadline, process.output()
        time.sleep(0.05)


# --- numbers ---


@pytest.mark.parametrize(
    ("poison", "said"),
    [
        ("embeddings", "rank 0: a slice of view 1 can't be whitened"),
        ("loss", "rank 0: the loss is not finite"),
        ("gradient", "a gradient is not finite, though the loss is"),
    ],
)
def test_numbers_that_fail_leave_the_update_out(
    poison: str, said: str, command: Callable[..., Words], tmp_path: Path
) -> None:
    """Steps 3 and 4 make no update; the run's weights are those of a run that never made them."""
    words = command("--log.every_steps", "3")
    (process,) = start(words, tmp_path, Faults(poison=poison, poison_steps=(3, 5)))
    assert process.wait() == 0, process.output()
    for number, step in enumerate((3, 4), 1):
        assert f"step {step}: {said}; all ranks skipped the update ({number} in a row)" in process.output()
    assert [line["skipped_steps"] for line in metrics(tmp_path / "run")] == [0, 2, 0]
    assert all(0 < line["loss"] < 4 for line in metrics(tmp_path / "run"))
    model = checkpoint(tmp_path / "run", STEPS)["model"]
    assert all(value.isfinite().all() for value in model.values())
    assert all(
        moments["step"] == STEPS - 2 for moments in checkpoint(tmp_path / "run", STEPS)["optimizer"]["state"].values()
    )


def test_one_rank_whose_numbers_fail_is_named_and_no_rank_updates(
    two_ranks: Callable[..., list[Started]], tmp_path: Path
) -> None:
    slices = ("--model.embedding_size", "4", "--wmse.slice_size", "8", "--max_skipped_steps", "2")
    first, second = two_ranks(*slices, poison="embeddings", poison_steps=(3, 99))
    assert finish([first, second]) == [1, 1]
    reason = "the last in step 5: rank 1: a slice of view 1"
    assert f"the run skipped 3 updates in a row (max_skipped_steps is 2), {reason}" in first.output()
    assert "Try a smaller optimizer.learning_rate" in first.output()
    assert "Traceback" not in first.output() + second.output()
    assert state(tmp_path / "run") == ("failed", 1, 4)  # a fault that ends the run is known before step 6 is saved
    assert all(value.isfinite().all() for value in checkpoint(tmp_path / "run", 4)["model"].values())


# --- disks ---


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["full", "quota"])
def test_a_full_disk_is_said_and_training_goes_on(
    number: int, command: Callable[..., Words], whole_run: Whole, tmp_path: Path
) -> None:
    (process,) = start(command(), tmp_path, Faults(full_disk=(1, 3), disk_errno=number))
    assert process.wait() == 0, process.output()
    assert "the checkpoint of step 4 was NOT saved" in process.output()
    assert "2 save(s) in a row failed; a restart continues from step_00000002.pt" in process.output()
    assert saved_steps(tmp_path / "run") == [2, 8, 9]
    assert_same_run(tmp_path / "run", whole_run.folder)


def test_a_full_disk_ends_the_run_where_that_is_the_policy(
    command: Callable[..., Words], whole_run: Whole, tmp_path: Path
) -> None:
    words = command("--checkpoint.on_failure", "stop")
    (process,) = start(words, tmp_path, Faults(full_disk=(1, 99)))
    assert process.wait() == 1
    assert "a checkpoint could not be saved (checkpoint.on_failure is stop)" in process.output()
    assert saved_steps(tmp_path / "run") == [2]
    assert finish(start(words, tmp_path)) == [0]
    assert_same_run(tmp_path / "run", whole_run.folder)


def test_a_run_whose_last_checkpoint_is_not_written_has_failed(command: Callable[..., Words], tmp_path: Path) -> None:
    (process,) = start(command(), tmp_path, Faults(full_disk=(4, 99)))
    assert process.wait() == 1
    assert "the last checkpoint could not be saved" in process.output()
    assert "Traceback" not in process.output()
    assert state(tmp_path / "run") == ("failed", 1, 8)


def test_two_runs_in_one_folder_are_refused(command: Callable[..., Words], tmp_path: Path) -> None:
    (first,) = start(command(), tmp_path, Faults(freeze_at_step=3))
    wait_for(lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED, first)
    before = state(tmp_path / "run")
    (second,) = start(command(), tmp_path)
    assert second.wait() == 2
    assert f"run is in use by another process (process {first.pid} on " in second.output()
    assert state(tmp_path / "run") == before
    first.signal(signal.SIGCONT)
    assert first.wait() == 0


# --- files ---


@pytest.mark.parametrize("how", ["vanished", "cut"])
def test_files_that_fail_are_replaced_alike_after_a_resume_and_by_two_ranks(
    how: str, command: Callable[..., Words], tmp_path: Path
) -> None:
    bad = (3, 4, 30)
    more = ("--model.batch_norm_ranks", "all", "--optimizer.name", "lars", "--log.every_steps", "1")
    lines = []
    for name, (ranks, kill_at_step) in {"whole": (0, -1), "killed": (1, 1), "two": (2, 4)}.items():
        run_dir = tmp_path / name
        words = command(*more, "--run_dir", str(run_dir))
        if ranks:
            struck = start(words, tmp_path, Faults(bad_reads=bad, bad_read=how, kill_at_step=kill_at_step), ranks=ranks)
            assert finish(struck) == [-signal.SIGKILL] * ranks
        assert finish(start(words, tmp_path, Faults(bad_reads=bad, bad_read=how))) == [0]
        found = [json.loads(line)["id"] for line in (run_dir / "quarantine.jsonl").read_text().splitlines()]
        assert sorted(found) == list(bad), name
        lines.append(metrics(run_dir))
    assert lines[1] == lines[0]
    assert [line["loss"] for line in lines[2]] == pytest.approx([line["loss"] for line in lines[0]], rel=2e-3)


def test_a_passing_fault_of_a_file_system_costs_no_image(
    command: Callable[..., Words], whole_run: Whole, tmp_path: Path
) -> None:
    (process,) = start(command(), tmp_path, Faults(bad_reads=tuple(range(5)), bad_read="io_error_once"))
    assert process.wait() == 0, process.output()
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()
    assert_same_run(tmp_path / "run", whole_run.folder)


# --- long runs ---


def test_nothing_grows_over_many_epochs(command: Callable[..., Words], tmp_path: Path) -> None:
    """40 epochs of 3 steps, saved and logged all the time: a straight line after the third is level. In a process that was
    not forked: pages that it comes to own would count as growth."""
    watch = tmp_path / "sizes.txt"
    words = command("--optimizer.epochs", "40", "--log.tensorboard", "true")
    done = run("-m", "tests.faults", json.dumps({"watch": str(watch)}), *map(str, words))
    assert done.returncode == 0, done.stderr
    table = np.array([line.split() for line in watch.read_text().splitlines()], dtype=float)
    epochs, late = table[:, 0] / 3, table[:, 0] >= 9
    first, second = np.triu_indices(late.sum(), 1)
    steepness = (table[late, 1][second] - table[late, 1][first]) / (epochs[late][second] - epochs[late][first])
    slope = np.median(steepness) / table[late, 1].mean()  # of all pairs: a step here and there is no growth
    assert slope < 1e-3, f"the memory grows by {slope:.2%} an epoch"
    files, threads = table[late, 2], table[late, 3]
    assert files.max() - files.min() <= 2  # a checkpoint being written
    assert threads.max() - threads.min() <= 1
