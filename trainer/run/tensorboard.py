"""TensorBoard files of a run: tensorboard/ for the training, tensorboard/eval/ for the evaluator."""

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
from trainer.models.encoder import Normalize

_log = logging.getLogger(__name__)
_SHOWN_IMAGES = 8


class Board:
    """Writer of the curves, settings and views of a run, on rank 0.

    If a file cannot be written, for example because the disk is full, it logs the error and writes nothing more until
    the next start."""

    def __init__(self, run_dir: Path, first_step: int, config: Config) -> None:
        """Open the files and write the settings as a table. Curves of an earlier start beyond `first_step` are hidden."""
        self._writer: SummaryWriter | None = None
        self._num_views = config.views.num_views
        self._normalize = Normalize(config.views)
        rows = "".join(f"| {name} | {value} |\n" for name, value in flatten(config).items())
        table = f"| setting | value |\n|---|---|\n{rows}"
        with self._until_first_failure():
            self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
            self._writer.add_text("settings", table, first_step + 1)

    def draw(self, values: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
        """Add a line of metrics.jsonl to the curves. None leaves a gap."""
        if not self._writer:
            return
        with self._until_first_failure():
            for name, metric in metrics.items():
                if metric.group and values[name] is not None:
                    self._writer.add_scalar(f"{metric.group}/{name}", values[name], values["step"])

    def draw_views(self, views: Tensor, step: int) -> None:
        """Add a picture of a step's first images: one row for each, with its views side by side.

        views: (d*N, 3, S, S), view-major, uint8 or normalised."""
        # The n images go below each other and their d views beside each other.
        shown = views.unflatten(0, (self._num_views, -1))[:, :_SHOWN_IMAGES]  # (d, n, 3, S, S)
        grid = shown.permute(2, 1, 3, 0, 4)  # (3, n, S, d, S)
        picture = grid.flatten(3, 4).flatten(1, 2).cpu()  # (3, n*S, d*S)
        if picture.is_floating_point():
            picture = self._normalize.undo(picture)[0]
        with self._until_first_failure():
            if self._writer:
                self._writer.add_image("views", picture, step)

    def close(self) -> None:
        """Write buffered events and close the files."""
        with self._until_first_failure():
            if self._writer:
                self._writer.close()

    @contextmanager
    def _until_first_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # also an earlier error of the writer's thread, raised by the next call
            _log.error("cannot write TensorBoard files: %s; none are written until the next start", error.strerror)
            self._writer = None


def draw_evaluation(run_dir: Path, step: int, results: Mapping[str, float]) -> None:
    """Add the results of one checkpoint to the curves eval/NAME, at its step. Raises OSError.

    results: percentages by name, such as knn_top1. They are in a separate folder, because TensorBoard reads only the
    newest of several files that grow in one folder."""
    with SummaryWriter(str(run_dir / "tensorboard" / "eval")) as writer:
        for name, value in results.items():
            writer.add_scalar(f"eval/{name}", value, step)
