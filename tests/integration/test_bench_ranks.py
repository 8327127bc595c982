"""Benchmarks under torchrun: all ranks make the same steps, the first one tells."""

import json
from pathlib import Path

from tests.integration.launch import wmse


def test_two_ranks_measure_the_step_and_the_loop(tiny_set: Path, tiny_config: Path) -> None:
    words = ["--config", tiny_config, "--data.images_per_step", "32", "--data.root", tiny_set, "--seconds", "1"]
    done = wmse("bench", "compute", "--batch_norm", *words, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"bench"') == 1
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ranks"] == 2
    assert result["views_per_s"] == 2 * result["views_per_s_a_rank"]
    assert result["skipped_steps"] == 0
    assert set(result["batch_norm"]) == {"joint_local", "per_view_local", "joint_all"}
    done = wmse("bench", "end2end", *words, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"bench"') == 1
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["ranks"], result["images_per_step"]) == (2, 32)
    assert sum(result["step"]["percent"].values()) > 99.9
