"""Write a run's TensorBoard files: those of the training in tensorboard/, those of the evaluator in tensorboard/eval/."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from trainer.config.schema import Config, flatten
from trainer.metric import Metric

_log = logging.getLogger(__name__)
_SHOWN_IMAGES = 8


class Board:
    """Writes the curves, settings and views of a run, on the first rank.

    If a file can't be written, for example to a full disk, this is logged and nothing more is written until the next start."""

    def __init__(self, run_dir: Path, first_step: int, config: Config) -> None:
        """Open the files and write the settings as a table. What an earlier start wrote after `first_step` is hidden."""
        self._writer: SummaryWriter | None = None
        self._num_views = config.views.num_views
        rows = "".join(f"| {name} | {value} |\n" for name, value in flatten(config).items())
        with self._until_first_failure():
            self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", first_step + 1)

    def draw(self, values: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
        """Add a line of metrics.jsonl to the curves. None leaves a gap."""
        with self._until_first_failure():
            for name, metric in metrics.items():
                if self._writer and metric.group and values[name] is not None:
                    self._writer.add_scalar(f"{metric.group}/{name}", values[name], values["step"])

    def draw_views(self, views: Tensor, step: int) -> None:
        """Add a picture of a step's first images: a row each, with its views side by side.

        views: (d*N, 3, S, S) uint8, view-major."""
        shown = views.unflatten(0, (self._num_views, -1))[:, :_SHOWN_IMAGES]  # (d, n, 3, S, S)
        rows = shown.permute(2, 1, 3, 0, 4).flatten(3, 4).flatten(1, 2)  # (3, n*S, d*S)
        with self._until_first_failure():
            if self._writer:
                self._writer.add_image("views", rows.cpu(), step)

    def close(self) -> None:
        """Write what is buffered and close the files."""
        with self._until_first_failure():
            if self._writer:
                self._writer.close()

    @contextmanager
    def _until_first_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # the writer raises errors of its thread here as well
            _log.error("can't write TensorBoard files: %s; none are written until the next start", error.strerror)
            self._writer = None


def draw_evaluation(run_dir: Path, step: int, results: Mapping[str, float]) -> None:
    """Add the results of one checkpoint to the curves: eval/NAME at its step. results: by name, such as knn_top1, in percent.

    In a folder of its own: TensorBoard reads only the newest of several files that grow in one folder. Raises OSError."""
    with SummaryWriter(str(run_dir / "tensorboard" / "eval")) as writer:
        for name, value in results.items():
            writer.add_scalar(f"eval/{name}", value, step)
