"""TensorBoard's files of a run: the training's in tensorboard/, the evaluator's in tensorboard/eval/."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from trainer.config import Config, flatten

_log = logging.getLogger(__name__)
_SHOWN_IMAGES = 8
# names in metrics.jsonl by the group that TensorBoard shows them in
GROUPS = {
    "train": ("loss", "lr"),
    "speed": ("images_per_s", "views_per_s", "seconds_per_step", "data_wait", "memory_gib"),
    "health": ("effective_rank", "min_pivot", "failed_steps", "bad_images"),
}


class Board:
    """Writes for the first rank. A full disk ends no run: the board is given up until the next start, and that is logged."""

    def __init__(self, run_dir: Path, first_step: int, config: Config) -> None:
        """Show the settings as a table. What an earlier start wrote after `first_step` is hidden."""
        self._writer: SummaryWriter | None = None
        self._num_views = config.views.num_views
        rows = "".join(f"| {name} | {value} |\n" for name, value in flatten(config).items())
        with self._unless_it_fails():
            self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", first_step + 1)

    def draw(self, values: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl to the curves. What is None leaves a gap."""
        with self._unless_it_fails():
            for tag, name in ((f"{group}/{name}", name) for group, names in GROUPS.items() for name in names):
                if self._writer and values[name] is not None:
                    self._writer.add_scalar(tag, values[name], values["step"])

    def draw_views(self, views: Tensor, step: int) -> None:
        """Add a picture of a step's first images: a row each, with its views side by side.

        views: (d*N, 3, S, S) uint8, view-major."""
        shown = views.unflatten(0, (self._num_views, -1))[:, :_SHOWN_IMAGES]  # (d, n, 3, S, S)
        rows = shown.permute(2, 1, 3, 0, 4).flatten(3, 4).flatten(1, 2)  # (3, n*S, d*S)
        with self._unless_it_fails():
            if self._writer:
                self._writer.add_image("views", rows.cpu(), step)

    def close(self) -> None:
        """Write what is left."""
        with self._unless_it_fails():
            if self._writer:
                self._writer.close()

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # also one of its writing thread, which ends by it
            _log.error("can't write TensorBoard's files: %s; no more of them until the next start", error.strerror)
            self._writer = None


def draw_evaluation(run_dir: Path, step: int, results: Mapping[str, float]) -> None:
    """Add the results of one checkpoint to the curves: eval/NAME at its step. results: by name, such as knn_top1, in percent.

    In a folder of its own: TensorBoard reads only the newest of several files that grow in one folder. Raises OSError."""
    with SummaryWriter(str(run_dir / "tensorboard" / "eval")) as writer:
        for name, value in results.items():
            writer.add_scalar(f"eval/{name}", value, step)
