"""Starts ranks as processes forked from a server that has imported everything, so that a start takes tenths of a second."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
# The commands import heavy packages only when they need them, so the server must be told to import them.
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "nvidia.dali.ops", "jsonargparse", "rich.progress", "rich.table", "trainer.cli",
     "trainer.loop", "trainer.data.dali_graph", "trainer.methods.wmse.method", "trainer.evaluate.run"]
)  # fmt: skip


class Started:
    """Process of one rank."""

    def __init__(self, process: ForkServerProcess, log: Path) -> None:
        self._process = process
        self._log = log

    def wait(self, timeout: float = 180.0) -> int:
        """Return the exit code, negative for a signal. After `timeout` seconds, kill the process and raise TimeoutError."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"still running after {timeout} s:\n{self.output()}")
        return self._process.exitcode

    def is_running(self) -> bool:
        """Return whether the process has not ended yet."""
        return self._process.exitcode is None

    def kill(self) -> None:
        """Send SIGKILL and wait for the end of the process."""
        self._process.kill()
        self._process.join()

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def output(self) -> str:
        """Return what the process has written to stdout and stderr so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def start_ranks(
    function: Callable[..., object], arguments: Sequence[object], folder: Path, ranks: int = 1
) -> list[Started]:
    """Start `sys.exit(function(*arguments))` once per rank; outputs go to files in `folder`.

    As under a scheduler, only environment variables tell the ranks apart. {rank} in a text argument is replaced by the rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    started = []
    for rank in range(ranks):
        world = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        env = {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in world.items()}} if ranks > 1 else {}
        log = folder / f"output-{time.monotonic_ns()}-{rank}.txt"
        own = [a.replace("{rank}", str(rank)) if isinstance(a, str) else a for a in arguments]
        process = _context.Process(target=_main, args=(function, own, env, str(log)))
        process.start()
        started.append(Started(process, log))
    return started


def finish(processes: Sequence[Started], timeout: float = 60.0) -> list[int]:
    """Wait for the end of all processes and return their exit codes."""
    return [process.wait(timeout) for process in processes]


def wait_until(reached: Callable[[], bool], process: Started | None = None, seconds: float = 180.0) -> None:
    """Wait for a condition; fail if it takes longer than `seconds` or if `process` ends before."""
    deadline = time.monotonic() + seconds
    while not reached():
        output = process.output() if process else ""
        assert process is None or process.is_running(), output
        assert time.monotonic() < deadline, output
        time.sleep(0.05)


def _main(function: Callable[..., object], arguments: Sequence[object], env: dict[str, str], log: str) -> None:
    """Run `function` in the forked process, with stdout and stderr redirected to `log`."""
    os.environ |= env
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    sys.exit(function(*arguments))


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
