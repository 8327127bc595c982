"""wmse bench: every kind measures, prints JSON on the last line, and refuses what it has no use for."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from trainer.bench.phases import PHASES
from trainer.bench.timing import MIN_WINDOWS
from trainer.cli import main
from trainer.config.loading import load_config
from trainer.errors import InputError


class Bench:
    """Runs `wmse bench` in this process and returns its JSON."""

    def __init__(self, config: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.experiment = ["--config", str(config), "--data.root", str(images)]
        self.capsys = capsys

    def __call__(self, kind: str, *argv: str) -> dict[str, Any]:
        assert main(["bench", kind, *argv]) == 0
        return json.loads(self.capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def bench(tiny_config: Path, tiny_set: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tiny_config, tiny_set, capsys)


def test_the_step_is_measured_without_images(bench: Bench, tiny_config: Path, tmp_path: Path) -> None:
    out, trace, plot = tmp_path / "out.json", tmp_path / "trace.json", tmp_path / "plot.png"
    argv = ["--config", str(tiny_config), "--data.root", "nowhere", "--seconds", "0.4", "--batch_norm"]
    result = bench("compute", *argv, "--out", str(out), "--profile", str(trace), "--plot", str(plot))
    assert result == json.loads(out.read_text())
    assert (result["config"], result["overrides"]) == (str(tiny_config), ["--data.root", "nowhere"])
    assert result["views_per_s"] * result["step_ms"]["median"] == pytest.approx(16 * 2 * 1e3, rel=0.2)
    assert (result["images_per_step"], result["num_views"], result["side"]) == (16, 2, 32)
    assert (result["skipped_steps"], result["ranks"], result["precision"]) == (0, 1, "float32")
    assert sum(result["phases"]["percent"].values()) == pytest.approx(100)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert set(PHASES) <= set(result["phases"]["host_ms"]) & names
    roofline = result["roofline"]
    by_flop = roofline["matmul_tflops"] * 1e12 / roofline["flop_per_view"]
    by_traffic = roofline["copy_gb_per_s"] * 1e9 / roofline["bytes_per_view"]
    assert roofline["roofline_views_per_s"] == pytest.approx(min(by_flop, by_traffic))
    assert roofline["flop_utilisation"] == pytest.approx(result["views_per_s"] / by_flop)
    assert set(result["batch_norm"]) == {"joint_local", "per_view_local"}  # one rank is all ranks
    with Image.open(plot) as picture:
        assert len(picture.convert("L").getcolors(256) or []) > 10, "more than an empty page"


def test_the_parts_of_the_loop_add_up(bench: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = bench("end2end", *bench.experiment, "--seconds", "1", "--profile", str(trace))
    step = result["step"]
    assert sum(step["host_ms"].values()) == pytest.approx(step["step_ms"])
    assert sum(step["percent"].values()) == pytest.approx(100)
    assert min(step["percent"].values()) > 0
    assert step["loop_overhead_percent"] == pytest.approx(step["percent"]["agree"] + step["percent"]["rest"])
    assert result["steps"] >= MIN_WINDOWS
    assert result["skipped_steps"] == 0
    assert result["share_of_compute"] == pytest.approx(result["views_per_s"] / result["compute"]["views_per_s"])
    assert trace.stat().st_size > 0


def test_a_checkpoint_is_measured_in_the_folder_that_is_named(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "step_00000001.pt").write_text("of another program")
    result = bench("checkpoint", *bench.experiment, "--seconds", "0.1", "--folder", str(tmp_path))
    assert [path.name for path in tmp_path.glob("*step*")] == ["step_00000001.pt"]
    assert not list(tmp_path.glob("bench*")), "its own files are deleted"
    assert result["bytes"] > 3 * 4 * result["parameters"], "the weights and Adam's two moments"
    assert result["stall_ms"]["windows"] == result["write_s"]["windows"] >= 3
    assert 0 < result["stall_ms"]["median"] < 1000 * result["write_s"]["median"]
    assert result["percent_of_loop"]["standing_still"] == pytest.approx(result["stall_ms"]["median"] / 3000)


def test_growth_has_a_point_for_each_size(bench: Bench, tmp_path: Path) -> None:
    lines = ["--lines", "num_views", "images_per_rank", "embedding_size"]
    argv = ["--data.images_per_step", "32", "--seconds", "1", "--plot", str(tmp_path / "growth.png")]
    result = bench("growth", *bench.experiment, *lines, *argv)
    points = {
        line["line"]: {p[line["line"]]: p["figure"]["median"] for p in line["points"]} for line in result["lines"]
    }
    assert list(points["num_views"]) == [1, 2, 4, 8]
    assert points["num_views"][1] < points["num_views"][8]
    assert list(points["images_per_rank"]) == [16, 32, 64]
    assert list(points["embedding_size"]) == [8, 16]  # slices of 32 rows divide 32 images, larger ones do not
    assert (tmp_path / "growth.png").stat().st_size > 0


def test_a_point_that_does_not_fit_says_why(bench: Bench) -> None:
    argv = ["--optimizer.accumulation_steps", "2", "--data.images_per_step", "32", "--seconds", "0.1"]
    result = bench("growth", *bench.experiment, *argv, "--lines", "images_per_rank")
    small, *others = result["lines"][0]["points"]
    assert "accumulation_steps" in small["not_run"]
    assert all("figure" in point for point in others)


def test_all_go_on_where_a_part_fails(
    bench: Bench, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", str(tiny_config), "--data.root", str(tmp_path / "nowhere"), "--seconds", "1"]
    assert main(["bench", "all", *argv]) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result["failed_parts"] == ["loader", "end2end"]
    assert "nowhere" in result["parts"]["loader"]["error"]
    assert "nowhere" in printed.err
    found = {(row["part"], row["what"]): row["value"] for row in result["summary"]}
    assert found["compute", "step alone"] == result["parts"]["compute"]["views_per_s"]
    assert found["loss", "against the loop"] > 0
    assert found["checkpoint", "the loop stands still for a save"] > 0


def test_the_settings_of_the_method_do_not_concern_a_loader(tiny_config: Path) -> None:
    settings = ["--wmse.slice_size", "256"]  # more than the 16 images of a step
    with pytest.raises(InputError, match="slice_size"):
        load_config(tiny_config, settings)
    assert load_config(tiny_config, settings, check_method=False).wmse.slice_size == 256


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("loader", "--config"),
        ("compute --config TINY --sweep", "sweep"),
        ("loader --config TINY --profile trace.json", "profile"),
        ("compute --config TINY --seconds 0", "give a time above 0"),
        ("compute --config TINY --seconds nan", "give a time above 0"),
        ("compute --config TINY --out .", "is a folder; name a file"),
        ("compute --config TINY --plot x.txt", "ends in .png"),
        ("compute --config TINY --profile nowhere/x.json", "there is no folder nowhere"),
        ("checkpoint --config TINY --folder nowhere", "there is no such folder"),
        ("loss --plot x.png", "nothing to draw"),
        ("loss --shapes 2,16", "--shapes '2,16'"),
        ("loss --sweep --shapes 2,16,8,4,1", "give one of them"),
        ("loss --config x.yaml", "no config file x.yaml"),
        ("loss --config TINY --ranks 3", "3 ranks can't share evenly"),
        ("loss --config TINY --ranks 0", "--ranks is 0"),
        ("loss --ranks 2 --wmse.eps 1e-4", "no use for --ranks --wmse.eps 1e-4 without --config"),
    ],
)
def test_what_has_no_effect_is_refused(
    argv: str, message: str, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", *argv.replace("TINY", str(tiny_config)).split()])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_torchrun_starts_only_kinds_that_measure_several_ranks(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["bench", "loader", "--config", str(tiny_config)]) == 2
    assert "measures one process" in capsys.readouterr().err
