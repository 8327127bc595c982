"""Metrics of a run: sums, rates, the log line, metrics.jsonl and TensorBoard."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import ROOT
from trainer.config.schema import METHODS, Config
from trainer.distributed.ranks import Ranks
from trainer.methods.method import Method
from trainer.methods.wmse.method import WMSE
from trainer.metrics import (
    Clock,
    DelayedMetrics,
    MetricSums,
    MetricsWriter,
    all_metrics,
    count_skipped_images,
    describe_line,
)
from trainer.models.encoder import Normalize
from trainer.models.online_probe import OnlineProbe
from trainer.run.health import effective_rank, sums_of_products
from trainer.run.tensorboard import Board, draw_evaluation
from trainer.step import RankFlags, StepResult

CPU = torch.device("cpu")


class OnlyMetrics(Method):
    metrics = WMSE.metrics


def result(loss: float, *, skipped: bool = False, pivot: float = 0.5) -> StepResult:
    metrics = {"min_pivot": torch.tensor(pivot)}
    return StepResult(torch.tensor(loss), metrics, torch.randn(8, 3), torch.tensor(skipped), flags(3 * skipped, 0, 0))


def flags(*values: int) -> RankFlags:
    return RankFlags(*torch.tensor(values, dtype=torch.int32).unbind())


def line(step: int, loss: float = 1.0, **more: float) -> dict[str, Any]:
    """Return a record like those of `DelayedMetrics.ready`."""
    known = Clock(16, 2, 10, step - 1, 40).line(step)
    rest = {"lr": 0.1, "memory_gib": 1.0, "memory_limit_gib": 8.0, "skipped_images": 1}
    metrics = {"loss": loss, "effective_rank": 3.0, "min_pivot": 0.5, "skipped_steps": 0.0}
    metrics |= {"rows_high": 1.0, "rows_low": float(step)}
    return {"step": step, **dict.fromkeys(RankFlags._fields, 0.0), **known, **rest, **metrics, **more}


def lines_in(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_effective_rank_is_k_for_white_embeddings_and_1_on_a_line() -> None:
    white = torch.linalg.qr(torch.randn(64, 6, dtype=torch.float64) - 0)[0]
    white = white - white.mean(0)
    white = torch.linalg.qr(white)[0]
    assert effective_rank(sums_of_products(white + 1000, 1)).item() == pytest.approx(6)
    assert effective_rank(sums_of_products(torch.randn(64, 1) * torch.ones(1, 6), 1)).item() == pytest.approx(1)


def test_skipped_updates_do_not_count_in_the_mean() -> None:
    sums = MetricSums(WMSE.metrics, CPU)
    for step in (result(1.0), result(float("nan"), skipped=True, pivot=0.0), result(3.0, pivot=0.2)):
        sums.add(step)
    taken = sums.take(torch.randn(8, 3), Ranks())
    assert (taken["loss"], taken["skipped_steps"], taken["min_pivot"]) == (2.0, 1.0, 0.0)
    sums.add(result(5.0))
    taken = sums.take(torch.randn(8, 3), Ranks())
    assert (taken["loss"], taken["skipped_steps"], taken["min_pivot"]) == (5.0, 0.0, 0.5)


def test_sums_are_saved_and_loaded() -> None:
    sums, other = MetricSums(WMSE.metrics, CPU), MetricSums(WMSE.metrics, CPU)
    sums.add(result(1.0, pivot=0.1))
    other.load(sums.state(Ranks()))
    other.add(result(2.0))
    taken = other.take(torch.randn(8, 3), Ranks())
    assert taken["loss"] == 1.5
    assert taken["min_pivot"].item() == pytest.approx(0.1)


def test_delayed_metrics_are_ready_after_the_given_number_of_steps() -> None:
    late = DelayedMetrics(2)
    late.add(10, flags(0, 0, 1), {"lr": 0.1}, {"loss": torch.tensor(1.5)})
    late.add(11, flags(7, 0, 0), {}, {})
    assert late.ready(11) == []
    assert late.ready(12) == [{"step": 10, "lr": 0.1, "fault": 0, "stop": 0, "save": 1, "loss": 1.5}]
    assert late.ready(12) == []
    assert late.ready() == [{"step": 11, "fault": 7, "stop": 0, "save": 0}]


def test_delayed_metrics_hold_the_values_at_the_call() -> None:
    late, values = DelayedMetrics(0), torch.tensor([1, 0, 0])
    late.add(1, RankFlags(*values.unbind()), {}, {})
    values.fill_(2)
    assert late.ready(1)[0]["fault"] == 1


class ManualClock:
    """Clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_those_since_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has 16 images a step, 2 views and 3 steps an epoch."""
    hand = ManualClock()
    monkeypatch.setattr("trainer.metrics.time", SimpleNamespace(perf_counter=hand, time=hand))
    clock = Clock(16, 2, 3, first_step=5, end_step=20)
    for step, seconds, wait, (views_per_s, data_wait) in ((9, 4.0, 1.0, (32.0, 0.5)), (13, 2.0, 0.25, (64.0, 0.25))):
        hand.now += seconds
        clock.waited(wait)
        clock.waited(wait)
        known = clock.line(step)
        assert (known["views_per_s"], known["images_per_s"], known["data_wait"]) == (
            views_per_s,
            views_per_s / 2,
            data_wait,
        )
        assert known["seconds_per_step"] == seconds / 4
        assert known["time"] == hand.now
        assert known["epoch"] == pytest.approx(step / 3, abs=1e-4)
        assert known["eta_seconds"] > 0
    assert 0.5 * 7 < known["eta_seconds"] < 1.0 * 7  # between the last two rates
    hand.now += 1
    assert clock.line(20)["eta_seconds"] == 0


def test_the_log_line_shows_all_metrics() -> None:
    values = line(3900, 0.8123, epoch=12.5, lr=5.93, images_per_s=1690.4, views_per_s=6761.6, seconds_per_step=0.6059,
                  data_wait=0.02, memory_gib=42.1, memory_limit_gib=79.6, effective_rank=61.2, min_pivot=0.0123,
                  eta_seconds=16690.2, skipped_images=0)  # fmt: skip
    assert describe_line(values, all_metrics(WMSE.metrics), 31200, 100) == (
        "epoch 12/100  step 3900/31200  loss 0.812  lr 5.93  1690 img/s  6762 views/s  0.606 s/step  data 2%  "
        "mem 42.1/80 GiB  eff. rank 61.2  min pivot 1.2e-02  ETA 4:38:10"
    )
    text = describe_line(
        values | {"loss": None, "skipped_steps": 20, "skipped_images": 3}, all_metrics(WMSE.metrics), 31200, 100
    )
    assert "loss" not in text
    assert "skipped steps 20  skipped images 3" in text


def test_skipped_images_of_all_ranks_are_counted_once(tmp_path: Path) -> None:
    quarantine = tmp_path / "quarantine.jsonl"
    assert count_skipped_images(quarantine, 2) == 2  # the file could not be written
    with quarantine.open("a") as file:
        for rank, image in ((0, 3), (1, 3), (1, 9), (0, 12)):
            entry = {"step": 5, "id": image, "image": f"{image}.jpg", "problem": "torn", "rank": rank}
            file.write(json.dumps(entry) + "\n")
            file.flush()
            count = count_skipped_images(quarantine, 2)
    assert count == 3


def test_a_line_is_written_at_once(tmp_path: Path) -> None:
    """A killed run has written all of its lines."""
    writer = MetricsWriter(tmp_path, 0, 10, 4, OnlyMetrics(), OnlyMetrics.metrics)
    writer.write(line(1))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
    writer.close()


def test_lines_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0, 10, 4, OnlyMetrics(), OnlyMetrics.metrics)
    for step in (2, 4, 6):
        writer.write(line(step))
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    writer = MetricsWriter(tmp_path, 4, 10, 4, OnlyMetrics(), OnlyMetrics.metrics)
    writer.write(line(6, float("nan"), skipped_steps=2.0, min_pivot=0.0, effective_rank=float("nan")))
    writer.close()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(at["step"], at["loss"]) for at in lines] == [(2, 1.0), (4, 1.0), (6, None)]
    assert [(at["skipped_steps"], at["skipped_images"]) for at in lines] == [(0, 1), (0, 1), (2, 1)]


def test_tensorboard_has_each_step_once_after_ten_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start continues two steps before the end of the previous one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of the same second are sorted by a counter of the process, as text: 10 would come before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    for first in range(0, 20, 2):
        writer = MetricsWriter(
            tmp_path, first, 30, 4, OnlyMetrics(), OnlyMetrics.metrics, [Board(tmp_path, first, Config())]
        )
        for step in range(first + 1, first + 5):
            writer.write(line(step, float(step)))
        writer.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(step, float(step)) for step in range(1, 23)]


def test_no_line_is_lost_on_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The disk takes half of the first line and nothing of the second; before the third it has space again."""
    writer = MetricsWriter(tmp_path, 0, 10, 4, OnlyMetrics(), OnlyMetrics.metrics)
    file, space = writer._file, [20, 0, 0, 10_000]

    def write(data: bytes) -> int:
        limit = space.pop(0) if len(space) > 1 else space[0]
        if not limit:
            raise OSError(28, "No space left on device")
        return file.write(data[:limit])

    writer._file = SimpleNamespace(write=write, close=file.close)
    for step in (1, 2, 3):
        writer.write(line(step))
    writer.close()
    assert [json.loads(text)["step"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert [r.getMessage() for r in caplog.records if "No space" in r.getMessage()] != []
    assert len([r for r in caplog.records if "No space" in r.getMessage()]) == 1


def test_tensorboard_shows_groups_settings_and_a_picture(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config()
    views = torch.arange(4 * 3 * 3 * 8 * 8).remainder(256).to(torch.uint8).view(12, 3, 8, 8)  # 4 views of 3 images
    writer = MetricsWriter(tmp_path, 0, 30, 4, OnlyMetrics(), OnlyMetrics.metrics, [Board(tmp_path, 0, config)])
    for step in (1, 2):
        writer.show_step(step, views)
        writer.write(line(step, float("nan")))
    writer.close()
    draw_evaluation(tmp_path, 2, {"knn_top1": 61.5})
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = board.Tags()
    assert {tag.partition("/")[0] for tag in tags["scalars"]} == {"train", "speed", "health"}
    assert "train/loss" not in tags["scalars"]  # the loss was not finite
    assert [e.value for e in board.Scalars("health/skipped_images")] == [1, 1]
    (text,) = board.Tensors("settings/text_summary")
    assert b"| optimizer.learning_rate | 0.1 |" in text.tensor_proto.string_val[0]
    (image,) = board.Images("views")
    assert (image.height, image.width) == (3 * 8, 4 * 8)
    drawn = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    assert (drawn[8:16, 16:24] == views[2 * 3 + 1].permute(1, 2, 0).numpy()).all()  # view 2 of image 1
    # Views that are normalised already are shown as the same pixels.
    scaled = replace(config.views, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    normalised = Board(tmp_path / "normalised", 0, replace(config, views=scaled))
    normalised.draw_views(Normalize(scaled)(views).bfloat16(), 1)
    normalised.close()
    (same,) = EventAccumulator(str(tmp_path / "normalised" / "tensorboard")).Reload().Images("views")
    shown = np.asarray(Image.open(io.BytesIO(same.encoded_image_string))).astype(int)
    assert abs(shown - drawn).max() <= 1
    evaluation = EventAccumulator(str(tmp_path / "tensorboard" / "eval")).Reload()
    assert [(e.step, e.value) for e in evaluation.Scalars("eval/knn_top1")] == [(2, 61.5)]


def test_every_field_of_metrics_jsonl_is_documented(tmp_path: Path) -> None:
    metrics = {**OnlyMetrics.metrics, **OnlineProbe.metrics}
    writer = MetricsWriter(tmp_path, 0, 10, 4, OnlyMetrics(), metrics)
    writer.write({**line(1), "probe_top1": 60.0})
    writer.close()
    table = (ROOT / "docs" / "metrics.md").read_text().partition("| field |")[2].partition("##")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    of_methods = {name for method in METHODS for name in getattr(Config(), method).method_class().metrics}
    assert sorted(documented) == sorted({*lines_in(tmp_path)[0], *of_methods})


@pytest.mark.parametrize("odd", ["7", "{}", '{"step": "3"}', "[" * 100_000, "\udcff"])
def test_an_invalid_line_is_dropped(odd: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + odd.encode("utf-8", "surrogateescape") + b"\n")
    MetricsWriter(tmp_path, 4, 10, 4, OnlyMetrics(), OnlyMetrics.metrics).close()
    assert path.read_text() == '{"step": 1}\n'
