"""Runs that were killed, or whose files failed, continue like unbroken runs."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.faults import Faults, start
from tests.integration.conftest import Arguments, UnbrokenRun
from tests.integration.launch import run
from tests.integration.run_files import assert_same_run, checkpoint, metrics, saved_steps
from tests.processes import finish, wait_until

# --- killed processes ---


def test_a_run_killed_at_random_times_equals_the_unbroken_run(
    command: Callable[..., Arguments], unbroken_run: UnbrokenRun, tmp_path: Path
) -> None:
    """A kill may happen anywhere between start and end, also inside a save. Every fifth start may run for longer."""
    rng, kills, arguments = random.Random(0), 1, command("--checkpoint.every_steps", "1")
    (process,) = start(arguments, tmp_path)
    wait_until(lambda: bool(saved_steps(tmp_path / "run")), process)
    process.kill()
    while True:
        (process,) = start(arguments, tmp_path)
        seconds = rng.uniform(0, unbroken_run.seconds) * (3 if kills % 5 == 4 else 1)
        try:
            assert process.wait(seconds) == 0, process.output()
        except TimeoutError:  # `wait` has killed the process
            kills += 1
            continue
        break
    assert_same_run(tmp_path / "run", unbroken_run.folder)


@pytest.mark.parametrize("place", ["writing", "fsync", "rename", "renamed"])
def test_a_run_killed_inside_a_save_equals_the_unbroken_run(
    place: str, command: Callable[..., Arguments], unbroken_run: UnbrokenRun, tmp_path: Path
) -> None:
    """The second save is killed. Its unfinished file is not taken for a checkpoint, and the next start deletes it."""
    assert finish(start(command(), tmp_path, Faults(kill_in_save=(1, place)))) == [-signal.SIGKILL]
    assert saved_steps(tmp_path / "run") == ([2, 4] if place == "renamed" else [2])
    (process,) = start(command(), tmp_path)
    assert process.wait() == 0, process.output()
    assert f"continuing after step {4 if place == 'renamed' else 2}" in process.output()
    assert "start 2 of this run" in process.output()
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert_same_run(tmp_path / "run", unbroken_run.folder)


def test_a_run_continues_on_two_ranks_and_then_on_one(
    command: Callable[..., Arguments], tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    """Images and augmentations stay the same. With BatchNorm over all ranks the losses are equal up to rounding."""
    more = ("--model.batch_norm_ranks", "all", "--optimizer.name", "lars", "--log.every_steps", "1")
    for ranks, end in ((1, "3"), (2, "6"), (1, "0")):
        assert finish(start(command(*more, "--max_steps", end), tmp_path, ranks=ranks)) == [0] * ranks
    assert finish(start(command(*more, "--run_dir", str(tmp_path / "whole")), tmp_path)) == [0]
    for ours, whole in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert (ours["step"], ours["lr"]) == (whole["step"], whole["lr"])
        assert ours["loss"] == pytest.approx(whole["loss"], rel=2e-3)


def test_the_cost_counts_all_starts_and_what_was_repeated(command: Callable[..., Arguments], tmp_path: Path) -> None:
    """The first start fails after the checkpoint of step 4; the second one is killed after that of step 6."""
    run_dir = tmp_path / "run"
    accounts = []
    for faults in (Faults(raise_at_step=5), Faults(kill_at_step=7), Faults()):
        (process,) = start(command(), tmp_path, faults)
        process.wait()
        accounts.append(json.loads((run_dir / "state.json").read_text())["cost"])
    failed, _, done = accounts
    saved = checkpoint(run_dir, 9)["cost"]
    assert failed["repeated"]["core_seconds"] == 0
    assert failed["core_seconds"] < saved["core_seconds"] < done["core_seconds"]
    assert 0 < saved["repeated"]["core_seconds"] == done["repeated"]["core_seconds"] < failed["core_seconds"]
    assert "done after step 9 of 9; cost so far: " in process.output()


# --- files ---


@pytest.mark.parametrize("how", ["vanished", "cut"])
def test_unusable_images_have_the_same_replacements_after_a_resume_and_on_two_ranks(
    how: str, command: Callable[..., Arguments], tmp_path: Path
) -> None:
    bad = (3, 4, 30)
    more = ("--model.batch_norm_ranks", "all", "--optimizer.name", "lars", "--log.every_steps", "1")
    lines = []
    for name, (ranks, kill_at_step) in {"whole": (0, -1), "killed": (1, 1), "two": (2, 4)}.items():
        run_dir = tmp_path / name
        arguments = command(*more, "--run_dir", str(run_dir))
        faults = Faults(bad_reads=bad, bad_read=how)
        if ranks:
            killed = start(arguments, tmp_path, replace(faults, kill_at_step=kill_at_step), ranks=ranks)
            assert finish(killed) == [-signal.SIGKILL] * ranks
        assert finish(start(arguments, tmp_path, faults)) == [0]
        found = [json.loads(line)["id"] for line in (run_dir / "quarantine.jsonl").read_text().splitlines()]
        assert sorted(found) == list(bad), name
        lines.append(metrics(run_dir))
    assert lines[1] == lines[0]
    assert [line["loss"] for line in lines[2]] == pytest.approx([line["loss"] for line in lines[0]], rel=2e-3)


def test_a_temporary_read_error_skips_no_image(
    command: Callable[..., Arguments], unbroken_run: UnbrokenRun, tmp_path: Path
) -> None:
    (process,) = start(command(), tmp_path, Faults(bad_reads=tuple(range(5)), bad_read="io_error_once"))
    assert process.wait() == 0, process.output()
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()
    assert_same_run(tmp_path / "run", unbroken_run.folder)


# --- long runs ---


def test_memory_files_and_threads_do_not_grow_over_epochs(command: Callable[..., Arguments], tmp_path: Path) -> None:
    """A line fitted to the memory over 30 epochs of 3 steps, without the first three, is level.

    The run saves and logs often. It is a new process, because in a forked one pages that stop being shared would count.
    """
    watch = tmp_path / "sizes.txt"
    arguments = command("--optimizer.epochs", "30", "--log.tensorboard", "true")
    done = run("-m", "tests.faults", json.dumps({"watch": str(watch)}), *map(str, arguments))
    assert done.returncode == 0, done.stderr
    table = np.array([line.split() for line in watch.read_text().splitlines()], dtype=float)
    epochs, late = table[:, 0] / 3, table[:, 0] >= 9
    first, second = np.triu_indices(late.sum(), 1)
    steepness = (table[late, 1][second] - table[late, 1][first]) / (epochs[late][second] - epochs[late][first])
    slope = np.median(steepness) / table[late, 1].mean()  # the median over all pairs ignores single jumps
    assert slope < 1e-3, f"the memory grows by {slope:.2%} an epoch"
    files, threads = table[late, 2], table[late, 3]
    assert files.max() - files.min() <= 2  # more while a checkpoint is written
    assert threads.max() - threads.min() <= 1
