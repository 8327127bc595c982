"""If one rank fails, all ranks end within the time-out, and the log names the cause."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults import Faults, start
from tests.integration import nccl_worker
from tests.integration.conftest import Arguments
from tests.integration.launch import run
from tests.integration.run_files import saved_steps, state
from tests.processes import Started, finish, start_ranks


def test_a_rank_that_raises_ends_the_job_and_only_its_traceback_is_printed(
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


def test_another_rank_writes_the_state_if_rank_0_is_killed(command: Callable[..., Arguments], tmp_path: Path) -> None:
    processes = start(command(), tmp_path, Faults(on_rank=0, kill_at_step=3), ranks=2)
    assert finish(processes) == [-signal.SIGKILL, 1]
    saved = saved_steps(tmp_path / "run")  # empty if the kill interrupted the save of step 2
    assert state(tmp_path / "run") == ("failed", 1, saved[-1] if saved else 0)


def test_a_rank_that_is_frozen_ends_the_job_within_the_time_out(two_ranks: Callable[..., list[Started]]) -> None:
    first, second = two_ranks("--timeout_minutes", "0.2", freeze_at_step=3)
    assert first.wait(60) == 1
    assert "another rank has ended or does not answer" in first.output()
    assert second.is_running()  # torchrun and srun end such a rank; here nothing does


def test_a_rank_whose_reads_hang_ends_the_job_within_the_time_out(two_ranks: Callable[..., list[Started]]) -> None:
    """The watchdog has to end the process, because no exception can end a thread that hangs in a read."""
    everything = tuple(range(48))
    times = ("--timeout_minutes", "0.2", "--log.stall_seconds", "1")
    first, second = two_ranks(*times, bad_reads=everything, bad_read="hangs", bad_reads_after=30)
    assert finish([first, second], 60) == [1, 1]
    output = second.output()
    assert "rank 1: no progress for" in output
    assert "waits for the images of step" in output
    assert "(reads " in output
    assert "The process ends" in output
    assert "in read" in output  # from the stack of each thread


def test_a_missing_set_ends_every_rank_with_exit_code_2(command: Callable[..., Arguments], tmp_path: Path) -> None:
    """One rank opens the set while the others wait for it, so it has to tell them that it failed."""
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
    ("failing", "error", "code"), [(1, "RuntimeError", 1), (0, "RuntimeError", 1), (1, "InputError", 2)]
)
def test_a_rank_that_fails_over_nccl_ends_all_ranks_in_seconds(
    kind: str, failing: int, error: str, code: int, tmp_path: Path
) -> None:
    """The other rank hangs in a collective, and NCCL's clean-up would hang as well."""
    began = time.monotonic()
    processes = start_ranks(nccl_worker.main, [kind, failing, error], tmp_path, ranks=2)
    try:
        assert finish(processes) == [code, code]
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - began < 45
    outputs = [process.output() for process in processes]
    assert f"rank {failing} fails and tells the other ranks: " in outputs[failing]
    assert outputs[failing].rstrip().endswith("what went wrong")
    assert "before exit: rank " in outputs[1 - failing]
    assert re.search(rf"this rank ends, because rank {failing} on \S+ failed: .*what went wrong", outputs[1 - failing])


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


def test_a_failure_before_the_first_step_under_torchrun_is_not_taken_for_a_preemption(
    command: Callable[..., Arguments], tmp_path: Path
) -> None:
    """torchrun ends rank 0 by a signal before rank 0 has learnt that rank 1 failed."""
    script = tmp_path / "set_up_fails.py"
    script.write_text(SET_UP_FAILS)
    done = run(str(script), *map(str, command()), ranks=2)
    assert done.returncode == 1
    found = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert "no room" in found["message"]


def test_torchrun_ends_all_ranks_and_prints_the_traceback_of_the_first_failure(
    command: Callable[..., Arguments],
) -> None:
    done = run("-m", "tests.faults", '{"on_rank": 1, "raise_at_step": 3}', *map(str, command()), ranks=2)
    assert done.returncode == 1
    summary = done.stderr[done.stderr.rindex("Root Cause") :]
    assert "rank      : 1" in summary
    assert "RuntimeError: the fault that was injected" in summary
