"""Command line: help, unknown commands, and one message for wrong input."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import kernels
from trainer import __version__
from trainer.cli import COMMANDS, main
from trainer.config.help import settings_page
from trainer.tools.usage import USAGE


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(f"  {name} ") == 2 for name in COMMANDS)
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"wmse {__version__}, commit ")
    assert f"torch {torch.__version__}" in shown
    assert f"dali {metadata.version('nvidia-dali-cuda120')}" in shown
    assert "whitening kernels: reference, torch" in shown


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
    assert len(shown.splitlines()) <= 60
    # The help of a command that takes settings shows the common ones; --help_all describes all of them.
    if command in USAGE:
        assert "--data.root" in shown
        assert shown.count(f"\n  wmse {command} ") == 3
        with pytest.raises(SystemExit):
            main([command, "--help-all"])
        assert "Number M of rows of one view that are whitened" in capsys.readouterr().out


def test_hyphens_equal_underscores_and_short_names_are_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pretrain", "--config", "demo_fashion_mnist", "--dry-run", "--run-dir", str(tmp_path / "a-b")]
    assert main([*words, "--lr=-0.5", "--epochs", "0", "--batch-size", "0", "--log.every-steps", "0"]) == 2
    shown = capsys.readouterr().err
    for setting in ("optimizer.learning_rate is -0.5", "optimizer.epochs is 0", "data.images_per_step is 0"):
        assert setting in shown
    assert "log.every_steps is 0" in shown
    # An evaluation has settings of its own for these, so it does not take the short names.
    assert main(["probe", "--run_dir", str(tmp_path), "--epochs", "3"]) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("optimizer", "--optimizer.weight_decay  (also --weight_decay)\n    number, at least 0; default 0.0001\n"),
        ("wmse.eps", "--wmse.eps\n    number, 0 to 0.99; default 0\n    Shrink the covariance"),
        ("general", "--precision\n    auto, bf16, fp16, fp32; default auto\n"),
        ("", "  barlow_twins    Barlow Twins (Zbontar et al., ICML 2021).\n"),
    ],
)
def test_settings_are_explained(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", *filter(None, [name])]) == 0
    assert text in capsys.readouterr().out


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "optimiser"]) == 2
    assert "did you mean optimizer?" in capsys.readouterr().err


def test_the_page_of_settings_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == settings_page(), "run `wmse settings --markdown > docs/config.md`"


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("wmse pret", ["pretrain"]),
        ("wmse status --js", ["--json"]),
        ("wmse pretrain --wmse.s", ["--wmse.slice_size"]),
        ("wmse pretrain --config cifar100_rn18_byol", ["cifar100_rn18_byol_1000ep"]),
        ("wmse probe --precision ", ["auto", "bf16", "fp16", "fp32"]),
    ],
)
def test_a_shell_completes_words(line: str, completions: list[str], tmp_path: Path) -> None:
    # argcomplete writes to file descriptor 8, or to a file that is named here.
    result = tmp_path / "words"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(result),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run([sys.executable, "-m", "trainer"], env=os.environ | environment, check=True)
    assert result.read_text().split("\n") == completions


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
