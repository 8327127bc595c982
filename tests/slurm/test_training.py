"""Jobs of `wmse launch` train: alone, beside other jobs, and with an evaluator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.run_files import assert_same_run, metrics
from tests.slurm.jobs import Job, command, launch, preempt, run_launch, run_wmse

STEPS = 120


def status(*run_dirs: Path) -> list[dict[str, Any]]:
    """Return the output of `wmse status --json`."""
    return json.loads(run_wmse("status", "--json", *run_dirs))


def test_a_run_on_two_nodes_completes(unbroken: Job) -> None:
    state = unbroken.run_state()
    assert (state["status"], state["exit_code"], state["step"]) == ("done", 0, STEPS)
    assert (state["world_size"], state["starts"]) == (2, 1)
    assert unbroken.restarts == 0
    unbroken.assert_history(["COMPLETED"])
    losses = [line["loss"] for line in metrics(unbroken.run_dir)]
    assert len(losses) == STEPS
    assert all(0 < loss < 4 for loss in losses)  # the images are noise, so the loss does not fall
    assert len(set(losses)) == STEPS


def test_status_shows_a_completed_run(unbroken: Job) -> None:
    (row,) = status(unbroken.run_dir)
    assert (row["state"], row["step"], row["total_steps"], row["checkpoint_step"]) == ("done", STEPS, STEPS, STEPS)
    assert (row["restarts"], row["job_id"], row["job_state"]) == (0, unbroken.id, "COMPLETED")


def test_two_jobs_train_on_one_node_at_once(config: Path, nodes: list[str], unbroken: Job, tmp_path: Path) -> None:
    jobs = [launch(config, tmp_path / name, nodes[:1], "--ranks_per_node", "2") for name in ("first", "second")]
    for job in jobs:
        job.wait_for_step(1)
        job.freeze(ranks=2)
    for job in jobs:
        job.thaw()
    for job in jobs:
        job.wait_for("COMPLETED")
        assert_same_run(job.run_dir, unbroken.run_dir)


def test_a_job_of_a_range_of_nodes_trains_on_all_of_them(
    config: Path, nodes: list[str], unbroken: Job, tmp_path: Path
) -> None:
    """The job gets both nodes, and trains like a job that asks for two."""
    job = launch(config, tmp_path / "run", nodes, "--nodes", "1-2")
    job.wait_for("COMPLETED")
    assert job.run_state()["world_size"] == 2
    assert_same_run(job.run_dir, unbroken.run_dir)


def test_only_the_preempted_task_of_an_array_is_requeued(config: Path, nodes: list[str], tmp_path: Path) -> None:
    """The two tasks use all cores of a node."""
    array = tmp_path / "array"
    run_launch(config, array, nodes[:1], "--array", "seed=0,1", "--cpus_per_task", "2")
    jobs = [Job.of(array / f"seed-{seed}") for seed in (0, 1)]
    for job in jobs:
        job.wait_for_step(1)
        job.freeze(ranks=1)
    preempted = preempt(jobs, nodes[:1], cores=2)
    for job in jobs:
        job.thaw()
    for job in jobs:
        job.wait_for("COMPLETED")
        assert [line["step"] for line in metrics(job.run_dir)] == list(range(1, STEPS + 1))
        assert job.restarts == (1 if job is preempted else 0)
    assert metrics(jobs[0].run_dir) != metrics(jobs[1].run_dir)
    found = [(row["state"], row["restarts"], row["job_id"]) for row in status(array)]
    assert found == [("done", job.restarts, job.id) for job in jobs]


def test_an_evaluator_follows_the_run_and_continues_after_preemption(
    config: Path, nodes: list[str], tmp_path: Path
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(f"evaluator: {{nodelist: {nodes[1]}}}\n")
    options = ("--with_evaluator", "--site", site, "--checkpoint.keep_every_epochs", "20")
    job = launch(config, tmp_path / "run", nodes[:1], *options)
    evaluator = Job(json.loads((job.run_dir / "launch.json").read_text())["evaluator_job_id"], job.run_dir)
    results = job.run_dir / "eval"
    evaluator.wait_until((results / "knn_60.json").exists, "an evaluation of step 60")
    evaluator.freeze(ranks=1)
    preempt([evaluator], nodes[1:])
    evaluator.wait_for("COMPLETED")
    names = {f"{measure}_{step}.json" for measure in ("knn", "linear") for step in (60, STEPS)}
    assert {path.name for path in results.iterdir()} == {*names, ".lock"}
    assert (job.state, job.restarts, evaluator.restarts) == ("COMPLETED", 0, 1)
    (row,) = status(job.run_dir)
    assert row["evaluation"]["step"] == STEPS


def test_status_shows_and_stop_cancels_a_queued_run(config: Path, nodes: list[str], tmp_path: Path) -> None:
    before = Job(command("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"), tmp_path)
    job = launch(config, tmp_path / "run", nodes[:1], "--dependency", f"afterok:{before.id}")
    (row,) = status(job.run_dir)
    assert (row["state"], row["job_id"], row["job_state"]) == ("queued", job.id, "PENDING")
    assert row["job_reason"] == "Dependency"
    assert "cancelled" in run_wmse("stop", job.run_dir)
    job.wait_for("CANCELLED")
    (row,) = status(job.run_dir)
    assert (row["state"], row["step"]) == ("stopped", 0)
