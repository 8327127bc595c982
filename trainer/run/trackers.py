"""Curves of a run in Weights & Biases and MLflow, if the settings ask for them. Nothing is sent anywhere otherwise.

A thread sends them, so that a slow server delays no step. The first error is logged and ends the sending until the next
start, because a run must not depend on a server. RUN_DIR/trackers.json keeps the ids under which the services know the run, so
that a requeued job continues the same curves.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trainer.config.schema import Config, flatten
from trainer.errors import InputError
from trainer.files import write_text
from trainer.metric import Metric

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 10.0  # a server that does not answer must not hold up the end of a run for longer


class Service(Protocol):
    """Connection to a service. Any method may raise any error of the service's package."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add points to curves. values: by name, such as train/loss."""

    def end(self) -> None:
        """Send what is left."""


class Tracker:
    """Curves of a run at one service."""

    def __init__(self, name: str, connect: Callable[[], Service]) -> None:
        """connect: opens the connection, in the thread."""
        self._name = name
        self._connect = connect
        self._calls: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        # One thread keeps the points in order. As a daemon it does not hold up the end of the process.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def draw(self, values: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
        """Add a line of metrics.jsonl to the curves. None leaves a gap."""
        points = {}
        for name, metric in metrics.items():
            if metric.group and values[name] is not None:
                points[f"{metric.group}/{name}"] = values[name]
        step = values["step"]
        self._calls.put(lambda service: service.log(points, step))

    def draw_views(self, views: Tensor, step: int) -> None:
        """Do nothing: the views stay in TensorBoard."""

    def close(self) -> None:
        """Send what is left. After some seconds without an answer, give up."""
        self._calls.put(lambda service: service.end())
        self._calls.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.error("%s: no answer within %.0f s: the last curves may be missing there", self._name, _CLOSE_SECONDS)

    def _work(self) -> None:
        """Connect, and make the calls in order. The first error ends this."""
        try:
            service = self._connect()
            while call := self._calls.get():
                call(service)
        except Exception as error:  # the packages raise errors of many types
            _log.error("%s: %s; no curves are sent there until the next start", self._name, error)


class _Wandb:
    """Run in Weights & Biases. "offline" writes files to RUN_DIR/wandb, which `wandb sync` sends later."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        import wandb

        # Views of the steps after a checkpoint come again after a restart, so the step is a value of its own.
        settings = wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_git=True,
        )
        self._run = wandb.init(
            id=_id(run_dir, "wandb", lambda: os.urandom(4).hex()),
            resume="allow",
            mode="offline" if config.log.wandb == "offline" else "online",
            project=config.log.project,
            name=run_dir.name,
            dir=run_dir,
            config=flatten(config),
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def end(self) -> None:
        self._run.finish()


class _MLflow:
    """Run of an MLflow server, or of a database file (sqlite:///FILE)."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        # By default a server that does not answer would be asked again for minutes, with a line in the log each time.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=config.log.mlflow)
        self._id = _id(run_dir, "mlflow", lambda: self._create(run_dir, config.log.project))
        # The end of an earlier start has marked the run as finished.
        self._client.update_run(self._id, status="RUNNING")
        # A parameter of a run cannot change, so a resumed run keeps those of its first start.
        known = self._client.get_run(self._id).data.params
        new = []
        for name, value in flatten(config).items():
            if name not in known:
                new.append(Param(name, str(value)[:500]))  # a server takes no longer texts
        for first in range(0, len(new), 100):  # the most that a server takes at once
            self._client.log_batch(self._id, params=new[first : first + 100])

    def _create(self, run_dir: Path, project: str) -> str:
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        run = self._client.create_run(number, run_name=run_dir.name)
        return run.info.run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric as Point

        now = round(time.time() * 1000)  # MLflow counts milliseconds
        points = [Point(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=points)

    def end(self) -> None:
        self._client.set_terminated(self._id)


def open_trackers(run_dir: Path, config: Config) -> list[Tracker]:
    """Connect the run to the services of its settings. Rank 0 calls this.

    Raises InputError if the package of a service is not installed."""
    services: dict[str, Callable[[Path, Config], Service]] = {}
    if config.log.wandb != "off":
        services["wandb"] = _Wandb
    if config.log.mlflow:
        services["mlflow"] = _MLflow
    for name in services:
        if find_spec(name) is None:
            raise InputError(
                f"log.{name} is set, but the package {name} is not installed: run pip install 'wmse-trainer[{name}]', or "
                f"remove the setting"
            )
    return [Tracker(name, partial(kind, run_dir, config)) for name, kind in services.items()]


def _id(run_dir: Path, service: str, make: Callable[[], str]) -> str:
    """Return the id of the run at a service. The first start makes it and keeps it in RUN_DIR/trackers.json."""
    path = run_dir / "trackers.json"
    ids = json.loads(path.read_text()) if path.exists() else {}
    # A requeued job finds the id of its first start.
    if service not in ids:
        ids[service] = make()
        write_text(path, json.dumps(ids) + "\n")
    return ids[service]
