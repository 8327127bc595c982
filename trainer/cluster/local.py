"""Starts all ranks of a run on this machine, passes signals on to them, and leaves none behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from trainer.errors import DONE, PREEMPTED
from trainer.run.signals import STOP_SIGNALS

_END_SECONDS = 60.0  # from the first rank that fails to the end of the others: they notice by themselves, or are killed
_PR_SET_PDEATHSIG = 1


def run_local(words: Sequence[str], ranks: int) -> int:
    """Run `wmse WORDS` in `ranks` processes until all have ended; returns the exit code of the first that failed, else 0."""
    launch = f"{os.getpid()}.{time.time_ns()}"
    processes = [_start(words, _environment(rank, ranks, launch)) for rank in range(ranks)]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, old in before.items():
            signal.signal(number, old)


def _start(words: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    # a session of its own: a terminal's Ctrl-C comes once, by the parent, and not twice
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *words], env=env, start_new_session=True, preexec_fn=_die_with_parent
    )


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(rank: int, ranks: int, launch: str) -> dict[str, str]:
    """The variables of a rank, as torchrun sets them, and the name of the launch, by which its ranks meet. A single rank
    gets none."""
    env = {key: value for key, value in os.environ.items() if key != "MASTER_PORT"}
    if ranks == 1:
        return env
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    own = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "WMSE_LAUNCH": launch,
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", threads),
    }
    return env | {key: str(value) for key, value in own.items()}


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """Until all have ended. After the first failure the others get some time to notice it."""
    first_failure = 0
    end = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.1)
        failed = [code for process in processes if (code := process.poll())]
        if failed and not first_failure:
            # a rank that was killed by a signal counts as the shell counts it
            first_failure = failed[0] if failed[0] > 0 else 128 - failed[0]
            if first_failure != PREEMPTED:
                end = time.monotonic() + _END_SECONDS
    return first_failure or next((code for process in processes if (code := process.poll())), DONE)
