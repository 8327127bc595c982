"""wmse report writes one page that needs no other file, whatever the run folder holds."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import scipy.stats
import torch

from tests.conftest import TINY, write_images
from trainer.cli import main
from trainer.config.loading import load_settings
from trainer.evaluate.features import Features
from trainer.evaluate.run import run_evaluation
from trainer.loop import pretrain
from trainer.report.cli import write_report
from trainer.report.collect import Result, Run
from trainer.report.health import spearman
from trainer.report.paper import PAPER, compare
from trainer.report.pictures import find_neighbours
from trainer.report.plots import thin_out
from trainer.report.tables import figure_table
from trainer.run.signals import StopRequest

pytestmark = pytest.mark.slow  # most tests draw a page, or train
ROOT = Path(__file__).parents[2]
SCRIPT = "<script>alert(1)<"  # a folder cannot hold the slash of a closing tag
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an evaluated run whose classes have unpleasant names."""
    folder = tmp_path_factory.mktemp("finished")
    for split, count in (("train", 16), ("val", 8)):
        for number, name in enumerate((SCRIPT, "$x^$")):
            write_images(folder / "set" / split / name, count, seed=number + 10 * (split == "val"))
    (folder / "tiny.yaml").write_text(TINY)
    words = ["--data.root", str(folder / "set"), "--run_dir", str(folder / "run"), "--max_steps", "2"]
    config, sources = load_settings([folder / "tiny.yaml"], words)
    assert pretrain(config, StopRequest(), sources) == 0
    run_evaluation(folder / "run", "last", [], ("linear", "knn", "diagnostics"))
    run_evaluation(folder / "run", "random", [], ("knn",))
    return folder / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that run, which the test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def page_of(*folders: Path, num_images: int = 0, out: Path | None = None) -> str:
    return write_report(folders, out, num_images).read_text()


def texts(page: str) -> str:
    """Return what a reader sees, roughly: the page without tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


@pytest.fixture(scope="module")
def full_page(finished: Path) -> str:
    """Return the page of the run with all pictures."""
    return page_of(finished, num_images=12)


def test_the_page_shows_figures_classes_and_pictures(full_page: str, finished: Path) -> None:
    result = json.loads((finished / "eval" / "linear_2.json").read_text())
    seen = texts(full_page)
    assert f"{result['top1']:.2f}" in seen
    assert "{:.1f} to {:.1f}".format(*result["interval95"]) in seen
    assert "12 of 32 images of the split 'train'" in seen
    assert re.search(r"The two principal axes explain [\d.]+ % of the variance", seen)
    # Each of the eight test images has five neighbours, each of which is right or wrong.
    assert len(re.findall(r'class="thumb (?:right|wrong)"', full_page)) == 8 * 5
    assert seen.count("✓") + seen.count("✗") >= 8 * 5
    assert not re.search("no metrics yet|no evaluation yet|Not shown", seen)
    assert re.search(r"python [\d.]+, .*dali [\d.]+.*, timm [\d.]+", seen)


def test_a_neighbour_is_right_if_its_class_is_that_of_the_test_image(full_page: str) -> None:
    table = full_page[full_page.index('<table class="neighbours">') :]
    captions = re.findall(r"thumb ?(\w*)\".*?<figcaption>(?:<b.*?/b> )?(.*?)</figcaption>", table, re.DOTALL)
    rows = [captions[first : first + 6] for first in range(0, 48, 6)]
    for (_, asked), *found in rows:
        assert [mark for mark, _ in found] == ["right" if name == asked else "wrong" for _, name in found]
    assert {mark for mark, _ in captions} == {"", "right", "wrong"}


def test_the_page_loads_nothing(full_page: str) -> None:
    sources = re.findall(r'(?:src|href)="([^"]*)"', full_page)
    assert len(sources) > 60
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert "url(" not in full_page
    assert "@import" not in full_page


def test_names_are_escaped(full_page: str) -> None:
    assert "<script" not in full_page
    assert html.escape(SCRIPT) in full_page
    assert "$x^$" in full_page


def test_a_run_folder_with_quotes_and_other_bytes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = Path(os.fsdecode(os.fsencode(run_dir.parent) + b"/a\"'<b>\xff"))
    run_dir.rename(odd)
    assert main(["report", str(odd), "--no_images"]) == 0
    page = (odd / "report.html").read_text()
    assert "<b>" not in page.replace("<b aria", "")
    assert "<title>a&#34;&#39;&lt;b&gt;\\udcff</title>" in page
    assert capsys.readouterr().out.endswith("\\udcff/report.html\n")


def test_damaged_files_are_named(run_dir: Path) -> None:
    (run_dir / "eval" / "knn_2.json").write_text('{"figures": ["to')
    (run_dir / "eval" / "linear_7.json").write_text('{"figures": 3}')
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    (run_dir / "state.json").write_text("")
    (run_dir / "config.yaml").write_text("data: {root: [")
    seen = texts(page_of(run_dir, num_images=12))
    for problem in (
        "eval/knn_2.json is damaged",
        "eval/linear_7.json is not a result",
        "metrics.jsonl has 1 damaged or incomplete lines",
        "state.json is damaged",
        "cannot read config.yaml",
        "images need the settings in config.yaml",
    ):
        assert problem in seen


def test_signs_of_a_collapse_are_warnings(run_dir: Path) -> None:
    path = run_dir / "eval" / "diagnostics_2.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"warnings": ["the encoder has collapsed"]}))
    assert '<p class="warning">⚠ run: the encoder has collapsed</p>' in page_of(run_dir)


def test_odd_values_in_a_result_are_left_out(run_dir: Path) -> None:
    path = run_dir / "eval" / "knn_2.json"
    odd = {
        "top1": None,
        "interval95": "wide",
        "per_class_top1": {"a": "b"},
        "confusions": [1],
        "label": 5,
        "settings": [],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    assert "linear" in texts(page_of(run_dir))


def test_health_stands_beside_the_accuracy_of_the_checkpoints(run_dir: Path) -> None:
    """The line of a checkpoint is the last one up to its step; RankMe falls while the accuracy grows."""
    lines = [{"step": step, "epoch": step / 10, "rankme": 50.0 - step, "lidar": 5.0} for step in (1, 2, 4, 5)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = json.loads((run_dir / "eval" / "knn_2.json").read_text())
    for step, top1 in ((2, 10.0), (4, 20.0), (6, 30.0)):
        (run_dir / "eval" / f"knn_{step}.json").write_text(
            json.dumps(content | {"step": step, "checkpoint": str(step), "top1": top1})
        )
    page = page_of(run_dir)
    assert re.search(r"RankMe and 5-nn, top-1: -1.00, a correlation over 3 checkpoints", texts(page))
    assert "LiDAR and 5-nn" not in page  # it is constant
    assert "LiDAR of the embeddings" in page


def test_the_rank_correlation_is_that_of_scipy() -> None:
    x, y = [3.0, 1.0, 2.0, 2.0, 9.0, 4.0], [1.0, 0.5, 7.0, 7.0, 8.0, 0.5]
    assert spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert spearman([1.0, 1.0], [1.0, 2.0]) is None
    assert spearman([], []) is None


def test_a_run_that_has_not_begun_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "launch.json").write_text("{}")
    (tmp_path / "run" / "state.json").write_text('{"status": "running", "heartbeat": 1e18}')
    seen = texts(page_of(tmp_path / "run", num_images=12))
    for sentence in ("running", "run has no metrics yet", "run has no evaluation yet", "There are no figures yet"):
        assert sentence in seen


def test_without_the_data_set_the_page_says_what_is_missing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_dir / "config.yaml"
    config.write_text(re.sub(r"root: .*", "root: /nowhere/at/all", config.read_text()))
    assert main(["report", str(run_dir)]) == 0
    seen = texts((run_dir / "report.html").read_text())
    log = capsys.readouterr().err
    for missing in ("no views: ", "no neighbours and no map: "):
        assert missing in seen
        assert missing in log
    assert "/nowhere/at/all" in seen


def test_runs_side_by_side_show_their_differences(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(run_dir, tmp_path / "other"))
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 0.001", "learning_rate: 0.002"))
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run_dir), str(other), "--no_images"]) == 0
    seen = texts((tmp_path / "report.html").read_text())
    differences = seen[seen.index("Differences between the runs") : seen.index("Settings that differ")]
    assert re.search(r"optimizer\.learning_rate\s+0\.001\s+0\.002", differences)
    assert "wmse.slice_size" not in differences


def test_images_without_classes_are_shown_too(run_dir: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "plain" / "train", 20, seed=5)
    config = run_dir / "config.yaml"
    config.write_text(re.sub(r"root: .*", f"root: {tmp_path / 'plain'}", config.read_text()))
    words = ["--max_steps", "2", "--run_dir", str(tmp_path / "unlabelled"), "--data.train_split", "train"]
    loaded = load_settings([config], words)
    assert pretrain(loaded.config, StopRequest(), loaded.sources) == 0
    page = page_of(tmp_path / "unlabelled", num_images=12)
    assert "thumb right" not in page
    assert page.count('<figure class="thumb">') == 6 * 8


def test_bad_options_are_refused_before_the_work(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, problem in (
        ([run_dir, "--out", run_dir], "is a folder: give the name of a file"),
        ([run_dir / "checkpoints"], "holds no run"),
        ([run_dir, "--images", "1"], "--images is 1"),
    ):
        assert main(["report", *map(str, words)]) == 2
        assert problem in capsys.readouterr().err


# --- the paper's figures ---


def paper_run(*words: str) -> Run:
    """Return a finished run of the recipe for CIFAR-10, without files."""
    recipe = Path("cifar10_rn18_wmse4_1000ep")
    config, sources = load_settings([recipe], ["--run_dir", "r", "--data.root", "d", *words])
    return Run(Path("r"), "r", {}, {}, config, sources, [], [], {})


def paper_result(**changes: Any) -> Result:
    content = {"train_split": "train", "test_split": "test", "train_images": 50000, "checkpoint_of_this_run": True,
               "settings": {"views.size": 32, "knn.k": 5}}  # fmt: skip
    epoch = changes.pop("epoch", 1000.0)
    return Result("knn_195000.json", "knn", "195000", 195000, epoch, {"top1": 89.9}, content | changes)


def test_the_papers_figure_is_comparable_only_if_nothing_differs() -> None:
    same = compare(paper_run("--seed", "3"), paper_result())
    assert same == (89.87, [])
    for run, result, difference in (
        (paper_run("--optimizer.learning_rate", "1e-3"), paper_result(), "optimizer.learning_rate: 0.003 -> 0.001"),
        (paper_run(), paper_result(epoch=20.0), "epoch: 1000 -> 20"),
        (paper_run(), paper_result(train_images=500), "training images: 50000 -> 500"),
        (paper_run(), paper_result(test_split="val"), "test_split: test -> val"),
        (paper_run(), paper_result(settings={"knn.k": 20}), "knn.k: 5 -> 20"),
    ):
        found = compare(run, result)
        assert found is not None
        assert found.differences == [difference]


def test_the_papers_figures_are_those_of_the_documents_and_the_recipes() -> None:
    """Quoted figures have one decimal. Imagenette is not in the paper."""
    table = (ROOT / "docs" / "methods.md").read_text()
    recipes = {file.stem for file in (ROOT / "configs").glob("*ep.yaml")}
    assert set(PAPER) == {name for name in recipes if not name.startswith("imagenette_")}
    for name, figures in PAPER.items():
        head = (ROOT / "configs" / f"{name}.yaml").read_text().splitlines()[0]
        found = [figures[key] for key in ("linear", "knn") if key in figures]
        shown = [" / ".join(f"{value:.{digits}f}" for value in found) for digits in (1, 2)]
        assert any(text in table for text in shown), name
        assert any(text in head for text in shown) or "paper" not in head.lower(), name


def test_long_curves_are_thinned_out_and_keep_their_ends() -> None:
    x, _ = thin_out(range(12_345), range(12_345))
    assert len(x) == 1000
    assert (x[0], x[-1]) == (0, 12_344)
    assert thin_out([1.0], [2.0]) == ([1.0], [2.0])


def test_neighbours_are_the_numbers_of_the_nearest_training_images() -> None:
    def on_a_line(*positions: float) -> Features:
        x = torch.tensor(positions, dtype=torch.float32)[:, None]
        return Features(x, torch.zeros(len(x), dtype=torch.int64), ["one class"], 0)

    found = find_neighbours(on_a_line(5, 1, 9, 3), on_a_line(1.1, 8), torch.device("cpu"))
    assert found == [[1, 3, 0, 2], [2, 0, 3, 1]]


# --- in a browser ---

# A page as narrow as a telephone needs a frame, because the window of a browser has a smallest width.
FRAME = """<!DOCTYPE html><meta charset="utf-8"><script>function check(frame) {
  const page = frame.contentDocument, images = [...page.images];
  document.documentElement.textContent = JSON.stringify({
    images: images.length,
    broken: images.filter(image => !(image.complete && image.naturalWidth > 0)).length,
    headings: [...page.querySelectorAll("h2")].map(heading => heading.textContent),
    width: page.documentElement.scrollWidth,
    window: frame.contentWindow.innerWidth,
    loaded: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
  });
}</script><iframe width="WIDTH" height="900" frameborder="0" onload="check(this)" srcdoc="PAGE"></iframe>"""


@pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_shows_the_page(full_page: str, tmp_path: Path, width: int) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("PAGE", html.escape(full_page)))
    dom, log = browse(frame, tmp_path)
    assert "CONSOLE" not in log
    found = json.loads(html.unescape(re.sub(r"<[^>]*>", "", dom)))
    assert found["images"] > 60
    assert found["broken"] == 0
    assert {"Runs", "Nearest neighbours", "Map of the features"} <= set(found["headings"])
    assert found["window"] == width
    assert found["width"] <= width
    assert found["loaded"] == []


def browse(page: Path, folder: Path) -> tuple[str, str]:
    """Open a page in a headless browser. Returns the document after it was loaded, and the browser's log."""
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
               "--window-size=1300,950", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000",
               "--dump-dom", page.as_uri()]  # fmt: skip
    done = subprocess.run([BROWSER, *options], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr


def result_of(step: str, top1: float, file: str = "", **content: Any) -> Result:
    """Return a result of the linear probe for the table of figures."""
    number = int(step) if step.isdigit() else None
    epoch = None if number is None else number / 10
    found = {"label": "linear", "protocol": "Adam", **content}
    return Result(file or f"linear_{step}.json", "linear", step, number, epoch, {"top1": top1}, found)


def test_the_table_has_a_column_for_each_encoder_and_a_row_for_each_setting() -> None:
    """Baselines come first, and checkpoints of other runs last."""
    results = [
        result_of("100", 70.0),
        result_of("20", 60.0),
        result_of("random", 40.0),
        result_of("pixels", 50.0),
        result_of("100", 75.0, "linear_100_1a2b.json", protocol="Adam, 9 epochs"),
        result_of("30", 55.0, "linear_30_5c6d.json", checkpoint_of_this_run=False),
    ]
    table = figure_table(cast(Run, SimpleNamespace(results=results, sources={}, config=None)))
    assert table.columns == [
        "pixels",
        "untrained",
        "step 20, epoch 2",
        "step 100, epoch 10",
        "30 of another run",
    ]
    rows = [
        (row.how, row.is_of_run, {name: r.figures["top1"] for name, r in row.results.items()}) for row in table.rows
    ]
    assert rows == [
        (
            "Adam",
            True,
            {
                "step 100, epoch 10": 70.0,
                "step 20, epoch 2": 60.0,
                "untrained": 40.0,
                "pixels": 50.0,
                "30 of another run": 55.0,
            },
        ),
        ("Adam, 9 epochs", False, {"step 100, epoch 10": 75.0}),
    ]
