"""However a cluster interrupts a job, the run continues and equals the uninterrupted one bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.integration.run_files import assert_same_run
from tests.slurm.jobs import Job, command, kill_node, launch, leftovers, preempt, sbatch, start_node

STEPS = 120


def test_a_run_that_reaches_its_time_limit_continues(
    config: Path, nodes: list[str], unbroken: Job, tmp_path: Path
) -> None:
    """This uses the plain script. SLURM sends the signal up to 30 s earlier than the 10 s requested here."""
    arguments = (config, "--run_dir", tmp_path / "run")
    job = sbatch("pretrain.sbatch", tmp_path / "run", nodes, *arguments, options=("--time=2", "--signal=USR1@10"))
    job.wait_for_step(5)
    job.freeze(ranks=2)
    job.thaw_when_signalled()
    job.wait_for_restarts(1)
    job.wait_for("COMPLETED")
    assert_same_run(job.run_dir, unbroken.run_dir)
    job.assert_history(["REQUEUED", "COMPLETED"])
    assert job.run_state()["starts"] == 2


def test_a_run_continues_after_three_restarts(config: Path, nodes: list[str], unbroken: Job, tmp_path: Path) -> None:
    """The job of `wmse launch` is preempted, then stopped by a signal, and then requeued by an administrator."""
    job = launch(config, tmp_path / "run", nodes)
    job.wait_for_step(5)
    job.freeze(ranks=2)
    preempt([job], nodes)
    saved = job.run_state()
    assert saved["checkpoint_step"] >= 5, job.report()

    job.wait_until(lambda: job.restarts == 1 and job.step > saved["checkpoint_step"], "at work again")
    job.freeze(ranks=2)
    command("scancel", "--signal=USR2", job.id)
    job.thaw_when_signalled()
    job.wait_for_restarts(2)
    saved = job.run_state()

    job.wait_until(lambda: job.step > saved["checkpoint_step"], "at work again")
    command("scontrol", "requeue", job.id)
    job.wait_for("COMPLETED")
    assert job.restarts == 3
    assert job.run_state()["starts"] == 4
    assert_same_run(job.run_dir, unbroken.run_dir)
    job.assert_history(["REQUEUED"] * 3 + ["COMPLETED"])  # the job requeues itself after the preemption


def test_a_run_continues_after_the_loss_of_a_node(
    cluster: Path, config: Path, nodes: list[str], unbroken: Job, tmp_path: Path
) -> None:
    """All processes of the node are killed. The other rank fails, and SLURM requeues the job after 30 s without the node."""
    job = launch(config, tmp_path / "run", nodes, "--checkpoint.every_steps", "5")
    job.wait_for_step(10)
    job.freeze(ranks=2)
    kill_node(cluster, nodes[1])
    try:
        job.thaw()
        job.wait_for_restarts(1)
    finally:
        start_node(cluster, nodes[1])
    job.wait_for("COMPLETED")
    assert_same_run(job.run_dir, unbroken.run_dir)
    job.assert_history(["NODE_FAIL", "COMPLETED"])


def test_scancel_ends_a_run_without_a_requeue(cluster: Path, config: Path, nodes: list[str], tmp_path: Path) -> None:
    job = launch(config, tmp_path / "run", nodes[:1])
    job.wait_for_step(5)
    job.freeze(ranks=1)
    command("scancel", job.id)
    job.wait_for("CANCELLED")
    assert not leftovers(cluster, nodes[0])
    state = job.run_state()
    assert (state["status"], state["exit_code"]) == ("preempted", 75)
    assert 5 <= state["checkpoint_step"] < STEPS
    assert (job.state, job.restarts) == ("CANCELLED", 0)
    job.assert_history(["CANCELLED"])


def test_wmse_stop_ends_a_job_without_a_requeue(config: Path, nodes: list[str], tmp_path: Path) -> None:
    """The run saves a checkpoint and ends with exit code 0."""
    job = launch(config, tmp_path / "run", nodes[:1])
    job.wait_for_step(5)
    job.freeze(ranks=1)
    arguments = [sys.executable, "-m", "trainer", "stop", job.run_dir]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as stopping:
        job.wait_until((job.run_dir / "stop").exists, "asked to stop")
        job.thaw()
        output, _ = stopping.communicate(timeout=60)
    assert stopping.returncode == 0, output
    job.wait_for("COMPLETED")
    state = job.run_state()
    assert (state["status"], state["exit_code"]) == ("stopped", 0)
    assert 5 <= state["checkpoint_step"] < STEPS
    assert f"after step {state['checkpoint_step']}" in output
    assert job.restarts == 0


def test_starts_without_progress_end_the_job(config: Path, nodes: list[str], tmp_path: Path) -> None:
    """Each start is asked to stop before its first step, while it builds a model for 2 s."""
    arguments = (config, "--run_dir", tmp_path / "run", "--max_idle_restarts", "2", "--model.backbone", "resnet152")
    job = sbatch("pretrain.sbatch", tmp_path / "run", nodes[:1], *arguments)
    for start in (1, 2):
        job.wait_until(lambda n=start: starts(job) == n, f"at start {start}")
        job.freeze(ranks=1)
        job.thaw_when_signalled(send=lambda: command("scancel", "--signal=USR1", job.id))
        job.wait_for_restarts(start)
    job.wait_for("FAILED")
    state = job.run_state()
    assert (state["status"], state["exit_code"], state["step"]) == ("failed", 1, 0)
    assert "not requeued" in state["message"]
    assert job.restarts == 2


def starts(job: Job) -> int:
    """Return how often the run was started."""
    return job.run_state()["starts"] if (job.run_dir / "state.json").exists() else 0
