"""wmse reproduce: what is refused, what is not done again, the verdict, the curve, and the page of results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, TINY
from trainer.cli import main
from trainer.config.loading import load_config, save_config
from trainer.errors import PREEMPTED
from trainer.reproduce import curve, data, published
from trainer.reproduce.page import results_page
from trainer.reproduce.published import Published, expected_interval, overall, published_figures, verdict

FACTS = {"title": "tiny", "classes": 2, "train_images": 48, "test_images": 16}


@pytest.fixture(scope="module", autouse=True)
def published_row() -> Iterator[None]:
    """Let a row be published for the tiny config, which any figure reaches, and facts be known about its images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(published.OWN, "tiny", row([0.0, 100.0], [0.0, 100.0]))
        patch.setitem(data.SETS, "tiny", FACTS)
        yield


def row(linear: list[float], knn: list[float]) -> dict[str, Any]:
    """Return a published row. Two seeds that are far apart give an interval that holds every figure."""
    return {"source": "a planted row", "top1": {"linear": linear, "knn": knn}}


@pytest.fixture(scope="module")
def finished(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that `wmse reproduce` has trained, measured and judged."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(TINY)
    words = ["--data.root", str(tiny_set), "--run_dir", str(folder / "run")]
    assert main(["reproduce", str(folder / "tiny.yaml"), *words]) == 0
    return folder / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that run, which the test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a training or an evaluation fail the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this was done already, or must not be started")

    monkeypatch.setattr("trainer.loop.pretrain", refuse)
    monkeypatch.setattr("trainer.evaluate.run.run_evaluation", refuse)


def reproduce(config: Path, root: Path, run_dir: Path, *words: str) -> int:
    return main(["reproduce", str(config), "--data.root", str(root), "--run_dir", str(run_dir), *words])


def reproduction(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "reproduction.json").read_text())


# --- what is refused ---


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"train_images": 47}, "images of train: 47 -> 48"),
        ({"test_images": 17}, "images of val: 17 -> 16"),
        ({"classes": 3}, "classes of val: 3 -> 2"),
        ({"digests": {"val": "abc"}}, "digest of val: abc -> "),
        ({"class_list": "imagenet100_classes.txt"}, "names of the classes of train: imagenet100_classes.txt, line 3: "),
    ],
)
def test_data_that_differs_is_refused(
    facts: dict[str, Any],
    problem: str,
    tiny_config: Path,
    tiny_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(data.SETS, "tiny", FACTS | facts)
    assert reproduce(tiny_config, tiny_set, tmp_path / "run") == 2
    shown = capsys.readouterr().err
    assert "because the data differ" in shown
    assert problem in shown


def test_a_set_with_more_classes_than_the_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("cats\n")
    assert data._other_names("val", ["cats"], tmp_path / "list.txt") == []
    (found,) = data._other_names("val", ["cats", "dogs"], tmp_path / "list.txt")
    assert found == "names of the classes of val: 1 are not in list.txt, such as dogs"


@pytest.mark.usefixtures("refused")
def test_settings_that_change_the_result_are_named(
    tiny_config: Path, tiny_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = ("--seed", "3", "--data.threads", "2", "--log.every_steps", "9")
    changed = (
        "--lr",
        "0.1",
        "--knn.k",
        "3",
        "--max_steps",
        "2",
        "--views.eval_resize",
        "40",
        "--data.test_split",
        "train",
    )
    assert reproduce(tiny_config, tiny_set, tmp_path / "run", *harmless, *changed) == 2
    shown = capsys.readouterr().err
    listed = [line.removeprefix("  - ") for line in shown.splitlines() if line.startswith("  - ")]
    assert sorted(listed) == [
        "data.test_split: val -> train",
        "knn.k: 5 -> 3",
        "max_steps: 0 -> 2",
        "optimizer.learning_rate: 0.001 -> 0.1",
        "views.eval_resize: 32 -> 40",
    ]


@pytest.mark.usefixtures("refused")
def test_a_changed_copy_of_a_recipe_and_a_run_with_other_settings_are_refused(
    tiny_config: Path, tiny_set: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = (ROOT / "configs" / "demo_fashion_mnist.yaml").read_text()
    copy = tmp_path / "demo_fashion_mnist.yaml"
    copy.write_text(recipe.replace("epochs: 6", "epochs: 60"))
    assert reproduce(copy, tiny_set, tmp_path / "new") == 2
    assert "optimizer.epochs: 6 -> 60" in capsys.readouterr().err
    # `wmse launch` may have trained the run with other settings.
    trained = load_config(run_dir / "config.yaml", ["--wmse.eps", "0.5"])
    save_config(trained, run_dir / "config.yaml")
    assert reproduce(tiny_config, tiny_set, run_dir) == 2
    assert "wmse.eps: 0.0 -> 0.5" in capsys.readouterr().err


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("words", [(), ("--check",)])
def test_a_run_of_another_seed_is_not_judged_as_this_one(
    words: tuple[str, ...], tiny_config: Path, tiny_set: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(tiny_config, tiny_set, run_dir, "--seed", "4", *words) == 2
    assert "holds a run of seed 0, not 4: add --seed 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no recipe is given"),
        (["cifar10_rn18_wmse4_100ep"], "did you mean cifar10_rn18_wmse4_1000ep?"),
        (["cifar10_rn18_wmse4_1000ep"], "run_dir is not set"),
        (["cifar10_rn18_wmse4_1000ep", "--run_dir", "new"], "data.root is not set"),
        (["cifar10_rn18_wmse4_1000ep", "--run_dir", "new", "--check"], "there is no stored curve of cifar10"),
        (["demo_fashion_mnist", "--run_dir", "new", "--check"], "has no measured checkpoint"),
    ],
)
def test_bad_input_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words]) == 2
    assert problem in capsys.readouterr().err


# --- what is done, and what is not done again ---


@pytest.mark.usefixtures("refused")
def test_a_finished_run_is_only_judged(tiny_config: Path, tiny_set: Path, run_dir: Path) -> None:
    before = reproduction(run_dir)
    assert reproduce(tiny_config, tiny_set, run_dir) == 0
    after = reproduction(run_dir)
    for content in (before, after):
        del content["time"], content["load_average_5_min"]
    assert after == before
    assert after["training"]["steps"] == 9
    assert after["training"]["seconds"] > 0
    assert "cpu (" in after["training"]["device"]
    assert after["data"]["val"]["images"] == 16
    assert str(run_dir.parent) not in json.dumps(after), "the file must name no folder of this machine"


def test_a_missing_result_is_measured_without_training(
    tiny_config: Path, tiny_set: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.loop.pretrain", None)
    (run_dir / "eval" / "knn_9.json").unlink()
    # A result of other images does not count.
    file = run_dir / "eval" / "linear_9.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"test_fingerprint": "other"}))
    assert reproduce(tiny_config, tiny_set, run_dir) == 0
    assert set(reproduction(run_dir)["figures"]) == {"linear", "knn"}
    assert json.loads(file.read_text())["test_fingerprint"] != "other"


@pytest.mark.parametrize(("training", "code"), [(PREEMPTED, PREEMPTED), (1, 1), (2, 2), (0, 1)])
def test_a_training_that_does_not_end_gives_its_exit_code(
    training: int,
    code: int,
    tiny_config: Path,
    tiny_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that `wmse stop` has ended has exit code 0, but is not finished."""
    monkeypatch.setattr("trainer.loop.pretrain", lambda *_: training)
    assert reproduce(tiny_config, tiny_set, tmp_path / "run") == code
    assert ("the run is not finished" in capsys.readouterr().out) == (training == 0)
    assert not (tmp_path / "run" / "reproduction.json").exists()


# --- the verdict ---


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(("offset", "expected", "code"), [(4, "below", 1), (1, "reached", 0), (-4, "above", 0)])
def test_the_interval_decides(
    offset: float,
    expected: str,
    code: int,
    tiny_config: Path,
    tiny_set: Path,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The figure of k-NN is never the worst, so the linear one decides."""
    for protocol in ("linear", "knn"):
        file = run_dir / "eval" / f"{protocol}_9.json"
        content = json.loads(file.read_text()) | {"top1": 50.0, "test_images": 10_000}
        file.write_text(json.dumps(content))
    monkeypatch.setitem(published.OWN, "tiny", row([50.0 + offset], [50.0 + min(offset, 0)]))
    assert reproduce(tiny_config, tiny_set, run_dir) == code
    content = reproduction(run_dir)
    assert content["verdict"] == content["figures"]["linear"]["verdict"] == expected
    assert content["differences"] == []
    shown = capsys.readouterr().out
    assert f"verdict: {expected}" in shown
    assert "a spread over seeds of 0.30 points (assumed)" in shown


def test_accepted_changes_are_named_in_the_verdict(
    tiny_config: Path, tiny_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--allow_changes", "true", "--optimizer.epochs", "1", "--optimizer.warmup_steps", "1", "--knn.k", "3")
    assert reproduce(tiny_config, tiny_set, tmp_path / "run", *words) == 0
    differences = reproduction(tmp_path / "run")["differences"]
    assert {"optimizer.epochs: 3 -> 1", "optimizer.warmup_steps: 2 -> 1", "knn.k: 5 -> 3"} <= set(differences)
    assert "not the published recipe: " in capsys.readouterr().out


def test_the_interval_combines_chance_and_seeds() -> None:
    # 1.96 sqrt(0.92 0.08 / 10000) is 0.53 points, 1.96 * 0.3 sqrt(2) is 0.83.
    low, high = expected_interval(Published(92.0, "", 0.3), 10_000)
    assert (92 - low, high - 92) == pytest.approx((0.99, 0.98), abs=0.01)
    # The mean of many runs is known exactly, and without a spread only chance is left.
    assert expected_interval(Published(92.0, "", 0.0), 10_000)[0] == pytest.approx(92 - 0.55, abs=0.01)
    narrow = expected_interval(Published(92.0, "", 0.3, runs=1000), 10_000)
    assert narrow[0] == pytest.approx(92 - 0.80, abs=0.01)
    assert [verdict(top1, (90.0, 91.0)) for top1 in (89.99, 90.0, 91.0, 91.01)] == [
        "below",
        "reached",
        "reached",
        "above",
    ]
    assert overall(["above", "reached"]) == "reached"
    assert overall(["above", "no published figure"]) == "above"
    assert overall(["above", "below", "reached"]) == "below"
    assert overall(["no published figure"]) == "no published figure"


def test_each_row_is_judged_by_the_protocol_of_its_source() -> None:
    assert set(published_figures("imagenet_rn50_wmse4_100ep")) == {"linear"}
    assert set(published_figures("imagenet_rn50_moco_100ep")) == {"linear_sgd"}
    assert published_figures("cifar10_rn18_wmse4_1000ep")["knn"].top1 == 89.87
    assert published_figures("cifar10_rn18_wmse4_zca_1000ep") == {}
    demo = published_figures("demo_fashion_mnist")["knn"]
    assert (demo.runs, demo.spread_source) == (3, "of 3 seeds")


# --- the curve ---


@pytest.mark.parametrize(("top1", "word", "code"), [(0.0, "ahead", 0), (50.0, "as expected", 0), (100.0, "behind", 1)])
def test_a_checkpoint_is_compared_with_the_curve(
    top1: float,
    word: str,
    code: int,
    tiny_config: Path,
    tiny_set: Path,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = run_dir / "eval" / "knn_9.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"top1": 50.0}))
    # The run ends after epoch 3, in the middle between two points.
    content = {"source": "planted", "epochs": [1, 2, 4], "top1": {"knn": [[0.0, 0.0], [top1, top1], [top1, top1]]}}
    (tmp_path / "tiny.json").write_text(json.dumps(content))
    monkeypatch.setattr(curve, "CURVES", tmp_path)
    monkeypatch.setattr("trainer.loop.pretrain", None)
    assert reproduce(tiny_config, tiny_set, run_dir, "--check") == code
    assert f" {word} " in capsys.readouterr().out
    # The curve says nothing about a later epoch.
    content["epochs"] = [1, 2, 2.5]
    (tmp_path / "tiny.json").write_text(json.dumps(content))
    assert reproduce(tiny_config, tiny_set, run_dir, "--check") == 2


def test_the_stored_curve_ends_at_the_published_row() -> None:
    for name, own in published.OWN.items():
        if name == "tiny":
            continue
        stored = json.loads((curve.CURVES / f"{name}.json").read_text())
        assert {protocol: by_epoch[-1] for protocol, by_epoch in stored["top1"].items()} == own["top1"]


# --- the page ---


def test_the_page_of_results_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(data.SETS, "tiny")
    page = (ROOT / "docs" / "results.md").read_text()
    assert page == results_page(), "run `python -m trainer.reproduce.page > docs/results.md`"


def test_the_page_has_a_line_for_each_recipe_and_each_reproduction(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(data.SETS, "tiny")
    content = reproduction(finished) | {"config": "cifar10_rn18_wmse4_1000ep", "note": "a note"}
    for file in ("a.json", "b.json"):
        (tmp_path / file).write_text(json.dumps(content))
    page = results_page(tmp_path)
    for path in (ROOT / "configs").glob("*ep.yaml"):
        assert f"\n| `{path.stem}` | " in page
    lines = [line for line in page.splitlines() if line.startswith("| `cifar10_rn18_wmse4_1000ep`")]
    assert [line.split(" | ")[1] for line in lines] == ["91.99 / 89.87"] * 2
    assert "(../benchmarks/results/reproductions/b.json)" in lines[1]
    assert "- `a.json`: a note" in page
    assert page.count("| not run |") == len(list((ROOT / "configs").glob("*ep.yaml")))
