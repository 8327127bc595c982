"""Command line: help, unknown commands, and one message for wrong input."""

from pathlib import Path

import pytest

import kernels
from trainer import __version__
from trainer.cli import COMMANDS, main


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(f"  {name} ") == 2 for name in COMMANDS)
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "unknown command 'train'" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: wmse {command}" in shown
    if command in ("pretrain", "probe", "knn", "evaluate", "preview", "bench"):
        assert "--wmse.slice_size" in shown
        assert "Number M of rows of one view that are whitened" in shown


def test_another_package_named_kernels_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "__file__", "/elsewhere/site-packages/kernels/__init__.py")
    assert main(["bench", "loss"]) == 2
    assert "the package 'kernels' was imported from /elsewhere/site-packages" in capsys.readouterr().err


def test_check_data_names_and_counts_unusable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.jpg").write_text("<html>not found</html>")
    assert main(["check-data", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "page.jpg" in shown
    assert "1 files, 1 bad" in shown


def test_a_prepared_set_is_previewed(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(tiny_set), str(tmp_path / "shards")]) == 0
    arguments = ["--config", str(tiny_config), "--data.root", str(tmp_path / "shards")]
    assert main(["preview", *arguments, "--out", str(tmp_path / "grid.png"), "--images", "3"]) == 0
    assert "3 images and the 2 views of each" in capsys.readouterr().out
    from PIL import Image

    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (3 * 100, 3 * 100)  # each view has 32 px, enlarged three times, and a gap of 2 px around
    assert main(["prepare", str(tiny_set), str(tmp_path / "shards")]) == 2
    assert main(["preview", *arguments, "--images", "0"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrian"], "unknown command 'pretrian': did you mean pretrain?"),
        (
            ["pretrain", "--config", "demo_fashion_mnist", "--dry-run"],
            "unknown option --dry-run: did you mean --dry_run?",
        ),
        (
            ["pretrain", "--config", "demo_fashion_mnist", "--dry_run", "--data.root", "/no/such/set"],
            "/no/such/set: no such folder",
        ),
        (
            ["pretrain", "--config", "cifar10_rn18_wmse2_1000ep", "--dry_run", "--model.backbone", "resnet5"],
            "which timm does not have: choose a name of timm.list_models(); similar: resnet50",
        ),
    ],
)
def test_unknown_settings_are_refused_with_a_suggestion(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
