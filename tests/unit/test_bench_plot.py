"""Results as pictures."""

import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trainer.bench.plot import draw, panels_of
from trainer.cli import main
from trainer.errors import InputError

HEAD = {"device": "a machine", "cores": 2, "torch_threads": 1, "versions": {"torch": "2"}, "commit": "abc"}
FIGURE = {"median": 2.0, "quartile_1": 1.0, "quartile_3": 3.0}
COMPUTE = {"bench": "compute", "phases": {"percent": {"forward": 40.0, "backward": 60.0}}, **HEAD}
END2END = {"bench": "end2end", "step": {"step_ms": 9.0, "percent": {"data_wait": 10.0, "forward": 90.0}}, **HEAD}
GROWTH = {
    "bench": "growth",
    "lines": [
        {
            "line": "ranks",
            "unit": "ms a step",
            "title": "ranks",
            "points": [{"ranks": 1, "figure": FIGURE}, {"ranks": 2, "not_run": "one GPU"}],
        },
        {
            "line": "num_views",
            "unit": "ms a step",
            "title": "views",
            "points": [{"num_views": 2, "figure": FIGURE}, {"num_views": 4, "figure": FIGURE}],
        },
    ],
    **HEAD,
}
ALL = {"bench": "all", "parts": {"loader": {"error": "why"}, "compute": COMPUTE, "end2end": END2END}}


@pytest.mark.parametrize(("result", "panels"), [(COMPUTE, 1), (END2END, 1), (GROWTH, 2), (ALL, 2)])
def test_each_kind_is_drawn(result: dict[str, Any], panels: int, tmp_path: Path) -> None:
    assert len(panels_of(result)) == panels
    draw(result, tmp_path / "drawn.png")
    with Image.open(tmp_path / "drawn.png") as picture:
        assert picture.format == "PNG"
        assert picture.width == panels * 5 * 120
        assert len(picture.convert("L").getcolors(256) or []) > 10, "more than an empty page"


def test_what_has_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to draw of wmse bench checkpoint"):
        draw({"bench": "checkpoint", **HEAD}, tmp_path / "drawn.png")
    assert not (tmp_path / "drawn.png").exists()


def test_a_missing_matplotlib_is_told_before_anything_is_measured(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["bench", "compute", "--config", str(tiny_config), "--seconds", "1e9"]
    assert main([*words, "--plot", str(tmp_path / "drawn.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
