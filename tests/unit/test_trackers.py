"""Curves in Weights & Biases (offline) and MLflow (a database file): the same run over several starts, and errors."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.processes import wait_until
from trainer.config.schema import Config
from trainer.errors import InputError
from trainer.metric import Metric
from trainer.run import trackers
from trainer.run.trackers import open_trackers

METRICS = {"step": Metric(), "loss": Metric("train"), "lr": Metric("train")}


def config_of(**log: str) -> Config:
    config = Config()
    return replace(config, log=replace(config.log, **log))


def log_steps(run_dir: Path, config: Config, steps: range) -> None:
    """Draw a loss for each of the steps, as one start of a run does."""
    (tracker,) = open_trackers(run_dir, config)
    for step in steps:
        tracker.draw({"step": step, "loss": step + 0.12345, "lr": None}, METRICS)
    tracker.close()


def test_nothing_is_connected_by_default(tmp_path: Path) -> None:
    assert open_trackers(tmp_path, Config()) == []


@pytest.mark.slow
def test_mlflow_continues_the_run_of_an_earlier_start(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    pytest.importorskip("sqlalchemy", reason="MLflow's database is not installed")
    address = f"sqlite:///{tmp_path}/curves.db"
    config = config_of(mlflow=address, project="paper")
    run_dir = tmp_path / "run_7"
    run_dir.mkdir()
    log_steps(run_dir, config, range(1, 4))
    log_steps(run_dir, config, range(3, 6))

    client = mlflow.MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("paper")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == json.loads((run_dir / "trackers.json").read_text())["mlflow"]
    assert run.info.run_name == "run_7"
    assert run.info.status == "FINISHED"
    assert run.data.params["wmse.slice_size"] == "256"
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in points] == [1, 2, 3, 3, 4, 5]
    assert all(point.value == point.step + 0.12345 for point in points)
    assert client.get_metric_history(run.info.run_id, "train/lr") == []


def losses_in(file: Path) -> set[float]:
    """Find the points of the curve train/loss in a file of wandb, whose values are JSON."""
    return set(map(float, re.findall(rb"train/loss.\x01.(\d+\.12345)", file.read_bytes())))


@pytest.mark.slow
def test_wandb_writes_offline_files_under_one_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    for steps in (range(1, 4), range(3, 6)):
        log_steps(tmp_path, config_of(wandb="offline"), steps)
    run_id = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb"))
    # A process of wandb writes the files, and may end a little later.
    for file, losses in zip(files, ((1, 2, 3), (3, 4, 5)), strict=True):
        expected = {loss + 0.12345 for loss in losses}
        wait_until(lambda file=file, expected=expected: losses_in(file) == expected, seconds=20)


def test_an_error_of_a_service_is_logged_once_and_ends_the_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreachable:
        def __init__(self, *_: object) -> None:
            raise ConnectionError("no route to the server")

    monkeypatch.setattr(trackers, "_MLflow", Unreachable)
    monkeypatch.setattr(trackers, "find_spec", lambda _: True)
    with caplog.at_level(logging.ERROR):
        log_steps(tmp_path, config_of(mlflow="https://nowhere.invalid"), range(1, 4))
    assert [record.message for record in caplog.records] == [
        "mlflow: no route to the server; no curves are sent there until the next start"
    ]


def test_a_service_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    released = threading.Event()

    class Hanging:
        def __init__(self, *_: object) -> None:
            released.wait(60)

    monkeypatch.setattr(trackers, "_Wandb", Hanging)
    monkeypatch.setattr(trackers, "find_spec", lambda _: True)
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 0.05)
    with caplog.at_level(logging.ERROR):
        log_steps(tmp_path, config_of(wandb="offline"), range(1, 4))
    assert "wandb: no answer within 0 s" in caplog.text
    released.set()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install 'wmse-trainer\[wandb\]'"):
        open_trackers(tmp_path, config_of(wandb="online"))
