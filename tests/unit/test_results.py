"""Results of evaluations: each measurement has a separate file, and figures are printed if no file can be written."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from trainer.cli import main
from trainer.cluster.runs import newest_evaluation
from trainer.config.loading import load_config
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.evaluate import encoders, evaluator, protocol, results
from trainer.evaluate.run import run_evaluation
from trainer.loop import pretrain
from trainer.run.checkpoint import load_checkpoint, save_checkpoint
from trainer.run.signals import StopRequest


@pytest.fixture(scope="module")
def finished(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one step."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(TINY)
    settings = ["--data.root", str(tiny_set), "--run_dir", str(folder / "run"), "--max_steps", "1"]
    assert pretrain(load_config(folder / "tiny.yaml", settings), StopRequest()) == 0
    return folder / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that run, which the test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def kept(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the results in the run folder by file name."""
    return {path.name: json.loads(path.read_text()) for path in (run_dir / "eval").glob("*.json")}


def knn(run_dir: Path, which: str = "last", *settings: str) -> dict[str, Any]:
    return run_evaluation(run_dir, which, settings, ("knn",))["knn"]


@pytest.mark.slow
def test_results_of_other_settings_have_separate_files(run_dir: Path) -> None:
    own = knn(run_dir)
    expected = {"knn_1.json": own}
    for settings in (
        ("--knn.k", "3"),
        ("--data.test_split", "train"),
        ("--evaluate.precision", "bf16"),
        ("--views.eval_resize", "40", "--evaluate.allow_differences", "true"),
    ):
        other = knn(run_dir, "last", *settings)
        (new,) = set(kept(run_dir)) - set(expected)
        expected[new] = other
        assert kept(run_dir) == expected
    expected[new] = knn(run_dir, "last", *settings)  # the same measurement replaces its file
    assert kept(run_dir) == expected
    newest = newest_evaluation(run_dir, [])
    assert newest is not None
    assert newest["knn_top1"] == own["top1"]


def test_settings_that_do_not_change_the_figure_do_not_change_the_file_name(run_dir: Path) -> None:
    knn(run_dir)
    knn(run_dir, "last", "--linear.epochs", "3", "--data.threads", "2")
    assert set(kept(run_dir)) == {"knn_1.json"}


def test_results_of_another_copy_of_the_set_have_a_separate_file(run_dir: Path, tiny_set: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_set, tmp_path / "copy")
    knn(run_dir)
    other = knn(run_dir, "last", "--data.root", str(tmp_path / "copy"))
    assert {result["data_root"] for result in kept(run_dir).values()} == {str(tiny_set), str(tmp_path / "copy")}
    assert other["train_fingerprint"] == kept(run_dir)["knn_1.json"]["train_fingerprint"]


def test_results_of_a_checkpoint_of_another_run_have_a_separate_file(run_dir: Path, tmp_path: Path) -> None:
    content = load_checkpoint(run_dir / "checkpoints" / "step_00000001.pt")
    content["model"]["encoder.bn1.bias"] += 1
    (tmp_path / "other").mkdir()
    foreign = save_checkpoint(tmp_path / "other", content, 1)
    own, other = knn(run_dir), knn(run_dir, str(foreign))
    assert (own["checkpoint_of_this_run"], other["checkpoint_of_this_run"]) == (True, False)
    assert (other["checkpoint"], other["checkpoint_path"]) == ("1", str(foreign))
    found = kept(run_dir)
    assert found.pop("knn_1.json") == own
    assert list(found.values()) == [other]


def test_results_of_images_that_have_changed_are_kept_under_another_name(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = knn(run_dir)
    original = evaluator.open_splits

    def opened(place: Any) -> Any:
        train, test = original(place)
        test.index.fingerprint = "changed"
        return train, test

    monkeypatch.setattr(evaluator, "open_splits", opened)
    now = knn(run_dir)
    found = kept(run_dir)
    assert found.pop("knn_1.json") == now
    assert list(found.values()) == [before]


def test_a_result_is_written_before_the_next_protocol_starts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    stopped = replace(evaluator.PROTOCOLS["knn"], measure=interrupted)
    monkeypatch.setitem(evaluator.PROTOCOLS, "knn", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(run_dir, "last", [], ("linear", "knn"))
    assert set(kept(run_dir)) == {"linear_1.json"}
    # With --out the results so far are in the file and on stdout.
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(run_dir, "last", [], ("linear", "knn"), run_dir / "out.json")
    found = json.loads((run_dir / "out.json").read_text())
    assert set(found) == {"linear"}
    assert json.loads(capsys.readouterr().out) == found


# --- results that cannot be written ---


def test_figures_are_printed_if_the_folder_cannot_be_written(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command warns before the work and succeeds, because the figures are on stdout."""
    (run_dir / "eval").write_text("in the way")
    assert main(["knn", "--run_dir", str(run_dir)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["knn"]["test_images"] == 16
    assert err.index(f"cannot write to {run_dir / 'eval'}: File exists") < err.index("encoder of step")
    assert "--out FILE" in err
    with pytest.raises(InputError, match="cannot write to"):
        encoders.RunEvaluator(run_dir, [], Ranks()).results.check(must_keep=True)


def test_figures_are_printed_if_the_disk_is_full_at_the_end(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results, "write_text", full)
    assert main(["knn", "--run_dir", str(run_dir)]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["knn"]["test_images"] == 16
    assert f"cannot write the figures above to {run_dir / 'eval'}: No space left on device" in err


def test_out_writes_to_a_new_file_only(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "--run_dir", str(run_dir), "--out", str(tmp_path / "result.json")]
    assert main(arguments) == 0
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(capsys.readouterr().out)
    assert not (run_dir / "eval").exists()
    assert main(arguments) == 2
    assert "exists already: give a new name" in capsys.readouterr().err
    assert main([*arguments[:-1], str(tmp_path / "nowhere" / "result.json")]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_too_many_neighbours_are_refused_before_the_work(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"knn\.k is 49, but the training split has 48 images"):
        knn(run_dir, "last", "--knn.k", "49")
    assert "encoder of step" not in capsys.readouterr().err
    assert knn(run_dir, "last", "--knn.k", "48")["k"] == 48


@pytest.mark.parametrize("which", ["last", "random"])
def test_a_missing_test_split_is_refused_before_images_are_encoded(
    run_dir: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encodes(*_: object) -> None:
        raise AssertionError("images were encoded")

    monkeypatch.setattr(encoders, "untrained_encoder", encodes)
    monkeypatch.setattr(protocol, "extract", encodes)
    with pytest.raises(InputError, match="no split 'nothing'"):
        knn(run_dir, which, "--data.test_split", "nothing")
