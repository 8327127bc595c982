"""All measurements in one go: a part that fails says why, the others still run."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.bench.all import SHARES, bench_all, summary
from trainer.bench.cli import MEASURES
from trainer.cli import main

FIGURE = {"median": 2.0, "quartile_1": 1.0, "quartile_3": 3.0}
LOADER = {"views_per_s": 500.0}
END2END = {
    "views_per_s": 4000.0,
    "share_of_compute": 0.97,
    "step": {"percent": {"data_wait": 1.0}, "loop_overhead_percent": 2.0},
}


def test_the_parts_share_the_time_and_one_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, float] = {}

    def part(name: str, result: Any) -> Any:
        def measure(seconds: float) -> Any:
            asked[name] = seconds
            if isinstance(result, Exception):
                raise result
            return result

        return measure

    parts = {"loader": part("loader", ValueError("no set at nowhere")), "end2end": part("end2end", END2END)}
    result = bench_all(parts, 200.0)
    assert asked == {"loader": pytest.approx(40), "end2end": pytest.approx(60)}
    assert sum(SHARES.values()) == pytest.approx(1)
    assert result["failed_parts"] == ["loader"]
    assert result["parts"] == {"loader": {"error": "ValueError: no set at nowhere"}, "end2end": END2END}
    rows = [(row["part"], row["what"], row["value"], row["unit"]) for row in result["summary"]]
    assert rows[0] == ("loader", "failed", "ValueError: no set at nowhere", "")
    assert ("end2end", "share of the step alone", pytest.approx(97), "%") in rows
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no set at nowhere" in shown.err
    assert "4,000" in shown.err


def test_figures_of_each_part() -> None:
    modes = {"forward_backward": {**FIGURE, "speedup_over_loop": 1.0}}
    faster = {"forward_backward": {**FIGURE, "median": 1.0, "speedup_over_loop": 2.0}}
    results = {
        "loss": {"results": [{"figures": {"loop": modes, "torch": faster}}]},
        "loader": LOADER,
        "compute": {
            "views_per_s": 9.0,
            "roofline": {"roofline_bound": "memory", "roofline_views_per_s": 10.0, "flop_utilisation": 0.5},
        },
        "checkpoint": {"stall_ms": FIGURE, "percent_of_loop": {"standing_still": 0.25}},
    }
    rows = {(row["part"], row["what"]): (row["value"], row["unit"]) for row in summary(results)}
    assert rows["loss", "forward and backward, torch"] == (0.001, "ms")
    assert rows["loss", "against the loop"] == (2.0, "times")
    assert rows["compute", "arithmetic used"] == (50.0, "%")
    assert rows["checkpoint", "lost at a save every 5 minutes"] == (0.25, "%")


def test_the_command_fails_where_a_part_did(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.json"
    words = ["bench", "all", "--config", str(tiny_config), "--seed", "3", "--out", str(out)]
    for failed, code in ((["loader"], 1), ([], 0)):
        monkeypatch.setitem(MEASURES, "all", lambda *_, failed=failed: {"bench": "all", "failed_parts": failed})
        assert main(words) == code
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result == json.loads(out.read_text())
        assert (result["config"], result["overrides"]) == (str(tiny_config), ["--seed", "3"])
