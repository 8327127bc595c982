"""Changes and checkpoints with which a run refuses to continue. tests/integration/test_run.py tests resuming itself."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY
from tests.unit.test_setup import run_of
from trainer.cli import main
from trainer.config.schema import METHODS, flatten
from trainer.data.plan import PLAN_VERSION
from trainer.errors import InputError, TrainingFailedError
from trainer.metrics import MetricSums
from trainer.run.checkpoint import content_digest, load_checkpoint, save_checkpoint
from trainer.run.checkpoint_files import checkpoint_path, list_checkpoints
from trainer.run.resume import _changes, resume
from trainer.run.saver import Saver
from trainer.setup import Run

CHANGES_RESULT = (
    "seed",
    "precision",
    "gradient_compression",
    "data.train_split",
    "data.images_per_step",
    "data.max_image_pixels",
    "views.",
    "model.",
    "method",
    *(f"{method}." for method in METHODS),
    "optimizer.",
)
MAY_CHANGE = (
    "views.eval_resize",
    "model.activation_checkpointing",
    "model.activation_memory_budget",
    "model.batch_norm_backend",
    "max_skipped_steps",
    "wmse.backend",
    "optimizer.backend",
)


@pytest.fixture
def run(tiny_set: Path, tiny_config: Path) -> Run:
    """Return a new run."""
    return run_of(tiny_set, tiny_config)


def saved(run: Run) -> dict[str, Any]:
    """Return the settings of a checkpoint of `run`."""
    config = {key: list(v) if isinstance(v, tuple) else v for key, v in flatten(run.config).items()}
    data = {"fingerprint": run.index.fingerprint, "images": len(run.index)}
    return {"config": config, "plan_version": PLAN_VERSION, "data": data}


def test_exactly_the_settings_that_change_the_result_are_named(run: Run) -> None:
    """Change every setting at once: the message lists only those that change the result."""
    content = saved(run)
    assert _changes(run, content) == []
    content["config"] = dict.fromkeys(content["config"], "another")
    named = {line.split(":")[0] for line in _changes(run, content)}
    assert named == {key for key in content["config"] if key.startswith(CHANGES_RESULT) and key not in MAY_CHANGE}


def test_a_setting_that_the_checkpoint_lacks_had_its_default(run: Run) -> None:
    content = saved(run)
    del content["config"]["optimizer.accumulation_steps"]
    assert _changes(run, content) == []
    optimizer = replace(run.config.optimizer, accumulation_steps=2)
    changed = _changes(replace(run, config=replace(run.config, optimizer=optimizer)), content)
    assert changed == ["optimizer.accumulation_steps: 1 -> 2"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"plan_version": -1}, "plan version: -1"),
        ({"data": {"fingerprint": "x", "images": 9}}, "training images: 9 -> 48"),
    ],
)
def test_another_plan_version_or_other_images_are_refused(part: dict[str, Any], message: str, run: Run) -> None:
    (changed,) = _changes(run, saved(run) | part)
    assert changed.startswith(message)


# --- unusable checkpoints ---

Content = dict[str, Any]
WEIGHT = "projector.last.weight"


def put(*path: Any, value: Any) -> Callable[[Content], Any]:
    """Change one entry of a checkpoint, or remove it if the value is `...`."""

    def change(content: Content) -> None:
        for key in path[:-1]:
            content = content[key]
        if value is ...:
            del content[path[-1]]
        else:
            content[path[-1]] = value

    return change


def fill(value: float, *path: Any) -> Callable[[Content], Any]:
    """Change the first element of a tensor of a checkpoint."""

    def change(content: Content) -> None:
        for key in path:
            content = content[key]
        content[(0,) * content.dim()] = value  # type: ignore[attr-defined, index]

    return change


PARTS = ("step", "model", "optimizer", "config", "plan_version", "data", "world_size", "metric_sums", "format")
BROKEN: dict[str, Callable[[Content], Any]] = {
    **{f"no {part}": put(part, value=...) for part in PARTS},
    **{f"{part} is a text": put(part, value="odd") for part in PARTS},
    "another step than its name": put("step", value=7),
    "a negative step": put("step", value=-2),
    "a step that is a float": put("step", value=2.0),
    "a step that is a bool": put("step", value=True),
    "NaN weights": fill(float("nan"), "model", WEIGHT),
    "infinite weights": fill(float("inf"), "model", "encoder.conv1.0.weight"),
    "NaN running variance": fill(float("nan"), "model", "encoder.bn1.running_var"),
    "NaN moments": fill(float("nan"), "optimizer", "state", 0, "exp_avg_sq"),
    "a weight is missing": put("model", WEIGHT, value=...),
    "a weight too many": put("model", "projector.more", value=torch.zeros(3)),
    "a weight of another shape": put("model", WEIGHT, value=torch.zeros(3, 3)),
    "a transposed weight": lambda content: put("model", WEIGHT, value=content["model"][WEIGHT].T.clone())(content),
    "a weight of another type": lambda content: put("model", WEIGHT, value=content["model"][WEIGHT].double())(content),
    "a weight that is a list": put("model", WEIGHT, value=[1.0]),
    "a weight without a name": put("model", 3, value=torch.zeros(3)),
    "no moments of one weight": put("optimizer", "state", 0, value=...),
    "moments of a weight too many": put("optimizer", "state", 99, value={}),
    "moments of another optimizer": put("optimizer", "state", 0, value={"momentum_buffer": torch.zeros(3)}),
    "moments of another shape": put("optimizer", "state", 0, "exp_avg", value=torch.zeros(2)),
    "moments that are numbers": put("optimizer", "state", 0, "exp_avg", value=0.5),
    "no count of updates": put("optimizer", "state", 0, "step", value=...),
    "no state": put("optimizer", "state", value=...),
    "a state that is a list": put("optimizer", "state", value=[1]),
    "a setting that is a tensor": put("config", "seed", value=torch.zeros(2)),
    "no fingerprint": put("data", "fingerprint", value=...),
    "a count of images that is a text": put("data", "images", value="many"),
    "sums of another length": put("metric_sums", "sums", value=torch.zeros(7, dtype=torch.float64)),
    "no smallest values": put("metric_sums", "smallest", value=...),
    "a list": lambda content: [content],
    "a tensor": lambda content: torch.zeros(3),
    "nothing": lambda content: {},
}


@pytest.fixture(scope="module")
def good(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[int, Content]]:
    """Return a run and its checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "tiny.yaml").write_text(TINY)
    settings = ["--data.root", str(tiny_set), "--run_dir", str(folder), "--checkpoint.every_steps", "1"]
    assert main(["pretrain", "--config", str(folder / "tiny.yaml"), *settings, "--max_steps", "2"]) == 0
    found = {step: load_checkpoint(path) for step, path in list_checkpoints(folder / "checkpoints")}
    return run_of(tiny_set, folder / "tiny.yaml"), found


def write_checkpoint(run: Run, step: int, content: Any) -> None:
    """Write a checkpoint as a faulty program would, with a correct digest."""
    if isinstance(content, dict):
        content = content | {"sha256": content_digest(content)}
    torch.save(content, checkpoint_path(run.checkpoints, step))


def resume_from(run: Run, folder: Path, contents: dict[int, Any]) -> int:
    """Write checkpoints to a run folder, resume from it, and return the step."""
    run = replace(run, run_dir=folder)
    run.checkpoints.mkdir(exist_ok=True)
    for step, content in contents.items():
        write_checkpoint(run, step, content)
    return resume(run, MetricSums(run.step.method.metrics, run.device))


@pytest.fixture(scope="module")
def folder_with_step_1(good: tuple[Run, dict[int, Content]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder with the checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("step_1")
    assert resume_from(good[0], folder, {1: good[1][1]}) == 1
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_an_unusable_checkpoint_is_skipped_with_its_name(
    name: str, good: tuple[Run, dict[int, Content]], folder_with_step_1: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, contents = good
    broken = copy.deepcopy(contents[2])
    result = BROKEN[name](broken)
    assert resume_from(run, folder_with_step_1, {2: broken if result is None else result}) == 1
    logged = [r.getMessage() for r in caplog.records if r.getMessage().startswith("skipped step_00000002.pt: ")]
    assert len(logged) == 1
    assert len(logged[0]) < 600


def test_a_run_with_only_unusable_checkpoints_does_not_start_from_the_beginning(
    good: tuple[Run, dict[int, Content]], tmp_path: Path
) -> None:
    run, contents = good
    with pytest.raises(
        InputError, match=r"none of the 2 checkpoints in .* can be used\. The newest: checkpoint has no config"
    ):
        resume_from(
            run, tmp_path, {step: {k: v for k, v in contents[step].items() if k != "config"} for step in (1, 2)}
        )


@pytest.mark.parametrize("step", [10, 2**62, 2**70])
def test_a_checkpoint_beyond_the_end_of_the_run_is_skipped(
    step: int, good: tuple[Run, dict[int, Content]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, contents = good
    assert resume_from(run, tmp_path, {1: contents[1], step: contents[2] | {"step": step}}) == 1
    assert f"step {step} is beyond the run's last step, 9" in caplog.text


def test_changed_settings_are_refused_although_an_older_checkpoint_has_them(
    good: tuple[Run, dict[int, Content]], tmp_path: Path
) -> None:
    """The newest checkpoint is usable: skipping it would silently lose work."""
    run, contents = good
    other = contents[2] | {"config": contents[2]["config"] | {"seed": 5}}
    with pytest.raises(InputError, match="seed: 5 -> 0"):
        resume_from(run, tmp_path, {1: contents[1], 2: other})


def test_options_of_the_optimizer_come_from_the_settings(
    good: tuple[Run, dict[int, Content]], tmp_path: Path, tiny_set: Path, tiny_config: Path
) -> None:
    _, contents = good
    run = run_of(tiny_set, tiny_config, "--optimizer.weight_decay", "0.25", "--allow_changes", "true")
    assert resume_from(run, tmp_path, {2: contents[2]}) == 2
    assert run.step.optimizer.param_groups[0]["weight_decay"] == 0.25
    moments = run.step.optimizer.state[next(run.step.method.networks.parameters())]
    assert torch.equal(moments["exp_avg"], contents[2]["optimizer"]["state"][0]["exp_avg"])


def test_weights_that_are_not_finite_are_never_saved(good: tuple[Run, dict[int, Content]], tmp_path: Path) -> None:
    _, contents = good
    save_checkpoint(tmp_path, contents[1], keep_last=1)
    before = checkpoint_path(tmp_path, 1).read_bytes()
    broken = copy.deepcopy(contents[2])
    broken["optimizer"]["state"][3]["exp_avg"].fill_(float("inf"))
    saver = Saver(tmp_path, keep_last=1)
    saver.save(broken)
    with pytest.raises(
        TrainingFailedError, match=r"the checkpoint of step 2 was not saved: .*state\.3\.exp_avg is not finite"
    ):
        saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.pt"]
    assert checkpoint_path(tmp_path, 1).read_bytes() == before


# --- several ranks ---


def test_ranks_that_find_different_checkpoints_stop(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may show a new checkpoint to one node before another."""
    monkeypatch.setattr("trainer.run.resume._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("trainer.run.resume.agree", lambda values, ranks: torch.maximum(values, torch.tensor([4, 0])))
    with pytest.raises(InputError, match="this rank finds the checkpoint of step 0, other ranks those of steps 0 to 4"):
        resume(run, MetricSums(run.step.method.metrics, run.device))


def test_a_rank_waits_for_a_checkpoint_that_appears_late(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another rank finds step 4 at once, and this one at its third look."""
    monkeypatch.setattr("trainer.run.resume._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("trainer.run.resume._restore", lambda run, content, sums: content["step"])
    looks: list[int] = []

    def load_late(folder: Path, check: object) -> dict[str, Any] | None:
        looks.append(1)
        return {"step": 4} if len(looks) == 3 else None

    monkeypatch.setattr("trainer.run.resume.load_newest", load_late)
    monkeypatch.setattr(
        "trainer.run.resume.agree", lambda v, ranks: torch.maximum(v, torch.tensor([4, -4])) if len(v) == 2 else v
    )
    assert resume(run, MetricSums(run.step.method.metrics, run.device)) == 4
    assert len(looks) == 3
