"""The cluster itself does what the other tests count on."""

from __future__ import annotations

from pathlib import Path

from tests.slurm.jobs import Job, command, preempt

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:2 --time=5
srun bash -c 'echo "$SLURM_PROCID $(hostname) $CUDA_VISIBLE_DEVICES start ${SLURM_RESTART_COUNT:-0}"'
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || sleep 300
"""


def test_a_preempted_job_is_requeued_and_sacct_remembers(nodes: list[str], tmp_path: Path) -> None:
    script, output = tmp_path / "job.sh", tmp_path / "job.out"
    script.write_text(SCRIPT)
    where = (f"--nodelist={','.join(nodes)}", f"--output={output}", "--open-mode=append", f"--job-name={tmp_path.name}")
    job = Job(command("sbatch", "--parsable", *where, script), tmp_path)
    job.wait_until(lambda: output.exists() and "start 0" in output.read_text(), "started")
    preempt(job, nodes)
    job.wait_for("COMPLETED")
    lines = [f"{rank} {node} 0,1 start {start}" for start in (0, 1) for rank, node in enumerate(nodes)]
    assert sorted(output.read_text().split("\n")[:-1], key=lambda line: line[-1] + line) == lines
    assert job.restarts == 1
    assert job.history() == ["PREEMPTED", "COMPLETED"]
