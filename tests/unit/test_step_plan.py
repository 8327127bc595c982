"""`wmse plan`: what a step trains on."""

import json
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.config.loading import load_config
from trainer.data.index import open_index
from trainer.data.loader import train_requests
from trainer.tools.step_plan import describe_rows, planner_of


def plan(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[str]:
    assert main(["plan", *map(str, words)]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_rows_are_those_that_the_loader_is_asked_for(
    tiny_set: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", tiny_config, "--data.root", tiny_set, "--step", "4")
    head, *entries = map(json.loads, plan(capsys, *words, "--json"))
    config = load_config(tiny_config, ["--data.root", str(tiny_set)])
    index = open_index(tiny_set, "train")
    request = train_requests(planner_of(config, len(index)))(4)
    rows = [entry for entry in entries if "row" in entry]
    assert (head["step"], head["epoch"], head["learning_rate"], head["view_size"]) == (
        4,
        1,
        pytest.approx(8.11745e-4, rel=1e-5),
        32,
    )
    assert [entry["image"] for entry in rows] == request.image_ids.tolist()
    assert [entry["name"] for entry in rows] == [index.name(i) for i in request.image_ids.tolist()]
    ids = request.image_ids
    start, end, *_ = request.arrays(index.heights[ids], index.widths[ids])
    for entry, (y0, x0), (y1, x1) in zip(rows, start.tolist(), end.tolist(), strict=True):
        view = entry["views"][0]
        crop = view["crop"]
        assert (crop["y"], crop["y"] + crop["h"]) == (y0, y1)
        assert [crop["x"], crop["x"] + crop["w"]] == ([x1, x0] if view["flip"] else [x0, x1])


def test_a_rank_has_its_rows_and_its_slices(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--config", tiny_config, "--images", "64", "--data.images_per_step", "32", "--step", "1", "--json",
             "--wmse.iterations", "2", "--wmse.permutation_block", "32")  # fmt: skip
    everything = [json.loads(line) for line in plan(capsys, *words)]
    second = [json.loads(line) for line in plan(capsys, *words, "--rank", "1", "--ranks", "2")]
    rows = [entry for entry in everything if "row" in entry]
    assert [entry for entry in second if "row" in entry] == rows[16:]
    assert "first_try_area" in rows[0]["views"][0]["crop"]  # without images there are no sizes
    slices = [entry for entry in everything if "slice" in entry]
    assert sorted(slices[2]["rows"] + slices[3]["rows"]) == list(range(32))
    assert [entry["rows"] for entry in slices[:2]] == [list(range(16)), list(range(16, 32))]
    assert slices[2]["rows"] != list(range(16))
    assert [entry["slice"] for entry in second if entry.get("iteration") == 0] == [1]


def test_the_table_shows_some_rows_and_says_how_many_there_are(
    tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = plan(capsys, "--config", tiny_config, "--data.expected_images", "48", "--step", "0", "--rows", "3:4")
    assert "48 images (data.expected_images)" in lines[1]
    assert [line.split()[0] for line in lines[4:8:2]] == ["3", "4"]
    assert lines[8] == "2 of 16 rows; --rows FIRST:LAST shows others, --json all"
    assert lines[9] == "iteration 0, slice 0: rows 0-15"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "9"), "steps 0 to 8"),
        (("--step", "0", "--rows", "3:16"), "give rows from 0 to 15"),
        (("--step", "0", "--rows", "x"), "give FIRST:LAST"),
        (("--step", "0", "--rank", "1"), "--rank is 1 of 1"),
    ],
)
def test_wrong_input_is_refused(
    words: tuple[str, ...], message: str, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config", str(tiny_config), "--images", "48", *words]) == 2
    assert message in capsys.readouterr().err


def test_neighbouring_rows_are_joined() -> None:
    assert describe_rows([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
