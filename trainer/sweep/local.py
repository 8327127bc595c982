"""Run a sweep on this machine: some runs at a time, each in a process of its own. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from trainer.cluster.local import start
from trainer.run.signals import STOP_SIGNALS
from trainer.sweep.definition import SweepRun
from trainer.sweep.plan import Plan
from trainer.sweep.progress import why_unfinished

_LOOK_SECONDS = 0.1


@dataclass
class _Active:
    """A run whose process is running."""

    run: SweepRun
    number: int
    """Position of the run in the sweep, from 1."""
    process: subprocess.Popen[bytes]
    began: float
    """Time of the start on the monotonic clock, in seconds."""


class _Sweep:
    """The processes of a sweep. Each has a place, which decides which GPU it uses."""

    def __init__(self, runs: Sequence[SweepRun], plan: Plan, jobs: int) -> None:
        self._waiting = list(enumerate(runs, 1))
        self._total = len(runs)
        self._plan = plan
        # More places than runs would only make the shares of the cores smaller.
        self._places: list[_Active | None] = [None] * min(jobs, len(runs))
        self._stopped = False

    def run(self) -> bool:
        """Start and watch all runs. Returns whether a signal has ended the sweep."""
        with self._forwarded_signals():
            try:
                while (self._waiting and not self._stopped) or any(self._places):
                    for place in range(len(self._places)):
                        self._look_at(place)
                    time.sleep(_LOOK_SECONDS)
            finally:
                # Leave no process behind, whatever ends the sweep.
                for active in self._places:
                    if active:
                        active.process.kill()
                        active.process.wait()
        return self._stopped

    def _look_at(self, place: int) -> None:
        """Report the run of this place if it has ended, and start the next one if the place is free."""
        active = self._places[place]
        if active and active.process.poll() is not None:
            self._report(active)
            active = self._places[place] = None
        if active or self._stopped:
            return
        started = self._places[place] = self._start_next(place)
        # A signal that came during the start has not reached the new process.
        if started and self._stopped:
            started.process.terminate()

    def _start_next(self, place: int) -> _Active | None:
        """Start the next run that has something left to do; None without one."""
        while self._waiting:
            number, run = self._waiting.pop(0)
            command = self._plan.command(run)
            # An earlier start of the sweep may have finished it.
            if command is None:
                self._say(number, run, why_unfinished(run.config) or "is finished")
                continue
            self._say(number, run, f"starts in {run.run_dir}")
            words = [*command, "--config", str(run.file), *run.words]
            # The new process has its own descriptor of the output file, so this one is closed.
            with ExitStack() as stack:
                process = start(self._with_threads(run, words), self._environment(place), self._output(run, stack))
            return _Active(run, number, process, time.monotonic())
        return None

    def _report(self, active: _Active) -> None:
        """Print how a run has ended, and update the plan."""
        # If this run has not measured the untrained encoder, another run has to.
        self._plan.ended(active.run)
        seconds = time.monotonic() - active.began
        code = active.process.returncode
        self._say(
            active.number,
            active.run,
            f"{why_unfinished(active.run.config) or 'finished'} (exit code {code}, {seconds:.0f} s)",
        )

    def _say(self, number: int, run: SweepRun, what: str) -> None:
        """Print a line about a run."""
        print(f"[{number}/{self._total}] {run.name}: {what}", flush=True)

    def _output(self, run: SweepRun, stack: ExitStack) -> IO[bytes] | int:
        """Return the file for what a process prints: descriptor 2 if only one runs at a time, else one in its folder."""
        # A single run may use the terminal alone.
        if len(self._places) == 1:
            return 2
        run.run_dir.mkdir(parents=True, exist_ok=True)
        return stack.enter_context((run.run_dir / "output.txt").open("ab"))

    def _with_threads(self, run: SweepRun, words: list[str]) -> list[str]:
        """Add the run's share of the cores, if several run at a time and the settings leave the number open."""
        if len(self._places) == 1 or run.config.data.threads:
            return words
        return [*words, f"--data.threads={_share(len(self._places))}"]

    def _environment(self, place: int) -> dict[str, str]:
        """Return the environment of a process: threads for its share of the cores, and one of the GPUs."""
        env = dict(os.environ)
        if len(self._places) == 1:
            return env
        # Without a limit each process would start a thread for every core.
        env.setdefault("OMP_NUM_THREADS", str(_share(len(self._places))))
        gpus = _gpus()
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
        return env

    @contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        """Start no more runs after a signal, and pass it on: each run then saves a checkpoint and ends."""

        def forward(number: int, frame: FrameType | None) -> None:
            self._stopped = True
            for active in self._places:
                if active and active.process.poll() is None:
                    active.process.send_signal(number)

        # An ignored signal stays ignored, as in `stop_on_signals`.
        handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, forward) for number in handled}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)


def run_here(runs: Sequence[SweepRun], plan: Plan, jobs: int) -> bool:
    """Run what is left to do for the runs, `jobs` at a time. Returns whether a signal has ended the sweep."""
    return _Sweep(runs, plan, jobs).run()


def _share(jobs: int) -> int:
    """Return the number of cores for each of `jobs` processes."""
    return max(1, len(os.sched_getaffinity(0)) // jobs)


def _gpus() -> list[str]:
    """Return the names of the GPUs that a process may use, as in CUDA_VISIBLE_DEVICES."""
    # Importing torch only to count the GPUs would take seconds.
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number in range(len(list(folder.iterdir())))] if folder.is_dir() else []
