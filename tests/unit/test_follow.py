"""wmse evaluate --follow: what it measures, in which order, what it skips, and when it ends."""

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import TINY
from tests.faults import save_unchecked
from trainer.cli import main
from trainer.cluster.jobs import Job
from trainer.config.loading import load_config
from trainer.config.schema import DataConfig
from trainer.data.index import open_images
from trainer.distributed import process_group as distributed
from trainer.errors import InputError
from trainer.evaluate import follow
from trainer.evaluate import results as results_module
from trainer.evaluate.follow import RunWatch, follow_run
from trainer.evaluate.run import run_evaluation
from trainer.loop import pretrain
from trainer.run.checkpoint import load_checkpoint
from trainer.run.checkpoint_files import checkpoint_path
from trainer.run.folder import lock_run_folder
from trainer.run.signals import StopRequest

BOTH = ("linear", "knn")
POLL = 0.02


@pytest.fixture(scope="module")
def finished(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(TINY)
    settings = ["--data.root", str(tiny_set), "--run_dir", str(folder / "run"), "--max_steps", "3"]
    settings += ["--checkpoint.every_steps", "1", "--log.tensorboard", "true"]
    assert pretrain(load_config(folder / "tiny.yaml", settings), StopRequest()) == 0
    return folder / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that run, which the test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def results(run_dir: Path) -> dict[str, Any]:
    """Return the results by file name, without the times, which differ between equal measurements."""
    found = {path.name: json.loads(path.read_text()) for path in (run_dir / "eval").glob("*.json")}
    return {
        name: {key: value for key, value in result.items() if key not in ("time", "seconds")}
        for name, result in found.items()
    }


def write_state(run_dir: Path, status: str, age: float = 0.0, **more: Any) -> None:
    run_dir.mkdir(exist_ok=True)
    state = {"status": status, "heartbeat": time.time() - age, **more}
    (run_dir / "state.json").write_text(json.dumps(state))


def loaded_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each loaded checkpoint adds its step."""
    steps: list[int] = []

    def load(path: Path) -> dict[str, Any]:
        content = load_checkpoint(path)
        steps.append(content["step"])
        return content

    monkeypatch.setattr(follow, "load_checkpoint", load)
    return steps


def test_every_checkpoint_is_measured_once_and_oldest_first(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures equal those of single evaluations. Each index is opened once."""
    steps, splits = loaded_steps(monkeypatch), []

    def opened(data: DataConfig, split: str, **options: bool) -> object:
        splits.append(split)
        return open_images(data, split, **options)

    monkeypatch.setattr(distributed, "open_images", opened)
    follow_run(run_dir, [], BOTH, POLL)
    assert steps == [1, 2, 3]
    assert splits == ["val", "train"]
    found = results(run_dir)
    assert set(found) == {f"{measure}_{step}.json" for measure in BOTH for step in (1, 2, 3)}
    for step in (1, 3):
        alone = run_evaluation(run_dir, str(step), [], BOTH)
        for measure in BOTH:
            assert found[f"{measure}_{step}.json"].items() <= alone[measure].items()
    assert found["knn_1.json"]["checkpoint"] == "1"


def test_curves_are_written_next_to_those_of_the_training(run_dir: Path) -> None:
    before = {path: path.read_bytes() for path in (run_dir / "tensorboard").iterdir()}
    follow_run(run_dir, [], BOTH, POLL)
    found = results(run_dir)
    board = EventAccumulator(str(run_dir / "tensorboard" / "eval"))
    board.Reload()
    for tag in ("knn_top1", "linear_top1", "linear_top5", "linear_standardised_top1"):
        measure, _, figure = tag.partition("_")
        curve = {event.step: event.value for event in board.Scalars(f"eval/{tag}")}
        assert curve == pytest.approx({step: found[f"{measure}_{step}.json"][figure] for step in (1, 2, 3)})
    assert all(path.read_bytes() == content for path, content in before.items())


def test_without_tensorboard_no_events_are_written(run_dir: Path) -> None:
    follow_run(run_dir, ["--log.tensorboard", "false"], ("knn",), POLL)
    assert set(results(run_dir)) == {"knn_1.json", "knn_2.json", "knn_3.json"}
    assert not (run_dir / "tensorboard" / "eval").exists()


def test_a_second_start_measures_the_missing_results(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start was killed between two results, and a full disk truncated a result."""
    follow_run(run_dir, [], BOTH, POLL)
    whole = results(run_dir)
    (run_dir / "eval" / "knn_2.json").rename(run_dir / "eval" / ".knn_2.json.a1b2c3")
    (run_dir / "eval" / "linear_3.json").write_text('{"top1": 5')
    (run_dir / "eval" / "linear_2.json").write_text('{"figures": ["mine"]}')
    steps = loaded_steps(monkeypatch)
    follow_run(run_dir, [], BOTH, POLL)
    assert steps == [2, 3]
    assert results(run_dir) == whole | {"linear_2.json": {"figures": ["mine"]}}
    assert {path.name for path in (run_dir / "eval").iterdir()} == {*whole, ".lock"}
    steps.clear()
    follow_run(run_dir, [], BOTH, POLL)
    assert steps == []


def test_damaged_checkpoints_are_named_and_skipped(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = checkpoint_path(run_dir / "checkpoints", 1).read_bytes()
    checkpoint_path(run_dir / "checkpoints", 1).write_bytes(good[: len(good) // 2])
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 64
    checkpoint_path(run_dir / "checkpoints", 2).write_bytes(flipped)
    follow_run(run_dir, [], ("knn",), POLL)
    assert set(results(run_dir)) == {"knn_3.json"}
    log = capsys.readouterr().err
    assert log.count("step 1 is skipped: cannot read checkpoint") == 3  # a temporary fault of a file system may pass
    assert "except step_00000001.pt, step_00000002.pt, which failed 3 times" in log


def test_a_checkpoint_with_weights_that_are_not_finite_is_skipped(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = load_checkpoint(checkpoint_path(run_dir / "checkpoints", 2))
    content["model"]["encoder.bn1.weight"][0] = float("nan")
    save_unchecked(run_dir / "checkpoints", content)
    follow_run(run_dir, [], ("knn",), POLL)
    assert set(results(run_dir)) == {"knn_1.json", "knn_3.json"}
    assert "step 2 is skipped: cannot use checkpoint" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_printed_and_measured_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, failures = results_module.write_text, [1, 2]

    def full(path: Path, text: str) -> None:
        if path.name == "knn_2.json" and failures:
            raise OSError(errno.ENOSPC, "No space left on device", str(path), failures.pop())
        original(path, text)

    monkeypatch.setattr(results_module, "write_text", full)
    follow_run(run_dir, [], ("knn",), POLL)
    assert set(results(run_dir)) == {"knn_1.json", "knn_2.json", "knn_3.json"}
    log = capsys.readouterr().err
    assert log.count("cannot write the result of step 2: [Errno 28] No space left on device") == 2
    assert log.count("encoder: step 2,") == 3  # the table


def test_results_of_other_settings_are_kept_separately(run_dir: Path) -> None:
    follow_run(run_dir, [], ("knn",), POLL)
    before = results(run_dir)
    for _ in range(2):
        follow_run(run_dir, ["--knn.k", "3"], ("knn",), POLL)
        found = results(run_dir)
        assert len(found) == 6
        assert {name: found[name] for name in before} == before


def test_a_checkpoint_that_becomes_complete_is_measured(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is truncated at first, as on a slow network file system, and complete after the last try."""
    path = checkpoint_path(run_dir / "checkpoints", 2)
    good, looks = path.read_bytes(), []
    path.write_bytes(good[:1000])
    real = time.sleep

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == follow._TRIES + 2:
            path.write_bytes(good)
            write_state(run_dir, "done")
        real(seconds)

    monkeypatch.setattr(follow.time, "sleep", sleep)
    write_state(run_dir, "running")
    follow_run(run_dir, [], ("knn",), POLL)
    assert set(results(run_dir)) == {"knn_1.json", "knn_2.json", "knn_3.json"}


def test_a_checkpoint_that_is_deleted_meanwhile_is_skipped(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(path: Path) -> dict[str, Any]:
        checkpoint_path(run_dir / "checkpoints", 2).unlink(missing_ok=True)
        return load_checkpoint(path)

    monkeypatch.setattr(follow, "load_checkpoint", load)
    follow_run(run_dir, [], ("knn",), POLL)
    assert set(results(run_dir)) == {"knn_1.json", "knn_3.json"}
    assert "step 2 is skipped: the checkpoint" in capsys.readouterr().err


def test_it_waits_for_the_run_and_measures_each_new_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    """It starts before the run: the folder appears, then a queued run, settings, several checkpoints, and the end."""
    later = tmp_path / "later"

    def wait_for(name: str) -> None:
        end = time.monotonic() + 30
        while not (later / "eval" / name).exists():
            assert time.monotonic() < end
            time.sleep(0.01)

    follower = threading.Thread(target=follow_run, args=(later, [], ("knn",), POLL))
    follower.start()
    time.sleep(3 * POLL)
    (later / "checkpoints").mkdir(parents=True)
    write_state(later, "queued")
    time.sleep(3 * POLL)
    write_state(later, "running")
    shutil.copy(run_dir / "config.yaml", later)
    for step in (1, 2):
        shutil.copy(checkpoint_path(run_dir / "checkpoints", step), later / "checkpoints" / "copy")
        (later / "checkpoints" / "copy").rename(checkpoint_path(later / "checkpoints", step))
        wait_for(f"knn_{step}.json")
    assert follower.is_alive()
    shutil.copy(checkpoint_path(run_dir / "checkpoints", 3), later / "checkpoints")
    write_state(later, "done")
    follower.join(30)
    assert not follower.is_alive()
    assert set(results(later)) == {"knn_1.json", "knn_2.json", "knn_3.json"}


def test_settings_that_contradict_the_run_are_refused(run_dir: Path) -> None:
    with pytest.raises(InputError, match=r"views\.mean is .* was trained with"):
        follow_run(run_dir, ["--views.mean", "[0.5, 0.5, 0.5]"], ("knn",), POLL)


def test_several_ranks_are_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="--follow runs on one rank, but was started on 2"):
        follow_run(run_dir, [], BOTH, POLL)


# --- end of a run ---

Slurm = Callable[[str | None], None]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Return a function that sets the state of job 5 in SLURM; None: SLURM does not know the job."""

    def says(state: str | None) -> None:
        known = {"5": Job(state, "", "")} if state else {}
        monkeypatch.setattr(follow, "find_job", known.get)

    says(None)
    return says


@pytest.mark.parametrize("status", ["done", "paused", "stopped", "failed"])
def test_a_final_status_ends_it(status: str, tmp_path: Path) -> None:
    write_state(tmp_path, status)
    assert RunWatch(tmp_path).why_over() == f"the run ended ({status})"


@pytest.mark.parametrize(("job_state", "over"), [("PENDING", False), ("COMPLETING", False), ("FAILED", True)])
def test_a_run_that_lost_a_node_is_over_only_if_its_job_is(
    job_state: str, over: bool, tmp_path: Path, slurm: Slurm
) -> None:
    slurm(job_state)
    write_state(tmp_path, "failed", job={"id": "5", "restarts": 0})
    assert bool(RunWatch(tmp_path).why_over()) == over


def test_only_one_evaluator_follows_a_run(run_dir: Path) -> None:
    (run_dir / "eval").mkdir()
    with lock_run_folder(run_dir / "eval"), pytest.raises(InputError, match="in use by another process"):
        follow_run(run_dir, [], BOTH, POLL)


def test_a_run_that_fails_before_it_writes_its_settings_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(tmp_path, "failed")
    follow_run(tmp_path, [], BOTH, POLL)
    assert "no checkpoint can be measured" in capsys.readouterr().err


@pytest.mark.parametrize("status", ["starting", "running"])
@pytest.mark.parametrize(
    ("minutes", "job", "job_state", "over"),
    [
        (29, None, None, False),
        (31, None, None, True),
        (31, "5", None, True),
        (31, "5", "NODE_FAIL", True),
        (31, "5", "RUNNING", False),
        (31, "5", "PENDING", False),
    ],
)
def test_a_missing_heartbeat_ends_it_unless_the_job_is_active(
    status: str, minutes: int, job: str | None, job_state: str | None, over: bool, tmp_path: Path, slurm: Slurm
) -> None:
    slurm(job_state)
    write_state(tmp_path, status, age=60 * minutes, job={"id": job, "restarts": 0} if job else None)
    why = RunWatch(tmp_path).why_over()
    assert (why is not None) == over
    assert not over or "no heartbeat for 31 min" in str(why)


@pytest.mark.parametrize("status", ["queued", "preempted"])
def test_a_run_in_the_queue_has_no_heartbeat(
    status: str, tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time without a heartbeat counts from the start of the evaluator, and only if its job has gone."""
    write_state(tmp_path, status, age=1e6)
    (tmp_path / "launch.json").write_text('{"job_id": "5"}')
    watch = RunWatch(tmp_path)
    assert watch.why_over() is None
    now = time.time()
    slurm("PENDING")
    monkeypatch.setattr(follow.time, "time", lambda: now + 1900)
    assert watch.why_over() is None
    slurm("CANCELLED")
    assert watch.why_over() is None  # the job was waiting at the last look
    monkeypatch.setattr(follow.time, "time", lambda: now + 3800)
    assert "has written no heartbeat" in str(watch.why_over())


def test_a_run_that_was_never_started_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RunWatch(tmp_path / "later")
    monkeypatch.setattr(follow.time, "time", lambda: 1e12)
    assert watch.why_over() is None


# --- the command ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--follow", "x", "--checkpoint", "last"], "--checkpoint only applies to --run_dir: remove it"),
        (["--follow", "x", "--poll_seconds", "0"], "--poll_seconds is 0: give a number above 0"),
        (["--run_dir", "x", "--poll_seconds", "5"], "--poll_seconds only applies to --follow: give --follow DIR, or"),
    ],
)
def test_contradicting_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err
