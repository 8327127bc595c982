"""Whole runs through the command line: resuming, exit codes, files, and wrong input."""

import errno
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import write_images
from tests.integration.run_files import checkpoint, metrics, state
from tests.unit.test_checkpoint import files_up_to
from trainer.cli import main
from trainer.config.loading import load_config
from trainer.data.decode_cache import SHARED_MEMORY
from trainer.data.index import Index
from trainer.run.checkpoint import save_checkpoint
from trainer.run.checkpoint_files import list_checkpoints
from trainer.run.signals import StopRequest
from trainer.schedule import build_schedule


def pretrain(config: Path, data: Path, run_dir: Path, *more: str) -> int:
    """Run `wmse pretrain` in this process and return its exit code."""
    return main(["pretrain", "--config", str(config), "--data.root", str(data), "--run_dir", str(run_dir), *more])


@pytest.fixture(scope="module")
def whole_run(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run of 9 steps that logs every 2 steps."""
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.yaml").write_text(TINY)
    assert pretrain(folder / "tiny.yaml", tiny_set, folder / "run", "--log.every_steps", "2") == 0
    return folder / "run"


def test_a_run_writes_state_metrics_checkpoint_config_and_log(whole_run: Path, tiny_set: Path) -> None:
    assert state(whole_run) == ("done", 0, 9)
    assert [line["step"] for line in metrics(whole_run)] == [2, 4, 6, 8, 9]
    assert all(0 <= line["loss"] <= 4 and 0 < line["min_pivot"] <= 1 for line in metrics(whole_run))
    rate = build_schedule(load_config(whole_run / "config.yaml", []), steps_per_epoch=3).learning_rate
    assert [line["lr"] for line in metrics(whole_run)] == [rate(step) for step in (1, 3, 5, 7, 8)]
    saved = checkpoint(whole_run, 9)
    assert saved["optimizer"]["param_groups"][0]["lr"] == rate(8)
    assert {name.split(".")[0] for name in saved["model"]} == {"encoder", "projector"}
    config = yaml.safe_load((whole_run / "config.yaml").read_text())
    assert config["data"]["root"] == str(tiny_set)
    assert "done after step 9 of 9" in (whole_run / "log.txt").read_text()


@pytest.mark.parametrize("stops", [(1,), (2, 5), (3,), (8,)])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(
    stops: tuple[int, ...], whole_run: Path, tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    """The run is stopped at several steps, also between two lines of metrics and at the end of an epoch."""
    for step in stops:
        assert (
            pretrain(tiny_config, tiny_set, tmp_path / "run", "--log.every_steps", "2", "--max_steps", str(step)) == 0
        )
        assert state(tmp_path / "run") == ("paused", 0, step)
    assert pretrain(tiny_config, tiny_set, tmp_path / "run", "--log.every_steps", "2") == 0
    assert metrics(tmp_path / "run") == metrics(whole_run)
    ours, whole = checkpoint(tmp_path / "run", 9), checkpoint(whole_run, 9)
    assert all(torch.equal(ours["model"][name], value) for name, value in whole["model"].items())
    for i, moments in whole["optimizer"]["state"].items():
        assert all(torch.equal(ours["optimizer"]["state"][i][name], value) for name, value in moments.items())


def test_a_run_with_all_options_for_speed_resumes_bit_for_bit(
    tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    """These are fp16 with loss scaling, micro-batches, small early views and the decode cache.

    The run is stopped before and after the views grow.
    """
    options = ("--precision", "fp16", "--optimizer.accumulation_steps", "2", "--data.images_per_step", "32",
               "--views.early_sizes", "[16]", "--views.early_size_epochs", "[2]", "--data.decode_cache_gib", "0.01",
               "--log.every_steps", "1")  # fmt: skip
    assert pretrain(tiny_config, tiny_set, tmp_path / "whole", *options) == 0
    for more in (["--max_steps", "1"], ["--max_steps", "2"], []):
        assert pretrain(tiny_config, tiny_set, tmp_path / "run", *options, *more) == 0
    ours, whole = (checkpoint(tmp_path / name, 3) for name in ("run", "whole"))
    assert all(torch.equal(ours["model"][name], value) for name, value in whole["model"].items())
    assert ours["loss_scale"] == whole["loss_scale"]
    assert int(ours["loss_scale"]["good_steps"]) + metrics(tmp_path / "run")[-1]["skipped_steps"] > 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "in 2 micro-batches of 16 images" in log
    assert "views: 16 px until step 2, then 32 px" in log
    assert not list(SHARED_MEMORY.glob("wmse_*"))


def test_a_run_continues_from_its_newest_usable_checkpoint(
    whole_run: Path, tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    """Lines of metrics after that checkpoint are replaced, and an incomplete line is dropped."""
    run_dir = tmp_path / "run"
    options = ("--log.every_steps", "2", "--checkpoint.every_steps", "3")
    assert pretrain(tiny_config, tiny_set, run_dir, *options, "--max_steps", "6") == 0
    assert [step for step, _ in list_checkpoints(run_dir / "checkpoints")] == [3, 6]
    (run_dir / "checkpoints" / "step_00000006.pt").write_bytes(b"torn")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    assert pretrain(tiny_config, tiny_set, run_dir, *options) == 0
    assert metrics(run_dir) == metrics(whole_run)
    log = (run_dir / "log.txt").read_text()
    assert "step_00000006.pt: it is truncated" in log
    assert log.count(" commit ") == 2  # one for each start


def test_checkpoints_are_saved_by_time(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> None:
    """A step asks for a checkpoint, which is saved two steps later; the next request follows after that."""
    assert pretrain(tiny_config, tiny_set, tmp_path, "--checkpoint.every_minutes", "1e-9") == 0
    assert [step for step, _ in list_checkpoints(tmp_path / "checkpoints")] == [3, 6, 9]


def test_checkpoints_for_the_evaluation_are_saved_and_kept(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> None:
    """An epoch has three steps. The other checkpoints, saved every second step, are kept only for the last two saves."""
    drops = ("--optimizer.schedule", "drops", "--optimizer.drop_epochs_before_end", "[1]")
    saves = ("--checkpoint.every_steps", "2", "--checkpoint.keep_last", "2")
    assert pretrain(tiny_config, tiny_set, tmp_path / "all", *drops, *saves, "--checkpoint.keep_every_epochs", "1") == 0
    assert [step for step, _ in list_checkpoints(tmp_path / "all" / "checkpoints")] == [3, 6, 8, 9]
    after = (*drops, *saves, "--checkpoint.keep_every_epochs", "2", "--optimizer.epochs", "4")
    assert pretrain(tiny_config, tiny_set, tmp_path / "some", *after) == 0
    assert [step for step, _ in list_checkpoints(tmp_path / "some" / "checkpoints")] == [6, 10, 12]


@pytest.mark.parametrize(("max_steps", "code", "status"), [("0", 75, "preempted"), ("3", 0, "paused")])
def test_a_run_stops_two_steps_after_the_request(
    max_steps: str,
    code: int,
    status: str,
    tiny_set: Path,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If that is the last step of --max_steps anyway, the run counts as paused and not as preempted."""
    request = StopRequest()
    request.ask()
    monkeypatch.setattr("trainer.run.signals.stop_on_signals", lambda: nullcontext(request))
    assert pretrain(tiny_config, tiny_set, tmp_path, "--max_steps", max_steps) == code
    assert state(tmp_path) == (status, code, 3)
    assert [step for step, _ in list_checkpoints(tmp_path / "checkpoints")] == [3]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]


def test_starting_a_finished_run_again_changes_nothing(whole_run: Path, tiny_set: Path, tiny_config: Path) -> None:
    before = checkpoint(whole_run, 9)
    assert pretrain(tiny_config, tiny_set, whole_run, "--log.every_steps", "2") == 0
    assert state(whole_run) == ("done", 0, 9)
    assert torch.equal(
        checkpoint(whole_run, 9)["model"]["projector.last.weight"], before["model"]["projector.last.weight"]
    )


def test_changed_settings_are_named_and_refused(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert pretrain(tiny_config, tiny_set, run_dir, "--max_steps", "2") == 0
    assert pretrain(tiny_config, tiny_set, run_dir, "--optimizer.epochs", "4", "--views.hue", "0.1") == 2
    error = capsys.readouterr().err
    assert "optimizer.epochs: 3 -> 4" in error
    assert "views.hue: 0.2 -> 0.1" in error
    assert state(run_dir) == ("failed", 2, 2)
    assert checkpoint(run_dir, 2)["step"] == 2
    more = ("--optimizer.epochs", "4", "--allow_changes", "true", "--max_steps", "3")
    assert pretrain(tiny_config, tiny_set, run_dir, *more) == 0
    assert pretrain(tiny_config, tiny_set, run_dir, "--seed", "1") == 2
    assert state(run_dir) == ("failed", 2, 3)


def test_other_images_are_refused(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "set"
    shutil.copytree(tiny_set, other)
    assert pretrain(tiny_config, other, tmp_path / "run", "--max_steps", "2") == 0
    write_images(other / "train" / "cats", 1, seed=77)
    (tmp_path / "run" / "images.index").unlink()
    assert pretrain(tiny_config, other, tmp_path / "run") == 2
    assert "training images: 48 -> 49" in capsys.readouterr().err


def test_files_added_or_removed_between_two_starts_do_not_end_a_run(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Image numbers stay those of the first start. With --allow_changes the run uses the current files."""
    data = tmp_path / "set"
    shutil.copytree(tiny_set, data)
    assert pretrain(tiny_config, data, tmp_path / "run", "--max_steps", "2") == 0
    gone = sorted((data / "train" / "cats").iterdir())[3]
    gone.unlink()
    write_images(data / "train" / "cats", 2, seed=77)
    assert pretrain(tiny_config, data, tmp_path / "run", "--max_steps", "6") == 0
    assert "has changed since the run began (48 -> 49 images): continuing with those" in capsys.readouterr().err
    (line,) = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["image"] == f"cats/{gone.name}"
    assert len(Index(tmp_path / "run" / "images.index", data)) == 48
    assert pretrain(tiny_config, data, tmp_path / "run", "--allow_changes", "true") == 0
    assert "training images: 48 -> 49" in capsys.readouterr().err
    assert len(Index(tmp_path / "run" / "images.index", data)) == 49


@pytest.mark.parametrize("more", [("--model.embedding_size", "4"), ("--optimizer.name", "lars")])
def test_a_change_that_the_checkpoint_does_not_fit_is_refused(
    more: tuple[str, str], tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain(tiny_config, tiny_set, tmp_path / "run", "--max_steps", "1") == 0
    assert pretrain(tiny_config, tiny_set, tmp_path / "run", "--allow_changes", "true", *more) == 2
    error = capsys.readouterr().err
    assert "does not fit this model or optimizer" in error
    assert "Traceback" not in error


def test_a_run_folder_with_odd_files_is_refused(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "state.json").mkdir(parents=True)
    os.mkfifo(run_dir / "quarantine.jsonl")
    assert pretrain(tiny_config, tiny_set, run_dir) == 2
    error = capsys.readouterr().err
    assert "state.json is a folder, not a file; quarantine.jsonl is a named pipe, not a file" in error
    assert "Traceback" not in error


def test_a_full_disk_gives_a_one_line_error_with_path_and_advice(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain(tiny_config, tiny_set, tmp_path / "other", "--max_steps", "1") == 0  # builds the index of the set
    with files_up_to(1500):
        assert pretrain(tiny_config, tiny_set, tmp_path / "run") == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"error: cannot write {tmp_path / 'run'}/")
    assert "File too large (" in last
    assert "MiB are free on its disk" in last
    assert "Free some space there, or use another folder" in last
    assert state(tmp_path / "run")[:2] == ("failed", 2)


def test_a_file_without_permission_gives_a_one_line_error(
    tiny_set: Path,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("trainer.metrics._drop_lines_after", refuse)
    assert pretrain(tiny_config, tiny_set, tmp_path / "run") == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"error: {tmp_path / 'run' / 'metrics.jsonl'}: Permission denied: change the permissions")


@pytest.mark.parametrize(
    "text",
    [
        '{"starts": Infinity, "first_step": Infinity, "heartbeat": -Infinity, "idle_starts": NaN}',
        "[" * 99_999,
    ],
)
def test_a_damaged_state_file_is_replaced(text: str, tiny_set: Path, tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state.json").write_text(text)
    assert pretrain(tiny_config, tiny_set, tmp_path / "run", "--max_steps", "1") == 0
    assert state(tmp_path / "run") == ("paused", 0, 1)


def test_an_unusable_image_is_quarantined_and_the_run_continues(
    tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    data = tmp_path / "set"
    shutil.copytree(tiny_set, data)
    assert pretrain(tiny_config, data, tmp_path / "run", "--max_steps", "1") == 0  # builds the index before the damage
    bad = next((data / "train" / "dogs").iterdir())
    bad.write_bytes(b"?" * bad.stat().st_size)
    assert pretrain(tiny_config, data, tmp_path / "run") == 0
    (line,) = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    assert bad.name in json.loads(line)["image"]
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert (json.loads(last)["step"], json.loads(last)["skipped_images"]) == (9, 1)


def test_a_run_starts_from_the_encoder_of_another_run(
    whole_run: Path, tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = str(whole_run / "checkpoints" / "step_00000009.pt")
    more = ("--init_from", start, "--model.embedding_size", "4", "--optimizer.learning_rate", "0", "--max_steps", "1")
    assert pretrain(tiny_config, tiny_set, tmp_path / "run", *more) == 0
    ours, theirs = checkpoint(tmp_path / "run", 1)["model"], checkpoint(whole_run, 9)["model"]
    assert torch.equal(ours["encoder.layer4.0.conv1.weight"], theirs["encoder.layer4.0.conv1.weight"])
    assert ours["projector.last.weight"].shape == (4, 16)
    assert (
        pretrain(tiny_config, tiny_set, tmp_path / "other", "--init_from", start, "--model.backbone", "resnet18") == 2
    )
    assert "use the same model.backbone and model.stem" in capsys.readouterr().err


def test_too_many_skipped_updates_end_the_run_with_advice(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights of the last layer are zero, so no slice can be whitened and every update is skipped."""
    run_dir = tmp_path / "run"
    assert pretrain(tiny_config, tiny_set, run_dir, "--max_steps", "1") == 0
    saved = checkpoint(run_dir, 1)
    saved["model"]["projector.last.weight"].zero_()
    content = {name: value for name, value in saved.items() if name not in ("format", "sha256")}
    save_checkpoint(run_dir / "checkpoints", content, keep_last=1)
    assert pretrain(tiny_config, tiny_set, run_dir, "--max_skipped_steps", "3") == 1
    error = capsys.readouterr().err
    assert "the run skipped 4 updates in a row" in error
    assert state(run_dir) == ("failed", 1, 1)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_00000001.pt"]


def test_a_run_whose_updates_were_all_skipped_fails(
    whole_run: Path, tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run starts from an encoder of zeros and has fewer steps than max_skipped_steps."""
    content = checkpoint(whole_run, 9)
    for name, value in content["model"].items():
        if name.startswith("encoder."):
            value.zero_()
    start = save_checkpoint(tmp_path / "zeros", {k: content[k] for k in ("step", "model")}, keep_last=1)
    assert pretrain(tiny_config, tiny_set, tmp_path / "run", "--init_from", str(start)) == 1
    assert "the run skipped all 9 updates" in capsys.readouterr().err
    assert state(tmp_path / "run") == ("failed", 1, 0)
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []
    assert metrics(tmp_path / "run")[-1]["loss"] is None


def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(
    tiny_set: Path,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second update makes them infinite, which is possible although loss and gradients are finite."""

    def overflow(optimizer: torch.optim.Optimizer, rate: float, failed: torch.Tensor) -> None:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].fill_(float("inf"))

    run_dir = tmp_path / "run"
    assert pretrain(tiny_config, tiny_set, run_dir, "--max_steps", "1") == 0
    monkeypatch.setattr("trainer.step.update", overflow)
    assert pretrain(tiny_config, tiny_set, run_dir, "--max_steps", "2", "--checkpoint.keep_last", "1") == 1
    error = capsys.readouterr().err
    assert "the checkpoint of step 2 was not saved: checkpoint.model.encoder.conv1.0.weight is not finite" in error
    assert "Traceback" not in error
    assert state(run_dir) == ("failed", 1, 1)
    assert [step for step, _ in list_checkpoints(run_dir / "checkpoints")] == [1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data.root", "{tmp}/nowhere"], "nowhere"),
        (["--data.root", ""], "data.root is not set"),
        (["--data.train_split", "trian"], "trian"),
        (["--data.images_per_step", "64"], "has 48 images, but one step needs 64"),
        (["--loss.slise_size", "3"], "did you mean wmse.slice_size?"),
        (["--run_dir", ""], "run_dir is not set"),
        (["--run_dir", "/proc/run"], "cannot create the run folder"),
        (["--init_from", "{tmp}/none.pt"], "none.pt does not exist"),
        (["--device", "cuda"], "torch sees no GPU"),
        (["--wmse.backend", "tritn"], "tritn"),
        (["--config", "{tmp}/none.yaml"], "none.yaml does not exist"),
    ],
)
def test_wrong_input_gives_one_message_and_exit_code_2(
    arguments: list[str],
    expected: str,
    tiny_set: Path,
    tiny_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    assert pretrain(tiny_config, tiny_set, tmp_path / "run", *filled) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error


def test_an_empty_set_is_refused(tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set" / "train" / "cats").mkdir(parents=True)
    assert pretrain(tiny_config, tmp_path / "set", tmp_path / "run") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_of_the_imagenet_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--config", "imagenet_rn50_wmse4_100ep", "--dry_run", "--ranks", "16"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "31200 = 100 epochs x 312",
        "warm-up 3120 steps",
        "peak 6.4 = 0.1 x sqrt(4096)",
        "64 slices of 256 x 128",
        "GiB",
    ):
        assert part in printed
