"""Jobs of the test cluster: submit, watch, strike."""

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
from tests.integration.launch import wmse

FINAL = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"}
STOPS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def command(*words: str | Path) -> str:
    """What a command prints. It must end well."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def run_wmse(*words: str | Path) -> str:
    """What `wmse WORDS` prints. It must end well."""
    done = wmse(*words)
    assert done.returncode == 0, f"wmse {words}\n{done.stdout}{done.stderr}"
    return done.stdout


submitted: list[str] = []  # in this process, for whoever cleans up


@dataclass(frozen=True)
class Job:
    """A job and the run that it makes."""

    id: str
    run_dir: Path

    def __post_init__(self) -> None:
        submitted.append(self.id)

    @classmethod
    def of(cls, run_dir: Path) -> Job:
        """The job that `wmse launch` submitted for a run."""
        return cls(json.loads((run_dir / "launch.json").read_text())["job_id"], run_dir)

    # --- watch ---

    def facts(self) -> dict[str, str]:
        """What the controller knows: JobState, Restarts, Reason, ..."""
        words = command("scontrol", "--oneliner", "show", "job", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.facts()["Restarts"])

    @property
    def step(self) -> int:
        """The last that was logged."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0

    def run_state(self) -> dict[str, Any]:
        """state.json."""
        return json.loads((self.run_dir / "state.json").read_text())

    def history(self) -> list[str]:
        """The state in which each start of the job ended, as sacct has it."""
        options = ["--duplicates", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={self.id}"]
        return [line.split()[0] for line in command("sacct", *options).splitlines()]

    def assert_history(self, states: list[str]) -> None:
        """Each start of the job ended so. The accounting may be seconds behind the controller."""
        deadline = time.monotonic() + 30
        while self.history() != states and time.monotonic() < deadline:
            time.sleep(0.5)
        assert self.history() == states, self.report()

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
        """Look again and again; past the deadline the test fails and shows what there is to see."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{seconds:.0f} s, and not yet {what}\n{self.report()}"
            time.sleep(0.1)

    def wait_for(self, state: str, seconds: float = 180) -> None:
        """Wait for a state; another final one is a failure at once."""
        self._wait_unless_over(lambda: self.state == state, state, seconds)

    def wait_for_restarts(self, restarts: int, seconds: float = 180) -> None:
        """Wait until the job was requeued so often; its end is a failure at once."""
        self._wait_unless_over(lambda: self.restarts == restarts, f"requeued {restarts} times", seconds)

    def _wait_unless_over(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        def arrived() -> bool:
            over = self.state in FINAL
            arrived = condition()
            assert arrived or not over, f"{self.state}, and not {what}\n{self.report()}"
            return arrived

        self.wait_until(arrived, what, seconds)

    def wait_for_step(self, step: int, seconds: float = 180) -> None:
        """Wait for a logged step."""
        self.wait_until(lambda: self.step >= step, f"at step {step}", seconds)

    def report(self) -> str:
        """The scheduler's view and the ends of all texts of the run."""
        parts = [command("scontrol", "show", "job", self.id), command("sacct", "--duplicates", f"--jobs={self.id}")]
        paths = [path for pattern in ("*.txt", "*.out", "state.json") for path in self.run_dir.rglob(pattern)]
        return "\n".join([*parts, *(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)])

    # --- strike ---

    def ranks(self) -> list[psutil.Process]:
        """The Python processes that srun started, not their children."""
        job = self.facts()["JobId"]
        found = [process for process in _python_processes() if _variable(process, "SLURM_JOB_ID") == job]
        tasks = [process for process in found if _variable(process, "SLURM_STEP_ID") == "0"]
        return [process for process in tasks if process.ppid() not in {task.pid for task in tasks}]

    def freeze(self, ranks: int) -> None:
        """Stop the processes, all of them, so that no run is over before what a test does to it."""
        found = self.ranks()
        assert len(found) == ranks, f"{found}\n{self.report()}"
        for process in found:
            process.suspend()

    def thaw(self) -> None:
        """Let them go on."""
        for process in self.ranks():
            process.resume()

    def thaw_when_signalled(self, seconds: float = 150, send: Callable[[], object] = lambda: None) -> None:
        """Let them go on when a signal that asks them to stop has come for each.

        send: sends it, again and again: SLURM may lose one that comes while a step starts."""
        ranks = self.ranks()

        def are_signalled() -> bool:
            send()
            return all(_is_asked_to_stop(rank) for rank in ranks)

        self.wait_until(are_signalled, "signalled", seconds)
        self.thaw()


def sbatch(script: str, run_dir: Path, nodes: list[str], *words: str | Path, options: Sequence[str] = ()) -> Job:
    """Submit one of the project's scripts, a rank on each node. words: what the script takes; options: of sbatch."""
    run_dir.mkdir(exist_ok=True)
    where = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    texts = [f"--output={run_dir}/job-%j.out", f"--chdir={ROOT}", "--gpus-per-node=1"]
    words = ("--parsable", *where, *texts, *options, ROOT / "slurm" / script, *words)
    return Job(command("sbatch", *words), run_dir)


def launch(config: Path, run_dir: Path, nodes: list[str], *more: str | Path) -> Job:
    """Submit by `wmse launch`, a rank on each node where `more` says nothing else."""
    run_launch(config, run_dir, nodes, *more)
    return Job.of(run_dir)


def run_launch(config: Path, run_dir: Path, nodes: list[str], *more: str | Path) -> None:
    """`wmse launch`, of one run or of an array."""
    words = ["--config", config, "--cluster", "slurm", "--run_dir", run_dir, "--nodes", str(len(nodes))]
    where = ["--nodelist", ",".join(nodes), "--gpus_per_node", "1", "--cpus_per_task", "1", "--time", "30"]
    run_wmse("launch", *words, *where, *more)


def preempt(jobs: Sequence[Job], nodes: list[str], cores: int = 4) -> Job:
    """Take so many cores of each node for a job of the partition that goes before; returns the job that made room."""
    before = [job.restarts for job in jobs]
    where = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", f"--cpus-per-task={cores}", "--partition=high"]
    other = Job(command("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1", *where), jobs[0].run_dir)
    other.wait_for("COMPLETED")
    struck = [job for job, restarts in zip(jobs, before, strict=True) if job.restarts > restarts]
    assert len(struck) == 1, "\n".join(job.report() for job in jobs)
    return struck[0]


# --- nodes ---


def processes(cluster: Path, node: str) -> list[psutil.Process]:
    """All on a pretend node, its slurmd first: those with the same host name as it, in the sense of the kernel."""
    slurmd = psutil.Process(int((cluster / "run" / f"slurmd-{node}.pid").read_text()))
    same = [process for process in psutil.process_iter() if _host_name(process) == _host_name(slurmd)]
    return [slurmd, *(process for process in same if process != slurmd)]


def kill_node(cluster: Path, node: str) -> None:
    """Kill everything on a node, as a power cut does."""
    for process in processes(cluster, node):
        process.kill()


def start_node(cluster: Path, node: str) -> None:
    """Bring it back."""
    command(ROOT / "tests" / "slurm" / "cluster" / "node.sh", cluster, node)


def leftovers(cluster: Path, node: str, seconds: float = 20) -> list[str]:
    """Processes of jobs and files in shared memory on a node that are still there after a while."""
    deadline = time.monotonic() + seconds
    while True:
        found = [str(file) for file in (cluster / "shm" / node).iterdir()]
        found += [str(process) for process in processes(cluster, node)[1:]]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _host_name(process: psutil.Process) -> str | None:
    """The namespace that its host name is in, None for a process that is over."""
    try:
        return os.readlink(f"/proc/{process.pid}/ns/uts")
    except OSError:
        return None


def _python_processes() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"].startswith(("python", "wmse"))]


def _variable(process: psutil.Process, name: str) -> str | None:
    """From the environment of a process of this cluster."""
    try:
        environment = process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None
    return environment.get(name) if environment.get("SLURM_CONF") == os.environ["SLURM_CONF"] else None


def _is_asked_to_stop(process: psutil.Process) -> bool:
    """Whether a stop signal waits for a process that was stopped, or has ended it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        return True
    pending = sum(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd")))
    return any(pending >> (number - 1) & 1 for number in STOPS)
