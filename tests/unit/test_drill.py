"""`wmse drill`: faults injected from outside into a toy run, and what is reported if a run does not end as it should."""

import json
import random
import signal
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.drill import cli, scenarios
from trainer.drill.scenarios import SCENARIOS
from trainer.drill.table import Row
from trainer.drill.toy import Toy


@pytest.mark.slow
def test_a_suspended_run_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scenarios, "_SUSPENDED_SECONDS", 0.5)
    out = tmp_path / "result.json"
    assert main(["drill", "--folder", str(tmp_path / "disk"), "--only", "suspend", "--out", str(out)]) == 0
    assert "| suspended | SIGSTOP for 5 s | 1 | 1 | none | continues, bit for bit | 0 |" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    assert row["wrong"] == []
    assert list((tmp_path / "disk").iterdir()) == []
    assert main(["drill", "--folder", str(tmp_path / "disk"), "--out", str(out)]) == 2  # the file exists


class FakeRun:
    """Run that ends with exit code 0 whatever it is sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def wait_for_step(self, step: int) -> None:
        assert step > 0

    def send(self, number: int) -> None:
        self.sent.append(number)

    def wait(self) -> int:
        return 0

    def output(self) -> str:
        return "done"


def test_a_run_that_ignores_a_signal_or_learns_something_else_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Toy, "finish", lambda *_: [])
    monkeypatch.setattr(Toy, "start", lambda *_: FakeRun())
    monkeypatch.setattr(scenarios, "differences", lambda *_: ["The runs part at step 7."])
    assert main(["drill", "--folder", str(tmp_path), "--only", "preempt"]) == 1
    assert "| exit code 75, bit for bit | 3 |" in capsys.readouterr().out
    (kept,) = tmp_path.iterdir()
    assert (kept / "toy.yaml").exists()


def test_a_toy_run_that_fails_without_a_fault_ends_the_drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "finish", lambda *_: ["no GPU driver"])
    assert main(["drill", "--folder", str(tmp_path)]) == 1


def test_an_image_is_damaged_at_the_same_step_in_both_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(tmp_path, tmp_path)
    run = FakeRun()
    seen: list[tuple[int, int]] = []

    def finish(run_dir: Path, images: Path, max_steps: int = 0) -> list[str]:
        seen.append((max_steps, min(path.stat().st_size for path in images.rglob("*.*") if path.is_file())))
        return []

    monkeypatch.setattr(toy, "finish", finish)
    monkeypatch.setattr(toy, "start", lambda *_: run)
    monkeypatch.setattr(scenarios, "differences", lambda *_: [])
    row = Row("", "", "")
    scenarios.cut_image(toy, tmp_path, row, random.Random(0))
    whole = seen[0][1]
    assert whole > 60
    assert seen == [(10, whole), (0, 60), (10, whole), (0, 60)]
    assert run.sent == [signal.SIGKILL]
    # The fake run has skipped nothing.
    assert len(row.wrong) == 2


def test_every_fault_can_be_chosen() -> None:
    assert tuple(SCENARIOS) == cli._NAMES
