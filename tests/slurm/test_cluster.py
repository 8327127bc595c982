"""The test cluster behaves as the other tests assume."""

from __future__ import annotations

from pathlib import Path

from tests.slurm.jobs import Job, command

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:2 --time=5 --requeue --open-mode=append
srun bash -c 'echo "start ${SLURM_RESTART_COUNT:-0} of task $SLURM_PROCID on $(hostname), GPUs $CUDA_VISIBLE_DEVICES"'
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || sleep 300
"""


def test_a_job_is_requeued_and_sacct_records_each_start(nodes: list[str], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    output = tmp_path / "job.out"
    script.write_text(SCRIPT)
    job = Job(command("sbatch", "--parsable", f"--nodelist={','.join(nodes)}", f"--output={output}", script), tmp_path)
    job.wait_until(lambda: output.exists() and output.read_text().count("start 0") == 2, "started")
    command("scontrol", "requeue", job.id)
    job.wait_for("COMPLETED")
    lines = [line for line in output.read_text().splitlines() if line.startswith("start")]
    assert sorted(lines) == [
        f"start {s} of task {i} on {node}, GPUs 0,1" for s in (0, 1) for i, node in enumerate(nodes)
    ]
    assert job.restarts == 1
    job.assert_history(["REQUEUED", "COMPLETED"])
