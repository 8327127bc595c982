"""`wmse diff` names each kind of difference, and resumed runs that repeat steps say whether these are the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY, write_images
from tests.integration.run_files import checkpoint, metrics
from trainer.cli import main
from trainer.config.loading import load_config
from trainer.loop import pretrain
from trainer.run.checkpoint import save_checkpoint
from trainer.run.signals import StopRequest

Diff = Callable[..., tuple[int, dict[str, Any]]]


def train(folder: Path, name: str, root: Path, *more: str) -> Path:
    """Make a run of 9 steps with a checkpoint after every third one."""
    (folder / "tiny.yaml").write_text(TINY)
    words = ["--data.root", str(root), "--run_dir", str(folder / name), "--checkpoint.every_steps", "3", *more]
    assert pretrain(load_config(folder / "tiny.yaml", words), StopRequest()) == 0
    return folder / name


@pytest.fixture(scope="module")
def run(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that all tests compare with."""
    return train(tmp_path_factory.mktemp("diff"), "run", tiny_set)


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, to change."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture
def diff(run: Path, capsys: pytest.CaptureFixture[str]) -> Diff:
    """Return a function that compares the run with another one."""

    def compare(other: Path) -> tuple[int, dict[str, Any]]:
        code = main(["diff", str(run), str(other), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return compare


def test_equal_runs_are_identical_to_the_end(copy: Path, diff: Diff) -> None:
    code, found = diff(copy)
    assert code == 0
    assert (found["identical_to"], found["parts_at"], found["checkpoints"]["identical"]) == (9, None, 9)
    assert found["verdict"] == "The runs are identical up to step 9, the last one that can be compared."


def test_another_seed_shows_other_images(tiny_set: Path, tmp_path: Path, diff: Diff) -> None:
    code, found = diff(train(tmp_path, "other", tiny_set, "--seed", "1", "--data.threads", "2", "--max_steps", "2"))
    assert code == 1
    marks = {entry["key"]: entry["changes_result"] for entry in found["settings"]}
    assert marks == {"seed": True, "data.threads": False, "max_steps": False}
    assert (found["row"]["step"], found["row"]["row"], found["row"]["value"]) == (0, 0, "image")
    shown = f"shows image {found['row']['a']} instead of {found['row']['b']}"
    assert found["verdict"] == f"They part at step 1: seed differs, so the plan's row 0 of step 0 {shown}."


def test_another_learning_rate_keeps_the_rows(tiny_set: Path, tmp_path: Path, diff: Diff) -> None:
    code, found = diff(train(tmp_path, "other", tiny_set, "--optimizer.learning_rate", "2e-3", "--max_steps", "3"))
    assert code == 1
    assert found["row"] is None
    assert "rows_digest" not in found["metrics"]
    # the first update has the learning rate 0
    assert {name: entry["step"] for name, entry in found["metrics"].items()} == {
        **{"lr": 2, "loss": 3, "effective_rank": 3, "min_pivot": 3},
        **dict.fromkeys(("rankme", "lidar", "condition", "largest_share"), 3),
    }
    begin = "The runs are identical up to step 1. They part at step 2: optimizer.learning_rate differs, and lr is "
    assert found["verdict"].startswith(begin)


def test_other_strength_of_a_colour_is_named_with_its_view(tiny_set: Path, tmp_path: Path, diff: Diff) -> None:
    code, found = diff(train(tmp_path, "other", tiny_set, "--views.hue", "0.1", "--max_steps", "1"))
    assert (code, found["row"]["value"], found["row"]["view"]) == (1, "hue", 0)
    assert found["row"]["a"] == pytest.approx(2 * found["row"]["b"])


def test_a_changed_weight_is_named_with_its_place(copy: Path, diff: Diff) -> None:
    content = checkpoint(copy, 6)
    weight = content["model"]["projector.last.weight"]
    weight[2, 3] += 0.5
    save_checkpoint(copy / "checkpoints", content, 10)
    code, found = diff(copy)
    (tensor,) = found["checkpoints"]["tensors"]
    assert code == 1
    assert (tensor["name"], tensor["first_index"]) == ("model.projector.last.weight", [2, 3])
    assert tensor["largest"] == pytest.approx(0.5)
    assert tensor["relative"] == pytest.approx(0.5 / max(abs(weight[2, 3]), abs(weight[2, 3] - 0.5)).item())
    assert (found["checkpoints"]["different"], found["checkpoints"]["identical"]) == (6, 9)
    assert found["verdict"].startswith("The runs are identical up to step 5. They part at step 6")


def test_a_damaged_checkpoint_is_a_difference(copy: Path, diff: Diff) -> None:
    path = copy / "checkpoints" / "step_00000009.pt"
    path.write_bytes(path.read_bytes()[:1000])
    code, found = diff(copy)
    assert code == 1
    assert "is truncated" in found["checkpoints"]["tensors"][0]["note"]


def test_a_skipped_image_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is damaged between the two runs, which does not change the index."""
    root = tmp_path / "set"
    write_images(root / "train" / "a", 32, seed=1)
    before = train(tmp_path, "before", root, "--data.max_skipped_share", "1")
    victim = root / "train" / "a" / "1_5.JPEG"
    victim.write_bytes(b"no image")
    after = train(tmp_path, "after", root, "--data.max_skipped_share", "1")
    assert main(["diff", str(before), str(after)]) == 1
    shown = capsys.readouterr().out
    (entry,) = [json.loads(line) for line in (after / "quarantine.jsonl").read_text().splitlines()]
    assert f"because only B skipped image {entry['id']} (a/1_5.JPEG:" in shown
    assert f"only B skipped image {entry['id']}, so the plan's row" in shown.splitlines()[-1]
    assert "did not train on the rows" not in shown


def test_another_image_set_is_named(tmp_path: Path, diff: Diff) -> None:
    write_images(tmp_path / "set" / "train" / "a", 48, seed=7, size=(50, 36))
    code, found = diff(train(tmp_path, "other", tmp_path / "set", "--max_steps", "1"))
    assert code == 1
    assert found["data"]["a"]["images"] == found["data"]["b"]["images"] == 48
    assert [entry["key"] for entry in found["settings"] if entry["changes_result"]] == []
    assert "the set of training images differs, so the plan's row 0" in found["verdict"]
    assert "crop" in found["row"]["value"]


def test_other_versions_and_another_commit_are_named(copy: Path, diff: Diff) -> None:
    path = copy / "starts.jsonl"
    start = json.loads(path.read_text())
    second = {**start, "step": 6, "commit": "another", "versions": {**start["versions"], "timm": "0.1"}}
    path.write_text(json.dumps(start) + "\n" + json.dumps(second) + "\n")
    code, found = diff(copy)
    assert code == 0  # the results are the same
    assert {entry["key"]: entry["b"][1] for entry in found["environment"]} == {
        "commit": [6, "another"],
        "timm": [6, "0.1"],
    }


def test_rows_that_the_settings_do_not_give_are_noticed(copy: Path, diff: Diff) -> None:
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines[4:]:
        line["rows_digest"] = "0123456789abcdef"
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, found = diff(copy)
    assert (found["identical_to"], found["parts_at"], found["row"]) == (4, 5, None)
    assert [note[:43] for note in found["notes"]] == ["B did not train on the rows that its files "]


def test_runs_without_digests_and_unfinished_runs_are_compared(copy: Path, diff: Diff) -> None:
    """Such a run was made by an older program, and killed while it wrote a line."""
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if "digest" not in k} for line in lines[:5]]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"step": 6, "lo')
    (copy / "starts.jsonl").unlink()
    shutil.rmtree(copy / "checkpoints")
    code, found = diff(copy)
    assert (code, found["identical_to"], found["checkpoints"]["common"]) == (0, 5, [])
    assert any("rows_digest is not compared" in note for note in found["notes"])


def test_nothing_in_common_and_folders_without_a_run_are_bad_input(copy: Path, run: Path, diff: Diff) -> None:
    shutil.rmtree(copy / "checkpoints")
    (copy / "metrics.jsonl").unlink()
    code, found = diff(copy)
    assert (code, found["verdict"][:38]) == (2, "The runs have no logged step and no ch")
    assert main(["diff", str(run), str(copy.parent)]) == 2


# --- resumed runs ---


def resumed(copy: Path, root: Path, step: int) -> str:
    """Continue a copy from the checkpoint of a step. Return what the log says about repeated steps."""
    for path in (copy / "checkpoints").iterdir():
        if path.name > f"step_{step:08d}.pt":
            path.unlink()
    train(copy.parent, copy.name, root)
    return (copy / "log.txt").read_text().partition("done after step")[2]


def test_a_resumed_run_has_the_digests_of_the_whole_one(copy: Path, run: Path, tiny_set: Path, diff: Diff) -> None:
    log = resumed(copy, tiny_set, 3)
    assert "steps 4 to 9 were made again after the restart and are identical to the first time" in log
    ends = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in (run, copy)]
    assert [end["rows_digest"] for end in ends] == 2 * [ends[0]["rows_digest"]]
    assert [end["loss_digest"] for end in ends] == 2 * [ends[0]["loss_digest"]]
    assert checkpoint(copy, 9)["digests"] == checkpoint(run, 9)["digests"]
    assert int(checkpoint(run, 9)["digests"]["rows"]) % 2**64 == int(ends[0]["rows_digest"], 16)
    assert diff(copy)[0] == 0


def test_a_resumed_run_says_where_it_differs_from_the_first_time(copy: Path, tiny_set: Path) -> None:
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    loss = lines[4]["loss"]
    lines[4]["loss"] = 1.25
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    starts = copy / "starts.jsonl"
    starts.write_text(starts.read_text().replace('"world_size": 1', '"world_size": 2'))
    log = resumed(copy, tiny_set, 3)
    assert (
        f"identical up to step 4, and different from the first time from step 5 on: loss {loss} instead of 1.25" in log
    )
    assert "(the number of ranks changed from 2 to 1, so rounding differs)" in log


def test_a_checkpoint_without_digests_starts_them_anew(copy: Path, tiny_set: Path, diff: Diff) -> None:
    content = checkpoint(copy, 6)
    del content["digests"]
    save_checkpoint(copy / "checkpoints", content, 10)
    log = resumed(copy, tiny_set, 6)
    assert "the checkpoint of step 6 has no digests of rows and losses: they start anew" in log
    assert "steps 7 to 9 were made again after the restart and are identical to the first time" in log
    code, found = diff(copy)
    assert (code, found["identical_to"]) == (0, 9)
    assert any("rows_digest is not compared" in note for note in found["notes"])


# --- deterministic ---


def test_deterministic_runs_are_the_same_and_the_mode_ends_with_them(run: Path, tiny_set: Path, tmp_path: Path) -> None:
    one, two = (train(tmp_path, name, tiny_set, "--deterministic", "true", "--max_steps", "3") for name in "ab")
    assert torch.are_deterministic_algorithms_enabled()
    assert main(["diff", str(one), str(two)]) == 0
    assert metrics(one) == metrics(run)[:3]
    train(tmp_path, "c", tiny_set, "--max_steps", "1")
    assert not torch.are_deterministic_algorithms_enabled()
