"""Metrics of a run: collected on the device, read two steps later, written to metrics.jsonl, TensorBoard and the log.

A metric has the same name everywhere; docs/metrics.md explains each name.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.quarantine import read_quarantine
from trainer.distributed.ranks import Ranks
from trainer.files import parse_object, write_text
from trainer.methods.method import Method
from trainer.metric import Metric
from trainer.progress import RunBar
from trainer.run.digests import Digests, join_halves
from trainer.run.faults import CollapseWatch
from trainer.run.health import (
    MOST_DIMENSIONS,
    effective_rank,
    joint_products,
    measure_health,
    sums_of_products,
    undefined_health,
)
from trainer.run.repeated import RepeatedSteps
from trainer.run.shares import METRICS, RankPace, describe_loss, measure_shares, unknown_shares
from trainer.run.tensorboard import Board
from trainer.run.trackers import Tracker
from trainer.step import RankFlags, StepResult

_log = logging.getLogger(__name__)
# Metrics of every run. The method and the online probe add others (`TrainStep.metrics`).
_COMMON = {
    "step": Metric(),
    "epoch": Metric(),
    "loss": Metric("train", "loss {:.3f}"),
    "lr": Metric("train", "lr {:.3g}"),
    "images_per_s": Metric("speed", "{:.4g} img/s"),
    "views_per_s": Metric("speed", "{:.4g} views/s"),
    "seconds_per_step": Metric("speed", "{:.3g} s/step"),
    "data_wait": Metric("speed", "data {:.0%}"),
    **METRICS,
    "memory_gib": Metric("speed", "mem {:.1f}/{memory_limit_gib:.0f} GiB"),
    "effective_rank": Metric("health", "eff. rank {:.3g}"),
    "rankme": Metric("health", "RankMe {:.3g}"),
    "lidar": Metric("health", "LiDAR {:.3g}"),
    "condition": Metric("health"),
    "condition_view": Metric(),
    "largest_share": Metric(),
    "dimensions_99": Metric(),
    "skipped_steps": Metric("health", "skipped steps {:d}", only_if_not_zero=True),
    "skipped_images": Metric("health", "skipped images {:d}", only_if_not_zero=True),
    "memory_limit_gib": Metric(),
    "eta_seconds": Metric(),
    "time": Metric(),
}


def all_metrics(others: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics of a run by their names in metrics.jsonl. others: those of the method and the online probe."""
    return {**_COMMON, **others}


class DelayedMetrics:
    """Copies small values from the device to the host, which reads them `delay` steps later and so never waits for them."""

    def __init__(self, delay: int) -> None:
        self._delay = delay
        self._waiting: deque[tuple[dict[str, Any], dict[str, torch.Size], Tensor, Any]] = deque()

    def add(self, step: int, flags: RankFlags, known: Mapping[str, Any], metrics: Mapping[str, Tensor]) -> None:
        """Start to copy the flags and metrics after `step` steps to the host.

        known: values that are already on the host. metrics: tensors by name; empty if no line is due.
        """
        # Join all values in one tensor, which takes one copy. float64 holds flags exactly.
        on_device = {**flags._asdict(), **metrics}
        tensors = [value.double() for value in on_device.values()] if metrics else list(flags)
        values = torch.cat([value.flatten() for value in tensors])
        shapes = {name: value.shape for name, value in on_device.items()}
        event = None
        if values.device.type == "cuda":
            # A copy to pageable memory would wait for the device, and a spinning event would occupy a core.
            host = torch.empty_like(values, device="cpu", pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record()
        else:
            host = values.detach().clone()
        record = {"step": step, **known}
        self._waiting.append((record, shapes, host, event))

    def ready(self, step: float = math.inf) -> list[dict[str, Any]]:
        """Return the records that are due after `step` steps, in order; without `step`, all records.

        A record holds `known`, the flags and the metrics, all by name: numbers, and arrays of those that are not 0-d."""
        due = []
        # Records wait in the order of their steps. After `delay` steps a copy is complete, so this does not wait.
        while self._waiting and self._waiting[0][0]["step"] <= step - self._delay:
            known, shapes, host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            parts = host.split([shape.numel() for shape in shapes.values()])
            values: dict[str, Any] = {}
            for (name, shape), part in zip(shapes.items(), parts, strict=True):
                values[name] = part.view(shape).numpy() if shape else part.item()
            due.append(known | values)
        return due


class MetricSums:
    """Sums of the loss and the metrics of a method since the last logged line, on the device, and the digests of the run.

    Skipped updates only count for metrics that keep the smallest value."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._means = ["loss", *(name for name, metric in metrics.items() if metric.over == "mean")]
        self._minima = [name for name, metric in metrics.items() if metric.over == "min"]
        # The sum for each mean, then the numbers of applied and of skipped updates.
        self._sums = torch.zeros(len(self._means) + 2, dtype=torch.float64, device=device)
        self._smallest = torch.full((len(self._minima),), torch.inf, dtype=torch.float64, device=device)
        self._rows = torch.zeros(2, dtype=torch.float64, device=device)
        self._spent = torch.zeros(2, dtype=torch.float64, device=device)
        self._pace = torch.zeros(1, len(RankPace._fields), dtype=torch.float64, device=device)  # a row for each rank
        self._delays = torch.zeros((), dtype=torch.float64, device=device)
        self.digests = Digests()

    def add(self, result: StepResult, rows_digest: int = 0) -> None:
        """Add the loss, the metrics and the digest of the rows of one step."""
        self.digests.add_rows(rows_digest)
        self._delays += result.delay
        values = {"loss": result.loss, **result.metrics}
        applied = ~result.skipped
        means = torch.stack([values[name].double() for name in self._means])
        counts = torch.stack([applied, result.skipped]).double()
        # A skipped update adds 0, even if its loss is NaN.
        self._sums += torch.cat([torch.where(applied, means, 0.0), counts])
        # The smallest value often belongs to an update that was skipped because of it.
        if self._minima:
            smallest = torch.stack([values[name].double() for name in self._minima])
            self._smallest = torch.minimum(self._smallest, smallest)

    def take(
        self,
        embeddings: Tensor,
        ranks: Ranks,
        num_views: int = 1,
        spent: tuple[float, float] = (0.0, 0.0),
        pace: RankPace = RankPace(),  # noqa: B008 (cannot be changed)
    ) -> dict[str, Tensor]:
        """Return the metrics of the steps since the last call over all ranks, float64, by their names in metrics.jsonl.

        All but "products" and "pace" are 0-d. `MetricsWriter` joins the halves of the digest of the rows so far, and measures
        the health of the embeddings by "products", which only rank 0 gets, and no rank above MOST_DIMENSIONS. It divides the
        time by "pace" (ranks, n), which has `pace` of each rank, and "longest_delays" in microseconds.

        embeddings: (R, k) of `num_views` views, view-major. spent: joules and seconds without an energy counter of this rank,
        from `RunCost.own`."""
        for number, amount in enumerate(spent):
            self._spent[number].fill_(amount)  # as in Digests.put_halves, so that the host does not wait
        if len(self._pace) != ranks.world_size:
            self._pace = self._pace.new_empty(ranks.world_size, len(pace))
        # The rows of the other ranks are 0, so that the sum has the row of each.
        self._pace.zero_()
        for column, value in enumerate(pace):
            self._pace[ranks.rank, column].fill_(value)
        # The eigenvalues of large matrices would take the host too long.
        is_large = embeddings.shape[1] > MOST_DIMENSIONS
        products = joint_products(embeddings) if is_large else sums_of_products(embeddings, num_views)
        if ranks.world_size > 1:
            dist.all_reduce(products)
        sums, smallest, rows, spent_by_all, pace_of_all = self._over_ranks(ranks)
        delays = self._delays.clone()
        # The next line begins with empty sums.
        self._sums.zero_()
        self._delays.zero_()
        self._smallest.fill_(torch.inf)
        applied, skipped = sums[-2:]
        means = sums[:-2] / applied  # NaN if no update was applied
        return {
            **dict(zip(self._means, means.unbind(), strict=True)),
            **dict(zip(self._minima, smallest.unbind(), strict=True)),
            "effective_rank": effective_rank(products),
            "skipped_steps": skipped / ranks.world_size,
            "rows_high": rows[0],
            "rows_low": rows[1],
            "joules": spent_by_all[0],
            "unmeasured_seconds": spent_by_all[1],
            "pace": pace_of_all,
            "longest_delays": delays,
            **({"products": products} if ranks.is_first and not is_large else {}),
        }

    def state(self, ranks: Ranks) -> dict[str, Any]:
        """Return the state for a checkpoint between two logged lines: the sums over all ranks, divided by their number.

        Every rank calls this."""
        return self.state_and_rows(ranks)[0]

    def state_and_rows(self, ranks: Ranks) -> tuple[dict[str, Any], Tensor]:
        """Return `state` and the halves of the digest of the rows (2,), which the same all-reduce sums over ranks."""
        sums, smallest, rows, *_ = self._over_ranks(ranks)
        return {"sums": sums / ranks.world_size, "smallest": smallest}, rows

    def _over_ranks(self, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        self.digests.put_halves(self._rows)
        # One all-reduce for all sums.
        parts = [self._sums, self._rows, self._spent, self._pace.flatten()]
        sums = torch.cat(parts)
        smallest = self._smallest.clone()
        if ranks.world_size > 1:
            dist.all_reduce(sums)
            if self._minima:
                dist.all_reduce(smallest, dist.ReduceOp.MIN)
        own, rows, spent, pace = sums.split([len(part) for part in parts])
        return own, smallest, rows, spent, pace.view_as(self._pace)

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        # Each rank loads the mean over the ranks: on any number of ranks, sums and counts keep their ratio.
        self._sums.copy_(state["sums"])
        self._smallest.copy_(state["smallest"])


class Clock:
    """Measures speed, data wait and time left since the last logged line."""

    def __init__(
        self, images_per_step: int, num_views: int, steps_per_epoch: int, first_step: int, end_step: int
    ) -> None:
        self._images_per_step = images_per_step
        self._num_views = num_views
        self._steps_per_epoch = steps_per_epoch
        self._end_step = end_step
        self._step = first_step
        self._since = time.perf_counter()
        self._wait = 0.0
        self._step_seconds = 0.0  # smoothed, for the time left

    def waited(self, seconds: float) -> None:
        """Add a wait for images."""
        self._wait += seconds

    def line(self, step: int, left_out: float = 0.0) -> dict[str, Any]:
        """Return the values of a line after `step` steps, by their names in metrics.jsonl, and start a new interval.

        left_out: seconds since the last line that belong to no step of the run."""
        now = time.perf_counter()
        elapsed = max(now - self._since - left_out, 1e-6)
        seconds = elapsed / (step - self._step)
        # Smooth the time of a step, so that the time left does not jump.
        if self._step_seconds:
            self._step_seconds = 0.7 * self._step_seconds + 0.3 * seconds
        else:
            self._step_seconds = seconds
        # Images of all ranks, as all of them take the same time for a step.
        images_per_s = self._images_per_step / seconds
        line = {
            "epoch": round(step / self._steps_per_epoch, 4),
            "images_per_s": round(images_per_s, 3),
            "views_per_s": round(images_per_s * self._num_views, 3),
            "seconds_per_step": round(seconds, 5),
            "data_wait": round(self._wait / elapsed, 4),
            "eta_seconds": round(self._step_seconds * (self._end_step - step), 1),
            "time": round(time.time(), 3),
        }
        self._step = step
        self._since = now
        self._wait = 0.0
        return line


class MetricsWriter:
    """Writes the metrics of a run on rank 0. It drops the lines after `first_step` that an earlier start wrote."""

    def __init__(
        self,
        run_dir: Path,
        first_step: int,
        end_step: int,
        epochs: int,
        method: Method | None = None,
        metrics: Mapping[str, Metric] = MappingProxyType({}),
        boards: Sequence[Board | Tracker] = (),
        digests: Digests | None = None,
        rounding: str = "",
    ) -> None:
        """epochs: length of the whole run. method: gives health warnings. metrics: besides the common ones.

        boards: draw curves of the lines.
        digests: those of the run, whose chain of losses the writer continues. rounding: as for
        `RepeatedSteps`."""
        self._path = run_dir / "metrics.jsonl"
        last_line, dropped = _drop_lines_after(self._path, first_step)
        self._digests = digests or Digests()
        if first_step > 0 and self._digests.since == first_step:
            # The digests begin anew, so they cannot be compared with those of the dropped lines.
            for line in dropped:
                line.pop("rows_digest", None)
        self._repeated = RepeatedSteps(dropped, first_step, last_line, rounding)
        self._file = self._path.open("ab", buffering=0)
        self._unwritten = b""  # lines that could not be written, for example because the disk is full
        self._boards = boards
        self._has_views = False
        self._bar = RunBar(first_step, end_step)
        self._collapse = CollapseWatch()
        self._method = method or Method()
        self._metrics = all_metrics(metrics)
        self._of_method = tuple(metrics)
        self._end_step = end_step
        self._epochs = epochs

    def show_step(self, step: int, views: Tensor) -> None:
        """Move the progress bar, and draw the first views of this start. views: (d*N, 3, S, S)."""
        self._bar.move(step)
        # Each start draws once, which shows what it trains on.
        if not self._has_views:
            for board in self._boards:
                board.draw_views(views, step)
            self._has_views = True

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record of `DelayedMetrics.ready` to metrics.jsonl, TensorBoard and the log. NaN and infinity are null."""
        products = record.get("products")
        health = undefined_health() if products is None else measure_health(products)
        pace = record.get("pace")
        shares = unknown_shares() if pace is None else measure_shares(pace, record["longest_delays"] / 1e6)
        record = {**record, **health, **shares}
        # Warnings go by the exact values, before they are rounded for the line.
        of_method = self._method.health_warnings(record)
        of_rank = self._collapse.warnings(record)
        for warning in (*of_method, *of_rank):
            _log.warning("step %d: %s", record["step"], warning)
        values: dict[str, Any] = {name: _finite(record[name]) for name in self._metrics}
        # A sum over ranks divided by their number; rounding removes the error of the division.
        values["skipped_steps"] = round(record["skipped_steps"])
        values["rows_digest"] = join_halves(record["rows_high"], record["rows_low"])
        # The digest takes the values as they are, while the line has null for NaN.
        exact = {name: record[name] for name in ("step", "loss", *self._of_method)}
        values["loss_digest"] = self._digests.chain(exact)
        self._repeated.compare(values)
        self._append(json.dumps(values) + "\n")
        for board in self._boards:
            board.draw(values, self._metrics)
        line = describe_line(values, self._metrics, self._end_step, self._epochs)
        _log.info("%s", line)
        text = f"loss {record['loss']:.3f}  {record['images_per_s']:.4g} img/s"
        self._bar.move(record["step"], text)

    def _append(self, line: str) -> None:
        """Append a line. If writing fails, for example on a full disk, the next call tries again."""
        failed_before = bool(self._unwritten)
        self._unwritten += line.encode()
        try:
            # A write to an unbuffered file may write only a part of the bytes.
            while self._unwritten:
                count = self._file.write(self._unwritten) or 0
                self._unwritten = self._unwritten[count:]
        except OSError as error:
            if not failed_before:
                _log.error(
                    "cannot write to %s: %s; the lines are kept, and written as soon as possible",
                    self._path,
                    error.strerror,
                )

    def close(self) -> None:
        """Stop the bar and close the files."""
        self._bar.close()
        self._repeated.close()
        for board in self._boards:
            board.close()
        self._file.close()


def describe_line(values: Mapping[str, Any], metrics: Mapping[str, Metric], end_step: int, epochs: int) -> str:
    """Format a line of metrics.jsonl for the log, without values that are null."""
    shown = []
    for name, metric in metrics.items():
        value = values.get(name)
        is_hidden = value is None or (metric.only_if_not_zero and value == 0)
        if metric.text and not is_hidden:
            shown.append(metric.text.format(value, **values, held_back=describe_loss(values)))
    # timedelta formats hours and days.
    time_left = timedelta(seconds=round(values["eta_seconds"]))
    head = [f"epoch {int(values['epoch'])}/{epochs}", f"step {values['step']}/{end_step}"]
    return "  ".join([*head, *shown, f"ETA {time_left}"])


def count_skipped_images(quarantine: Path, own: int) -> int:
    """Count the images that any rank skipped, from the file that all ranks append to.

    own: count of this rank, in case the file could not be written."""
    try:
        size = quarantine.stat().st_size
        return max(own, _count_lines(quarantine, size))
    except OSError:  # the file does not exist before the first skipped image
        return own


@lru_cache(maxsize=1)
def _count_lines(quarantine: Path, size: int) -> int:
    """Count the images in the file. The count is cached until the size of the file changes."""
    return len(read_quarantine(quarantine, sys.maxsize))


def _finite(value: float) -> float | None:
    """Replace NaN and infinity by None, because JSON lacks them.

    The loss is NaN if no update was applied, and the effective rank if all embeddings are equal. The condition number is
    infinite if there are too few images."""
    return value if math.isfinite(value) else None


def _drop_lines_after(path: Path, step: int) -> tuple[int, list[dict[str, Any]]]:
    """Keep the lines up to `step`, because later ones will be written again. An incomplete last line is dropped as well.

    Returns the step of the last line that is kept, 0 without one, and the later lines."""
    if not path.exists():
        return 0, []
    kept = []
    last_step = 0
    dropped = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        values = parse_object(line)
        line_step = values.get("step")
        if not isinstance(line_step, int):
            _log.warning("dropped an incomplete line of %s", path)
        elif line_step <= step:
            kept.append(line + "\n")
            last_step = line_step
        else:
            dropped.append(values)
    write_text(path, "".join(kept))
    return last_step, dropped
