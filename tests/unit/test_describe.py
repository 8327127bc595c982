"""Description of a run before it starts: the plan, warnings, and the dry run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import write_images
from trainer.config.loading import load_config
from trainer.data.index import open_index
from trainer.errors import InputError
from trainer.loop import pretrain
from trainer.run.signals import StopRequest
from trainer.tools.dry_run import dry_run, evaluation_warnings, setting_warnings
from trainer.tools.run_plan import plan_lines, plan_warnings


def test_the_plan_of_a_run_is_described(tiny_config: Path) -> None:
    """The run has 50 images, 16 a step on two ranks that whiten 16 rows together, 2 views and 3 iterations."""
    config = load_config(tiny_config, ["--wmse.iterations", "3", "--wmse.permutation_block", "16"])
    text = "\n".join(plan_lines(config, 50, 2))
    for part in (
        "images: 50 in (no data.root); 3 steps per epoch, each of which leaves out 2 images",
        "steps: 9 = 3 epochs x 3; warm-up 2 steps, then half a cosine to 0",
        "16 images (global batch size) x 2 views on 2 rank(s), 8 images = 16 views per rank",
        "6 slices of 16 x 8 in each step; groups of 2 neighbouring ranks compute the loss together",
    ):
        assert part in text
    assert "compute the loss together" not in "\n".join(plan_lines(config, 50, 1))


def test_the_plan_names_the_rates_of_the_schedule_and_their_rule(tiny_config: Path) -> None:
    settings = ["--optimizer.start_learning_rate", "0.5", "--optimizer.final_learning_rate", "0.25"]
    rule = [
        "--optimizer.learning_rate",
        "2",
        "--optimizer.learning_rate_rule",
        "linear",
        "--data.images_per_step",
        "64",
    ]
    text = "\n".join(plan_lines(load_config(tiny_config, [*settings, *rule]), 640, 1))
    assert "warm-up 2 steps from 0.125, then half a cosine to 0.0625" in text
    assert "learning rate: peak 0.5 = 2 x 64 / 256, adam" in text


def test_micro_batches_and_early_sizes_are_described(tiny_config: Path) -> None:
    settings = ["--data.images_per_step", "64", "--optimizer.accumulation_steps", "2", "--views.early_sizes", "[16,24]",
                "--views.early_size_epochs", "[1,2]"]  # fmt: skip
    text = "\n".join(plan_lines(load_config(tiny_config, settings), 640, 2))
    assert "32 images = 64 views per rank, in 2 micro-batches of 16 images" in text
    assert "views: 16 px until step 10, 24 px until step 20, then 32 px" in text
    plain = "\n".join(plan_lines(load_config(tiny_config, []), 640, 1))
    assert "micro-batches" not in plain
    assert "views: " not in plain


def test_settings_without_an_effect_are_warned_of(tiny_config: Path) -> None:
    settings = ["--gradient_compression", "bf16", "--compile", "true", "--cuda_graphs", "true"]
    config, cpu = load_config(tiny_config, settings), torch.device("cpu")
    assert [line.split()[0] for line in setting_warnings(config, 1, cpu)] == ["gradient_compression", "cuda_graphs"]
    assert [line.split()[0] for line in setting_warnings(config, 2, torch.device("cuda"))] == []
    eager = load_config(tiny_config, ["--model.batch_norm_ranks", "all", "--compile", "false"])
    assert "BatchNorm then runs as separate operations" in setting_warnings(eager, 2, torch.device("cuda"))[0]
    fused = replace(eager, model=replace(eager.model, batch_norm_backend="triton"))
    assert setting_warnings(fused, 2, torch.device("cuda")) == []
    assert setting_warnings(eager, 2, cpu) == setting_warnings(eager, 1, torch.device("cuda")) == []
    budget = load_config(tiny_config, ["--model.activation_memory_budget", "0.9"])
    assert (
        "activation_memory_budget 0.9 has no effect: the model is not compiled" in setting_warnings(budget, 1, cpu)[0]
    )
    assert setting_warnings(budget, 1, torch.device("cuda")) == []
    assert setting_warnings(load_config(tiny_config, []), 1, cpu) == []
    dense = load_config(tiny_config, ["--checkpoint.keep_every_epochs_after_drop", "5"])
    assert "schedule is cosine, in which the learning rate never drops" in setting_warnings(dense, 1, cpu)[0]
    hint = load_config(tiny_config, ["--data.decoder_hint", "[5000,0]"])
    assert "needs both width and height" in setting_warnings(hint, 1, torch.device("cuda"))[0]


@pytest.mark.parametrize(
    ("folders", "settings", "warning"),
    [
        (["train/a", "train/b", "val/a"], [], ""),
        (["train/a", "train/b"], [], "the split 'val' does not exist"),
        (["train/a", "train/b"], ["--data.test_split", "train"], ""),
        (["train/a", "train/b", "val/images"], [], "the split 'val' has no folder with the name of a class"),
        (["train/images", "val/images"], [], "the split 'train' has images of one class only"),
        (["train/images", "val/a"], ["--data.probe_split", "labelled"], "the split 'labelled' does not exist"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_warned_of(
    folders: list[str], settings: list[str], warning: str, tmp_path: Path, tiny_config: Path
) -> None:
    for number, folder in enumerate(folders):
        write_images(tmp_path / "set" / folder, 2, seed=number)
    config = load_config(tiny_config, ["--data.root", str(tmp_path / "set"), *settings])
    index = open_index(tmp_path / "set", "train")
    lines = evaluation_warnings(config, index)
    assert bool(lines) == bool(warning)
    assert warning in "".join(lines)
    assert not list((tmp_path / "set" / ".wmse_index").glob("val*"))  # the test split is not indexed for this


def test_the_split_val_of_tiny_imagenet_can_be_evaluated(tmp_path: Path, tiny_config: Path) -> None:
    for number, folder in enumerate(("train/n1/images", "train/n2/images", "val/images")):
        write_images(tmp_path / folder, 2, seed=number)
    config = load_config(tiny_config, ["--data.root", str(tmp_path)])
    index = open_index(tmp_path, "train")
    assert evaluation_warnings(config, index) != []
    (tmp_path / "val" / "val_annotations.txt").write_text("2_0.JPEG\tn1\n2_1.JPEG\tn2\n")
    assert evaluation_warnings(config, index) == []


def test_a_run_on_a_set_that_cannot_be_evaluated_warns_and_trains(
    tiny_set: Path, tmp_path: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--data.root", str(tiny_set), "--run_dir", str(tmp_path / "run"), "--max_steps", "1"]
    config = load_config(tiny_config, [*settings, "--data.test_split", "nothing"])
    assert pretrain(config, StopRequest()) == 0
    assert "cannot be evaluated on it: the split 'nothing' does not exist" in capsys.readouterr().err


def test_a_warm_up_longer_than_the_run_is_warned_of(tiny_config: Path) -> None:
    drops = ["--optimizer.schedule", "drops", "--optimizer.drop_epochs_before_end", "[]"]
    assert "warm-up 2 steps, then constant" in "\n".join(plan_lines(load_config(tiny_config, drops), 48, 1))
    long = load_config(tiny_config, ["--optimizer.warmup_steps", "9", "--data.expected_images", "48"])
    (warning,) = plan_warnings(long, 48)
    assert "the warm-up of 9 steps is not shorter than the run of 9" in warning
    assert f"warning: {warning}" in list(dry_run(long, 1))
    assert plan_warnings(long, 64) == []


def test_a_dry_run_needs_a_set_or_its_size(tiny_config: Path) -> None:
    with pytest.raises(InputError, match=r"data\.expected_images is 0"):
        list(dry_run(load_config(tiny_config, []), 1))
    with pytest.raises(InputError, match="has 15 images, but one step needs"):
        list(dry_run(load_config(tiny_config, ["--data.expected_images", "15"]), 1))


def test_a_dry_run_warns_and_refuses_as_the_run_does(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    settings = ["--data.expected_images", "48"]
    lines = list(dry_run(load_config(tiny_config, [*settings, "--autotune", "true"]), 1))
    assert "warning: autotune has no effect on a CPU" in lines
    with pytest.raises(InputError, match="backend triton needs an NVIDIA GPU"):
        list(dry_run(load_config(tiny_config, [*settings, "--wmse.backend", "triton"]), 1))
