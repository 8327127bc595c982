"""Helpers that submit, watch and interrupt jobs of the test cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import ROOT
from tests.integration.launch import run

FINAL = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"}
STOPS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def command(*arguments: str | Path) -> str:
    """Run a command, check that it succeeds, and return its output."""
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def run_wmse(*arguments: str | Path) -> str:
    """Run `wmse ARGUMENTS`, check that it succeeds, and return its output."""
    done = run("-m", "trainer", *map(str, arguments))
    assert done.returncode == 0, f"wmse {arguments}\n{done.stdout}{done.stderr}"
    return done.stdout


submitted: list[str] = []  # ids of the jobs that this process submitted, which the fixture `nodes` cancels


@dataclass(frozen=True)
class Job:
    """Job of the cluster and the folder of its run."""

    id: str
    run_dir: Path

    def __post_init__(self) -> None:
        submitted.append(self.id)

    @classmethod
    def of(cls, run_dir: Path) -> Job:
        """Return the job that `wmse launch` submitted for a run."""
        return cls(json.loads((run_dir / "launch.json").read_text())["job_id"], run_dir)

    # --- watch ---

    def facts(self) -> dict[str, str]:
        """Return the controller's fields of the job: JobState, Restarts, Reason, ..."""
        fields = command("scontrol", "--oneliner", "show", "job", self.id).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.facts()["Restarts"])

    @property
    def step(self) -> int:
        """Last logged step, 0 if none was logged."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0

    def run_state(self) -> dict[str, Any]:
        """Return the content of state.json."""
        return json.loads((self.run_dir / "state.json").read_text())

    def history(self) -> list[str]:
        """Return the state in which each start of the job ended, according to sacct."""
        options = ["--duplicates", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={self.id}"]
        return [line.split()[0] for line in command("sacct", *options).splitlines()]

    def assert_history(self, states: list[str]) -> None:
        """Check in which state each start of the job ended. The accounting may be seconds behind the controller."""
        deadline = time.monotonic() + 30
        while self.history() != states and time.monotonic() < deadline:
            time.sleep(0.5)
        assert self.history() == states, self.report()

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
        """Wait for a condition. After the deadline, fail with a report of the job."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not {what} after {seconds:.0f} s\n{self.report()}"
            time.sleep(0.1)

    def wait_for(self, state: str, seconds: float = 180) -> None:
        """Wait until the job is in a state. Fail at once if it ends in another one."""
        self._wait_unless_over(lambda: self.state == state, state, seconds)

    def wait_for_restarts(self, restarts: int, seconds: float = 180) -> None:
        """Wait until the job was requeued `restarts` times. Fail at once if it ends."""
        self._wait_unless_over(lambda: self.restarts == restarts, f"requeued {restarts} times", seconds)

    def _wait_unless_over(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        def arrived() -> bool:
            over = self.state in FINAL
            arrived = condition()
            assert arrived or not over, f"the job is {self.state}, not {what}\n{self.report()}"
            return arrived

        self.wait_until(arrived, what, seconds)

    def wait_for_step(self, step: int, seconds: float = 180) -> None:
        """Wait until the run has logged a step."""
        self.wait_until(lambda: self.step >= step, f"at step {step}", seconds)

    def report(self) -> str:
        """Return the scheduler's records of the job and the ends of all text files of the run."""
        parts = [command("scontrol", "show", "job", self.id), command("sacct", "--duplicates", f"--jobs={self.id}")]
        paths = [path for pattern in ("*.txt", "*.out", "state.json") for path in self.run_dir.rglob(pattern)]
        return "\n".join([*parts, *(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)])

    # --- interrupt ---

    def ranks(self) -> list[psutil.Process]:
        """Return the Python processes that srun started, without their children."""
        job = self.facts()["JobId"]
        found = [process for process in _python_processes() if _variable(process, "SLURM_JOB_ID") == job]
        tasks = [process for process in found if _variable(process, "SLURM_STEP_ID") == "0"]
        return [process for process in tasks if process.ppid() not in {task.pid for task in tasks}]

    def freeze(self, ranks: int) -> None:
        """Suspend all ranks, so that the run does not end before the test interrupts it."""
        found = self.ranks()
        assert len(found) == ranks, f"{found}\n{self.report()}"
        for process in found:
            process.suspend()

    def thaw(self) -> None:
        """Resume all ranks."""
        for process in self.ranks():
            process.resume()

    def thaw_when_signalled(self, seconds: float = 150, send: Callable[[], object] = lambda: None) -> None:
        """Resume all ranks when each has received a signal that asks it to stop.

        send: sends the signal. It is called repeatedly, because SLURM may lose a signal while a job step starts.
        """
        ranks = self.ranks()

        def are_signalled() -> bool:
            send()
            return all(_is_asked_to_stop(rank) for rank in ranks)

        self.wait_until(are_signalled, "signalled", seconds)
        self.thaw()


def sbatch(script: str, run_dir: Path, nodes: list[str], *arguments: str | Path, options: Sequence[str] = ()) -> Job:
    """Submit one of the project's scripts, with a rank on each node. arguments: of the script; options: of sbatch."""
    run_dir.mkdir(exist_ok=True)
    where = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    texts = [f"--output={run_dir}/job-%j.out", f"--chdir={ROOT}", "--gpus-per-node=1"]
    return Job(command("sbatch", "--parsable", *where, *texts, *options, ROOT / "slurm" / script, *arguments), run_dir)


def launch(config: Path, run_dir: Path, nodes: list[str], *more: str | Path) -> Job:
    """Submit a run with `wmse launch`, with a rank on each node unless `more` changes that. Return its job."""
    run_launch(config, run_dir, nodes, *more)
    return Job.of(run_dir)


def run_launch(config: Path, run_dir: Path, nodes: list[str], *more: str | Path) -> None:
    """Submit a run or an array with `wmse launch`."""
    arguments = ["--config", config, "--cluster", "slurm", "--run_dir", run_dir, "--nodes", str(len(nodes))]
    where = ["--nodelist", ",".join(nodes), "--gpus_per_node", "1", "--cpus_per_task", "1", "--time", "30"]
    run_wmse("launch", *arguments, *where, *more)


def preempt(jobs: Sequence[Job], nodes: list[str], cores: int = 4) -> Job:
    """Submit a job of higher priority that needs `cores` cores of each node. Return the one job that it preempted."""
    before = [job.restarts for job in jobs]
    where = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", f"--cpus-per-task={cores}", "--partition=high"]
    other = Job(command("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1", *where), jobs[0].run_dir)
    other.wait_for("COMPLETED")
    preempted = [job for job, restarts in zip(jobs, before, strict=True) if job.restarts > restarts]
    assert len(preempted) == 1, "\n".join(job.report() for job in jobs)
    return preempted[0]


# --- nodes ---


def processes(cluster: Path, node: str) -> list[psutil.Process]:
    """Return all processes on a pretend node, its slurmd first. They share the UTS namespace of slurmd."""
    slurmd = psutil.Process(int((cluster / "run" / f"slurmd-{node}.pid").read_text()))
    same = [process for process in psutil.process_iter() if _host_name(process) == _host_name(slurmd)]
    return [slurmd, *(process for process in same if process != slurmd)]


def kill_node(cluster: Path, node: str) -> None:
    """Kill all processes on a node, as a power cut does."""
    for process in processes(cluster, node):
        process.kill()


def start_node(cluster: Path, node: str) -> None:
    """Start a killed node again."""
    command(ROOT / "tests" / "slurm" / "cluster" / "node.sh", cluster, node)


def leftovers(cluster: Path, node: str, seconds: float = 20) -> list[str]:
    """Return the job processes and shared-memory files that a node still has after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        found = [str(file) for file in (cluster / "shm" / node).iterdir()]
        found += [str(process) for process in processes(cluster, node)[1:]]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _host_name(process: psutil.Process) -> str | None:
    """Return the UTS namespace of a process, None if it has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/ns/uts")
    except OSError:
        return None


def _python_processes() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"].startswith(("python", "wmse"))]


def _variable(process: psutil.Process, name: str) -> str | None:
    """Return an environment variable of a process of this cluster, None for other processes."""
    try:
        environment = process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None
    return environment.get(name) if environment.get("SLURM_CONF") == os.environ["SLURM_CONF"] else None


def _is_asked_to_stop(process: psutil.Process) -> bool:
    """Return whether a stop signal is pending for a suspended process, or has ended it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        return True
    pending = sum(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd")))
    return any(pending >> (number - 1) & 1 for number in STOPS)
