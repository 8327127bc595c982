"""Digests and bit-identical runs on several ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import start
from tests.integration.conftest import Arguments
from trainer.cli import main


def line(run_dir: Path) -> dict[str, Any]:
    """Return the last line of metrics.jsonl."""
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_two_ranks_see_the_rows_of_one_and_deterministic_runs_are_identical(
    command: Callable[..., Arguments], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro-batches do not change the rows either. A run that continues on another number of ranks has them as well."""
    options = ("--deterministic", "true", "--data.images_per_step", "32", "--optimizer.epochs", "4")
    for name in ("two", "again"):
        arguments = [*command(*options), "--run_dir", tmp_path / name]
        for process in start(arguments, tmp_path, ranks=2):
            assert process.wait() == 0, process.output()
    assert main(["diff", str(tmp_path / "two"), str(tmp_path / "again")]) == 0
    halved = [*options, "--optimizer.images_per_micro_batch", "16", "--run_dir", str(tmp_path / "one")]
    assert main([*map(str, command(*halved)), "--max_steps", "3"]) == 0
    assert line(tmp_path / "one")["step"] == 2
    # continue the run of one rank, which was stopped between two lines, on two ranks
    for process in start(command(*halved), tmp_path, ranks=2):
        assert process.wait() == 0, process.output()
    assert line(tmp_path / "one")["rows_digest"] == line(tmp_path / "two")["rows_digest"]
    assert line(tmp_path / "one")["loss"] != line(tmp_path / "two")["loss"]
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    shown = capsys.readouterr().out
    assert "world_size: 1, from step 3 on 2 -> 2" in shown
    assert "rows_digest" not in shown


@pytest.mark.slow
def test_a_deterministic_run_of_three_ranks_resumes_bit_for_bit(
    command: Callable[..., Arguments], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With three ranks, other buckets of gradients after a start would change the order in which ranks are summed."""
    options = ("--deterministic", "true", "--data.images_per_step", "48", "--optimizer.epochs", "5")
    for name, more in (("whole", ()), ("resumed", ("--max_steps", "2")), ("resumed", ())):
        arguments = [*command(*options, *more), "--run_dir", tmp_path / name]
        for process in start(arguments, tmp_path, ranks=3):
            assert process.wait() == 0, process.output()
    assert main(["diff", str(tmp_path / "whole"), str(tmp_path / "resumed")]) == 0
    assert "identical up to step 5" in capsys.readouterr().out
