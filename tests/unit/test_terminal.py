"""A run continues and log.txt is complete when its terminal is closed."""

import errno
import io
import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.integration.run_files import metrics, state
from trainer.cli import main
from trainer.progress import RunBar
from trainer.tools.terminal import lasting_stderr

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal(io.StringIO):
    """Terminal that is closed after `writes` writes; later ones fail with EIO, as those to a closed terminal do."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.left = writes

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)

    def flush(self) -> None:
        if self.left < 0:
            raise OSError(errno.EIO, "Input/output error")


@pytest.mark.slow
@pytest.mark.parametrize("writes", [0, 8, 10**9], ids=["gone from the start", "closed on the way", "stays"])
def test_a_run_outlives_its_terminal_and_log_txt_is_complete(
    writes: int, tiny_set: Path, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(writes)
    monkeypatch.setattr(sys, "stderr", terminal)
    settings = ["--data.root", str(tiny_set), "--run_dir", str(tmp_path / "run"), "--max_steps", "4"]
    assert main(["pretrain", "--config", str(tiny_config), *settings]) == 0
    assert sys.stderr is terminal
    assert state(tmp_path / "run") == ("paused", 0, 4)
    log = (tmp_path / "run" / "log.txt").read_text()
    for step in range(1, 5):
        assert len(re.findall(rf"epoch \d/3  step {step}/4  loss .* ETA 0:00:", log)) == 1
    assert len(metrics(tmp_path / "run")) == 4
    assert log.count("cannot write to the terminal (Input/output error)") == (0 if writes == 10**9 else 1)
    if writes == 10**9:  # the lines are above the bar, folded at the terminal's width
        assert "step 4/4" in CONTROL.sub("", terminal.getvalue())


def test_stderr_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with lasting_stderr():
        print("dropped", file=sys.stderr)
        assert not sys.stderr.isatty()
        RunBar(0, 10).move(1)
    assert sys.stderr is None


def test_metrics_are_written_two_steps_late_with_the_time_of_measurement(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line every fourth step, the line of step 4 is written at the end of step 6."""
    from trainer.metrics import MetricsWriter

    run_dir, there = tmp_path / "run", {}
    made = MetricsWriter.show_step

    def note(self: MetricsWriter, step: int, *views: object) -> None:
        made(self, step, *views)
        there[step] = (time.time(), [line["step"] for line in metrics(run_dir)])

    monkeypatch.setattr(MetricsWriter, "show_step", note)
    settings = ["--data.root", str(tiny_set), "--run_dir", str(run_dir), "--log.every_steps", "4"]
    assert main(["pretrain", "--config", str(tiny_config), *settings]) == 0
    # `note` runs before the lines at the end of its step are written
    assert [there[step][1] for step in (4, 6, 7)] == [[], [], [4]]
    assert json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])["time"] <= there[4][0] + 0.001
