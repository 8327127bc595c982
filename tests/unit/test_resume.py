"""Which changes a run refuses to go on with. (Resuming itself: tests/integration/test_run.py.)"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.test_setup import run_of
from trainer.config import flatten
from trainer.data.plan import PLAN_VERSION
from trainer.errors import InputError
from trainer.metrics import LossSums
from trainer.resume import _check_same, resume
from trainer.setup import Run

SHAPING = (
    "seed",
    "precision",
    "gradient_compression",
    "data.train_split",
    "data.images_per_step",
    "data.max_image_pixels",
    "views.",
    "model.",
    "loss.",
    "optimizer.",
)
FREE = ("views.test_resize", "model.activation_checkpointing", "loss.max_failed_steps", "loss.backend")


@pytest.fixture
def run(tiny_set: Path, tiny_config: Path) -> Run:
    return run_of(tiny_set, tiny_config)


def saved(run: Run) -> dict[str, Any]:
    """What a checkpoint of `run` says of its settings."""
    config = {key: list(v) if isinstance(v, tuple) else v for key, v in flatten(run.config).items()}
    data = {"fingerprint": run.index.fingerprint, "images": len(run.index)}
    return {"config": config, "plan_version": PLAN_VERSION, "data": data}


def test_each_setting_that_shapes_the_result_is_named_and_no_other(run: Run) -> None:
    """Another value of every setting at once: the message lists just those that matter."""
    content = saved(run)
    _check_same(run, content)
    content["config"] = dict.fromkeys(content["config"], "another")
    with pytest.raises(InputError) as caught:
        _check_same(run, content)
    named = {
        line.split(":")[0].removeprefix("  - ") for line in str(caught.value).splitlines() if line.startswith("  - ")
    }
    assert named == {key for key in content["config"] if key.startswith(SHAPING) and key not in FREE}


def test_a_setting_newer_than_the_checkpoint_had_its_default(run: Run) -> None:
    content = saved(run)
    del content["config"]["optimizer.accumulation_steps"]
    _check_same(run, content)
    optimizer = replace(run.config.optimizer, accumulation_steps=2)
    with pytest.raises(InputError, match=r"optimizer\.accumulation_steps: 1 -> 2"):
        _check_same(replace(run, config=replace(run.config, optimizer=optimizer)), content)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"plan_version": -1}, "plan version: -1"),
        ({"data": {"fingerprint": "x", "images": 9}}, "training images: 9 -> 48"),
    ],
)
def test_another_plan_or_other_images(part: dict[str, Any], message: str, run: Run) -> None:
    with pytest.raises(InputError, match=message):
        _check_same(run, saved(run) | part)
    _check_same(replace(run, config=replace(run.config, allow_changes=True)), saved(run) | part)


def test_ranks_that_find_different_checkpoints_do_not_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a network file system shows one node a checkpoint that another does not see yet."""
    monkeypatch.setattr("trainer.resume._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("trainer.resume.agree", lambda values, ranks: torch.maximum(values, torch.tensor([4, 0])))
    with pytest.raises(InputError, match="this rank finds the checkpoint of step 0, others those of 0 to 4"):
        resume(run, LossSums(run.device))


def test_a_checkpoint_that_shows_up_late_is_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another rank sees step 4 at once; this one at its third look."""
    monkeypatch.setattr("trainer.resume._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("trainer.resume._restore", lambda run, content, sums: content["step"])
    looks: list[int] = []

    def load_late(folder: Path) -> dict[str, Any] | None:
        looks.append(1)
        return {"step": 4} if len(looks) == 3 else None

    monkeypatch.setattr("trainer.resume.load_newest", load_late)
    monkeypatch.setattr(
        "trainer.resume.agree", lambda v, ranks: torch.maximum(v, torch.tensor([4, -4])) if len(v) == 2 else v
    )
    assert resume(run, LossSums(run.device)) == 4
    assert len(looks) == 3
