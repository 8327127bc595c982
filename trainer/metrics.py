"""What a run says of itself: sums kept on the device, read late; metrics.jsonl, TensorBoard, a progress bar or plain lines."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from trainer.cluster.ranks import Ranks
from trainer.faults import CollapseWatch
from trainer.files import write_text
from trainer.step import StepResult

_log = logging.getLogger(__name__)


class Late:
    """Small device tensors whose values the host takes `delay` steps later, when the copy is long done: no waiting."""

    def __init__(self, delay: int) -> None:
        self._delay = delay
        self._waiting: deque[tuple[Any, Tensor, Any]] = deque()

    def put(self, tag: Any, values: Tensor) -> None:
        """Start the copy of `values` to the host."""
        event = None
        if values.device.type == "cuda":
            host = torch.empty_like(values, device="cpu", pin_memory=True)  # a copy to pageable memory would wait
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host = values.detach().clone()
        self._waiting.append((tag, host, event))

    def take(self, *, everything: bool = False) -> list[tuple[Any, list[float]]]:
        """What is due: all but the newest `delay`, or everything."""
        due = []
        while len(self._waiting) > (0 if everything else self._delay):
            tag, host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            due.append((tag, host.tolist()))
        return due


class LossSums:
    """Loss of the steps since the last logged line, on the device; steps whose update was left out do not count."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, applied steps, failed steps
        self.min_pivot = torch.ones((), device=device)

    def add(self, result: StepResult) -> None:
        """Add one step."""
        applied = ~result.failed
        loss = torch.where(applied, result.loss, 0.0).double()
        self.sums += torch.stack([loss, applied.double(), result.failed.double()])
        self.min_pivot = torch.minimum(self.min_pivot, result.min_pivot)

    def take(self, embeddings: Tensor, ranks: Ranks) -> Tensor:
        """(4,) mean loss over steps and ranks, failed steps, smallest pivot, effective rank; starts again from 0."""
        sums, pivot = self._over_ranks(ranks)
        self.sums.zero_()
        self.min_pivot.fill_(1.0)
        mean_loss = sums[0] / sums[1]  # NaN where no step was applied
        return torch.stack([mean_loss, sums[2] / ranks.world_size, pivot.double(), effective_rank(embeddings, ranks)])

    def state(self, ranks: Ranks) -> dict[str, Any]:
        """For a checkpoint between two logged lines: a rank's share of the sums over all. Every rank calls this."""
        sums, pivot = self._over_ranks(ranks)
        return {"sums": sums / ranks.world_size, "min_pivot": pivot}

    def _over_ranks(self, ranks: Ranks) -> tuple[Tensor, Tensor]:
        sums, pivot = self.sums.clone(), self.min_pivot.clone()
        if ranks.world_size > 1:
            dist.all_reduce(sums)
            dist.all_reduce(pivot, dist.ReduceOp.MIN)
        return sums, pivot

    def load(self, state: dict[str, Any]) -> None:
        """What `state` gave."""
        self.sums.copy_(state["sums"])
        self.min_pivot = state["min_pivot"].to(self.sums.device)


def effective_rank(embeddings: Tensor, ranks: Ranks) -> Tensor:
    """(tr S)^2 / |S|^2 of the covariance S of all ranks' embeddings, 0-d: k where S is a multiple of the identity, 1 on a
    line. In float64, since it is a difference of large sums; computed on logged steps only.

    embeddings: (R, k). Every rank calls this.
    """
    x = torch.cat([embeddings.double(), torch.ones_like(embeddings[:, :1], dtype=torch.float64)], dim=1)
    products = x.T @ x  # of columns, and of columns with ones: sums
    if ranks.world_size > 1:
        dist.all_reduce(products)
    sums, count = products[:-1, -1], products[-1, -1]
    covariance = products[:-1, :-1] - sums.outer(sums) / count
    return covariance.diagonal().sum().square() / covariance.square().sum()


class Progressed(NamedTuple):
    """What the host knows of a logged line before the device's values arrive."""

    step: int
    epoch: float
    learning_rate: float
    images_per_s: float
    views_per_s: float
    data_wait: float
    bad_images: int


class MetricsWriter:
    """The one writer of a run (first rank). Lines after `first_step`, of a run that was killed, are dropped."""

    def __init__(self, run_dir: Path, first_step: int, total_steps: int, *, tensorboard: bool) -> None:
        self._path = run_dir / "metrics.jsonl"
        _drop_lines_after(self._path, first_step)
        self._file = self._path.open("ab", buffering=0)
        self._unwritten = b""  # while the disk is full
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1) if tensorboard else None
        self._bar = _progress_bar() if sys.stderr.isatty() else None
        self._collapse = CollapseWatch()
        self._total = total_steps
        if self._bar:
            self._task = self._bar.add_task("", total=total_steps, completed=first_step)
            self._bar.start()

    def write(self, at: Progressed, device_values: list[float]) -> None:
        """One logged line. device_values: as `LossSums.take` gives them."""
        loss, failed_steps, min_pivot, rank = device_values
        self._collapse.see(at.step, min_pivot, rank)
        record = {
            "step": at.step,
            "epoch": round(at.epoch, 4),
            "loss": _number(loss),
            "lr": at.learning_rate,
            "views_per_s": round(at.views_per_s, 1),
            "data_wait": round(at.data_wait, 4),
            "min_pivot": min_pivot,
            "effective_rank": _number(round(rank, 3)),
            "failed_steps": int(failed_steps),
            "bad_images": at.bad_images,
            "time": round(time.time(), 3),
        }
        self._append(json.dumps(record) + "\n")
        self._draw(record)
        if self._bar:
            short = f"loss {loss:.3f}  {at.views_per_s:.0f} views/s  wait {at.data_wait:.0%}"
            self._bar.update(self._task, completed=at.step, description=short)
        else:
            _log.info(
                f"step {at.step}/{self._total}  epoch {at.epoch:.2f}  loss {loss:.4f}  lr {at.learning_rate:.3g}  "
                f"{at.views_per_s:.0f} views/s  data wait {at.data_wait:.0%}  pivot {min_pivot:.1e}  rank {rank:.1f}"
            )

    def _append(self, line: str) -> None:
        """A full disk ends no run: what could not be written is tried again with the next line."""
        failed_before = bool(self._unwritten)
        self._unwritten += line.encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]
        except OSError as error:
            if not failed_before:
                _log.error("can't write to %s: %s; its lines are kept and tried again", self._path, error.strerror)

    def _draw(self, record: dict[str, Any]) -> None:
        if self._board is None:
            return
        try:
            for name in ("loss", "lr", "views_per_s", "data_wait", "min_pivot", "effective_rank", "failed_steps"):
                if record[name] is not None:
                    self._board.add_scalar(name, record[name], record["step"])
        except OSError as error:  # of its writing thread, which ends by it
            _log.error("can't write to TensorBoard's files: %s; no more of them until the next start", error.strerror)
            self._board = None

    def close(self) -> None:
        """Flush everything."""
        if self._bar:
            self._bar.stop()
        if self._board:
            try:
                self._board.close()
            except OSError as error:
                _log.error("can't write to TensorBoard's files: %s", error.strerror)
        self._file.close()


def _number(value: float) -> float | None:
    """For JSON, which has no NaN: no loss where no step was applied, no effective rank of embeddings that are all the same."""
    return value if math.isfinite(value) else None


def _progress_bar() -> Progress:
    columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True))


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`: those after it will be written again. A torn last line goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            is_kept = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError, RecursionError):  # the last for brackets in brackets in brackets
            _log.warning("%s: dropped a torn line", path)
            continue
        if is_kept:
            kept.append(line + "\n")
    write_text(path, "".join(kept))
