"""Benchmarks on two ranks: all ranks make the same steps, and only rank 0 prints a result."""

import json
from pathlib import Path
from typing import Any

from tests.faults import start


def bench(folder: Path, *arguments: str | Path) -> dict[str, Any]:
    """Run `wmse bench ARGUMENTS` on two ranks and return the result that rank 0 prints."""
    first, second = start(["bench", *arguments], folder, ranks=2)
    assert [first.wait(), second.wait()] == [0, 0], first.output()
    assert second.output().count('"bench"') == 0
    return json.loads(first.output().splitlines()[-1])


def test_two_ranks_measure_the_step_and_the_loop(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> None:
    arguments = ["--config", tiny_config, "--data.images_per_step", "32", "--data.root", tiny_set, "--seconds", "1"]
    result = bench(tmp_path, "compute", "--batch_norm", *arguments)
    assert result["ranks"] == 2
    assert result["views_per_s"] == 2 * result["views_per_s_a_rank"]
    assert result["skipped_steps"] == 0
    assert set(result["batch_norm"]) == {"joint_local", "per_view_local", "joint_all"}
    result = bench(tmp_path, "end2end", *arguments)
    assert (result["ranks"], result["images_per_step"]) == (2, 32)
    assert sum(result["step"]["percent"].values()) > 99.9
