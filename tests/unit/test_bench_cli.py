"""wmse bench: each kind measures, prints JSON on the last line, and refuses options that it does not use."""

import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import TINY
from trainer.bench.phases import PHASES
from trainer.bench.timing import MIN_WINDOWS
from trainer.cli import main
from trainer.config.loading import load_config
from trainer.errors import InputError

pytestmark = pytest.mark.slow


def run(argv: Sequence[str]) -> tuple[int, dict[str, Any], str]:
    """Run `wmse bench` in this process. Return its exit code, its JSON and its stderr."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(["bench", *argv])
    return code, json.loads(out.getvalue().splitlines()[-1]), err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the files of `everything`."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def everything(folder: Path) -> tuple[int, dict[str, Any], str]:
    """Return the output of `wmse bench all` with a missing set: loader and end2end fail, the others measure."""
    config = folder / "tiny.yaml"
    config.write_text(TINY)
    (folder / "step_00000001.pt").write_text("of another program")
    files = ["--folder", str(folder), "--out", str(folder / "out.json"), "--plot", str(folder / "plot.png")]
    return run(["all", "--config", str(config), "--data.root", str(folder / "nowhere"), "--seconds", "0.8", *files])


def test_a_part_that_fails_gives_a_reason_and_the_others_are_measured(everything: Any, folder: Path) -> None:
    code, result, shown = everything
    assert code == 1
    assert result["failed_parts"] == ["loader", "end2end"]
    assert "nowhere" in result["parts"]["loader"]["error"]
    assert "nowhere" in shown
    found = {(row["part"], row["what"]): row["value"] for row in result["summary"]}
    assert found["compute", "step alone"] == result["parts"]["compute"]["views_per_s"]
    assert found["loss", "against the loop"] > 0
    assert result == json.loads((folder / "out.json").read_text())
    assert result["overrides"] == ["--data.root", str(folder / "nowhere")]
    with Image.open(folder / "plot.png") as picture:
        assert len(picture.convert("L").getcolors(256) or []) > 10, "more than an empty page"


def test_the_step_is_measured_without_images(everything: Any) -> None:
    result = everything[1]["parts"]["compute"]
    assert result["views_per_s"] * result["step_ms"]["median"] == pytest.approx(16 * 2 * 1e3, rel=0.2)
    assert (result["images_per_step"], result["num_views"], result["side"]) == (16, 2, 32)
    assert (result["skipped_steps"], result["ranks"], result["precision"]) == (0, 1, "float32")
    assert set(result["phases"]["host_ms"]) == set(PHASES)
    assert sum(result["phases"]["percent"].values()) == pytest.approx(100)
    roofline = result["roofline"]
    by_flop = roofline["matmul_tflops"] * 1e12 / roofline["flop_per_view"]
    by_traffic = roofline["copy_gb_per_s"] * 1e9 / roofline["bytes_per_view"]
    assert roofline["roofline_views_per_s"] == pytest.approx(min(by_flop, by_traffic))
    assert roofline["flop_utilisation"] == pytest.approx(result["views_per_s"] / by_flop)


def test_a_checkpoint_is_measured_in_the_given_folder(everything: Any, folder: Path) -> None:
    assert [path.name for path in folder.glob("*step*")] == ["step_00000001.pt"]
    assert not list(folder.glob("bench*")), "the benchmark must delete its files"
    result = everything[1]["parts"]["checkpoint"]
    assert result["bytes"] > 3 * 4 * result["parameters"], "the weights and Adam's two moments"
    assert result["stall_ms"]["windows"] == result["write_s"]["windows"] >= 3
    assert 0 < result["stall_ms"]["median"] < 1000 * result["write_s"]["median"]
    assert result["percent_of_loop"]["standing_still"] == pytest.approx(result["stall_ms"]["median"] / 3000)


def test_the_parts_of_the_loop_add_up(tiny_config: Path, tiny_set: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    argv = ["--config", str(tiny_config), "--data.root", str(tiny_set), "--seconds", "0.5", "--profile", str(trace)]
    code, result, _ = run(["end2end", *argv])
    assert code == 0
    step = result["step"]
    assert sum(step["host_ms"].values()) == pytest.approx(step["step_ms"])
    assert sum(step["percent"].values()) == pytest.approx(100)
    assert min(step["percent"].values()) > 0
    assert step["loop_overhead_percent"] == pytest.approx(step["percent"]["agree"] + step["percent"]["rest"])
    assert result["steps"] >= MIN_WINDOWS
    assert result["skipped_steps"] == 0
    assert result["share_of_compute"] == pytest.approx(result["views_per_s"] / result["compute"]["views_per_s"])
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert set(PHASES) <= names


def test_methods_are_compared_at_the_same_number_of_views(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    sweep = tmp_path / "sweep.yaml"
    rows = "  two: {views.num_views: 2}\n  four: {views.num_views: 4}\n  vicreg: {method: vicreg}\n"
    sweep.write_text(f"config: {tmp_path / 'tiny.yaml'}\nrows:\n{rows}")
    code, result, table = run(["methods", str(sweep), "--seconds", "0.2", "--views", "64"])
    assert code == 0
    assert result["views_per_step"] == 64
    for name in ("two", "four", "vicreg"):
        assert result["figures"][name]["windows"] >= MIN_WINDOWS
        assert result["times"][name] == pytest.approx(
            result["figures"][name]["median"] / result["figures"]["two"]["median"]
        )
        assert name in table
    with pytest.raises(SystemExit):
        run(["methods"])
    assert main(["bench", "methods", str(sweep), "--views", "40"]) == 2  # 10 images of 4 views fill no slice


def test_growth_has_a_point_or_a_reason_for_each_size(tiny_config: Path, tmp_path: Path) -> None:
    settings = ["--data.images_per_step", "32", "--optimizer.accumulation_steps", "2"]
    argv = ["--config", str(tiny_config), *settings, "--seconds", "0.2"]
    plot = ["--plot", str(tmp_path / "growth.png")]
    code, result, _ = run(["growth", "--lines", "images_per_rank", "embedding_size", *argv, *plot])
    assert code == 0
    points = {line["line"]: {point[line["line"]]: point for point in line["points"]} for line in result["lines"]}
    assert list(points["images_per_rank"]) == [16, 32, 64]
    assert "accumulation_steps" in points["images_per_rank"][16]["not_run"], "16 images are one slice"
    assert list(points["embedding_size"]) == [8, 16]  # 32 images cannot be divided into slices of more than 32 rows
    assert points["images_per_rank"][64]["figure"]["windows"] >= MIN_WINDOWS
    assert (tmp_path / "growth.png").stat().st_size > 0


def test_a_loader_is_measured_without_a_check_of_the_method(tiny_config: Path) -> None:
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
        ("compute --config TINY --seconds 0", "give a number of seconds above 0"),
        ("compute --config TINY --seconds nan", "give a number of seconds above 0"),
        ("compute --config TINY --out .", "is a folder: give the name of a file"),
        ("compute --config TINY --plot x.txt", "ends in .png"),
        ("compute --config TINY --profile nowhere/x.json", "the folder nowhere does not exist"),
        ("checkpoint --config TINY --folder nowhere", "nowhere: this folder does not exist"),
        ("loss --plot x.png", "nothing to draw"),
        ("loss --shapes 2,16", "--shapes '2,16'"),
        ("loss --sweep --shapes 2,16,8,4,1", "give only one of them"),
        ("loss --config x.yaml", "the file x.yaml does not exist"),
        ("loss --config TINY --ranks 3", "cannot be divided evenly among 3 ranks"),
        ("loss --config TINY --ranks 0", "--ranks is 0"),
        ("loss --ranks 2 --wmse.eps 1e-4", "uses --ranks --wmse.eps 1e-4 only together with --config"),
    ],
)
def test_options_without_an_effect_are_refused(
    argv: str, message: str, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", *argv.replace("TINY", str(tiny_config)).split()])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_benchmark_of_one_process_refuses_several_ranks(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["bench", "loader", "--config", str(tiny_config)]) == 2
    assert "measures a single process" in capsys.readouterr().err
