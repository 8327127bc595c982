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
        (["compute", "--seconds", "nan"], "--seconds is nan"),
        (["compute", "--seconds", "inf"], "--seconds is inf"),
        (["compute", "--out", "."], "--out .: is a folder"),
        (["compute", "--profile", "tests"], "--profile tests: is a folder"),
        (["compute", "--plot", "x.txt"], "--plot x.txt: give a name that ends in .png"),
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


@pytest.mark.parametrize("kind", ["loss", "loader", "checkpoint", "growth", "all"])
def test_what_measures_one_process_is_not_started_by_torchrun(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["bench", kind]) == 2
    assert f"wmse bench {kind} measures one process" in capsys.readouterr().err


def test_a_drawing_that_fails_loses_no_figures(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no ink")

    monkeypatch.setitem(MEASURES, "compute", lambda *_: {"bench": "compute", "step_ms": 1.5})
    monkeypatch.setattr("trainer.bench.plot.draw", fail)
    with pytest.raises(ValueError, match="no ink"):
        main(["bench", "compute", "--config", str(tiny_config), "--plot", str(tmp_path / "x.png")])
    assert '"step_ms": 1.5' in capsys.readouterr().out
