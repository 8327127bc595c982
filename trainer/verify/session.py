"""Checks that several ranks make together: those of torchrun, srun or `wmse launch`, or two local ranks on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.cluster.local import rank_environment, start
from trainer.distributed.process_group import process_group
from trainer.verify.check import Check, Item, Measured, Place, largest, run_items
from trainer.verify.training import tiny_config

LOCAL_RANKS = 2
_WAIT_SECONDS = 100.0  # for two local ranks that hang


def together(groups: Sequence[tuple[str, Callable[[Place], Iterable[Item]]]], place: Place) -> list[Check]:
    """Make the checks of these groups on all ranks. Every rank calls this; each check has the largest error of all ranks."""
    checks: list[Check] = []
    config = tiny_config("wmse", 16)  # only its time-out and device matter
    with process_group(config, place.ranks, place.device):
        for name, items_of in groups:
            items = [(title, _agreed(measure)) for title, measure in items_of(place)]
            checks += run_items(name, items)
    return checks


def _agreed(measure: Callable[[], Measured]) -> Callable[[], Measured]:
    """Let a check fail on every rank if it fails on any rank."""

    def measure_on_all_ranks() -> Measured:
        try:
            error, bound = measure()
            own: tuple[float, float, str] = (float(error), bound, "")
        # The other ranks must learn of it, or they would wait in the next collective.
        except Exception as failure:
            own = (0.0, 0.0, f"{type(failure).__name__}: {failure}")
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        for rank, (_, _, problem) in enumerate(found):
            if problem:
                raise RuntimeError(f"rank {rank}: {problem}")
        errors = [error for error, _, _ in found]
        _, bound, _ = found[0]  # all ranks have the same one
        return Measured(largest(*errors), bound)

    return measure_on_all_ranks


class LocalRanks:
    """Two ranks on the CPU that make the checks of some groups while this process makes the others."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        """names: of the groups. folder: for the results and the output of the ranks."""
        self._names = names
        self._result = folder / "together.json"
        self._logs = [folder / f"rank{rank}.txt" for rank in range(LOCAL_RANKS)]
        # The ranks run the same command, and write their checks to a file.
        words = ["verify", "--together", str(self._result), "--only", *names]
        launch = f"verify.{time.time_ns()}.{folder.name}"
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self._logs):
            env = rank_environment(rank, LOCAL_RANKS, launch)
            # The ranks do not belong to a torchrun that has started this process alone.
            env = {key: value for key, value in env.items() if not key.startswith("TORCHELASTIC_")}
            with log.open("wb") as output:
                self._processes.append(start(words, env, output))

    def finish(self) -> list[Check]:
        """Wait for the ranks and return their checks; one failed check for each group if they ended without results."""
        end = time.monotonic() + _WAIT_SECONDS
        try:
            for process in self._processes:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return self._failed(f"the ranks did not end within {_WAIT_SECONDS:.0f} s")
        finally:
            self.close()
        if not self._result.exists():
            codes = [process.returncode for process in self._processes]
            return self._failed(f"the ranks ended with the exit codes {codes}: {self._last_line()}")
        return [Check(**values) for values in json.loads(self._result.read_text())]

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _failed(self, reason: str) -> list[Check]:
        for log in self._logs:
            with suppress(OSError):
                sys.stderr.write(log.read_text(errors="replace"))
        return [Check(name, "all checks of several ranks", "failed", reason=reason) for name in self._names]

    def _last_line(self) -> str:
        lines = [line for log in self._logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "they wrote nothing"
