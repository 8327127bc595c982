"""`wmse sweep --slurm`: each run is a task of an array, which trains, measures, and survives a preemption."""

from __future__ import annotations

import json
from pathlib import Path

from tests.slurm.jobs import Job, preempt, run_wmse

STEPS = 120


def test_a_sweep_continues_after_preemption_and_ends_in_one_table(
    config: Path, nodes: list[str], tmp_path: Path
) -> None:
    """The two tasks use all cores of a node."""
    file = tmp_path / "sweep.yaml"
    file.write_text(f"config: {config}\nrows: {{A: {{}}, B: {{wmse.eps: 0.1}}}}\n")
    out = tmp_path / "out"
    options = ["--slurm", "--nodelist", nodes[0], "--gpus_per_node", "1", "--cpus_per_task", "2", "--time", "30"]
    run_wmse("sweep", file, "--out", out, *options)
    jobs = [Job.of(out / row / "seed_0") for row in ("a", "b")]
    for job in jobs:
        job.wait_for_step(1)
        job.freeze(ranks=1)
    preempted = preempt(jobs, nodes[:1], cores=2)
    for job in jobs:
        job.thaw()
    for job in jobs:
        job.wait_for("COMPLETED")
        assert job.restarts == (1 if job is preempted else 0)
    assert "nothing to submit" in run_wmse("sweep", file, "--out", out, *options)
    run_wmse("sweep", file, "--out", out, "--table")
    rows = json.loads((out / "table.json").read_text())["rows"]
    assert [(row["row"], row["finished"], row["steps"], row["unfinished"]) for row in rows] == [
        ("A", 1, STEPS, {}),
        ("B", 1, STEPS, {}),
    ]
    assert all(row["figures"]["5-nn, top1"]["trained"]["by_seed"].keys() == {"0"} for row in rows)
    assert len(list(out.rglob("knn_random.json"))) == 1
