"""wmse bench: options that a kind has no use for are refused before anything is measured."""

from pathlib import Path

import pytest

from trainer.bench.cli import MEASURES
from trainer.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loader", "--folder", "."], "--folder is for wmse bench checkpoint and all"),
        (["compute", "--sweep"], "--sweep is for wmse bench loss"),
        (["end2end", "--ranks", "2"], "--ranks is for wmse bench loss"),
        (["end2end", "--batch_norm"], "--batch_norm is for wmse bench compute"),
        (["loader", "--profile", "trace.json"], "--profile is for wmse bench compute and end2end"),
        (["checkpoint", "--plot", "x.png"], "--plot is for wmse bench loss"),
        (["loss", "--plot", "x.png"], "nothing to draw"),
        (["compute", "--seconds", "0"], "--seconds is 0.0"),
        (["compute", "--plot", "nowhere/x.png"], "--plot nowhere/x.png: there is no folder nowhere"),
        (["compute", "--profile", "nowhere/x.json"], "--profile nowhere/x.json: there is no folder nowhere"),
        *((([kind]), f"wmse bench {kind} needs --config FILE") for kind in MEASURES if kind != "loss"),
    ],
)
def test_options_that_do_nothing_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_first_rank_alone_tells(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MEASURES, "compute", lambda *_: None)
    assert main(["bench", "compute", "--config", str(tiny_config)]) == 0
    assert capsys.readouterr().out == ""
