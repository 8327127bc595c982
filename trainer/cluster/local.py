"""Local launcher: starts all ranks of a run on this machine, forwards signals to them, and leaves no process behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from trainer.errors import DONE, PREEMPTED
from trainer.run.signals import STOP_SIGNALS

_END_SECONDS = 60.0  # after the first failure the other ranks get this time to end by themselves, then they are killed
_PR_SET_PDEATHSIG = 1


def run_local(words: Sequence[str], ranks: int) -> int:
    """Run `wmse WORDS` in `ranks` processes until all have ended. Returns the exit code of the first failure, else 0."""
    launch = f"{os.getpid()}.{time.time_ns()}"
    processes = [start(words, rank_environment(rank, ranks, launch)) for rank in range(ranks)]

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        return _wait(processes)
    finally:
        # Leave no rank behind, whatever ends the wait.
        for process in processes:
            process.kill()
            process.wait()
        for number, old in before.items():
            signal.signal(number, old)


def start(words: Sequence[str], env: dict[str, str], output: IO[bytes] | int | None = None) -> subprocess.Popen[bytes]:
    """Start `wmse WORDS` as a process that ends with this one.

    output: file or descriptor for stdout and stderr; None: those of this process."""
    # In a new session the ranks get a terminal's Ctrl-C only once, from this process.
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *words],
        env=env,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, however the parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def rank_environment(rank: int, ranks: int, launch: str) -> dict[str, str]:
    """Return the environment of a rank, with the variables that torchrun sets. A single rank needs none of them.

    launch: a key by which the ranks of one launch find each other."""
    env = {key: value for key, value in os.environ.items() if key != "MASTER_PORT"}
    if ranks == 1:
        return env
    # Without a limit each rank would start a thread for every core.
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "WMSE_LAUNCH": launch,
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", threads),
    }
    return env | {key: str(value) for key, value in variables.items()}


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all processes have ended, or for some time after the first failure.

    Returns the first failure's exit code."""
    first_failure = 0
    end = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.1)
        failed = _failed(processes)
        if failed and not first_failure:
            # A rank that was killed by signal N has the code -N here, and 128 + N in a shell.
            first_failure = failed[0] if failed[0] > 0 else 128 - failed[0]
            if first_failure != PREEMPTED:
                end = time.monotonic() + _END_SECONDS
    if first_failure:
        return first_failure
    # The last process may have failed after the last look.
    failed = _failed(processes)
    return failed[0] if failed else DONE


def _failed(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the exit codes of the processes that have failed, in the order of their ranks."""
    codes = [process.poll() for process in processes]
    return [code for code in codes if code]
