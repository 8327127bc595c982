"""What a run says of itself."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.cluster.ranks import Ranks
from trainer.metrics import Late, LossSums, MetricsWriter, Progressed, effective_rank
from trainer.step import StepResult

CPU = torch.device("cpu")


def result(loss: float, *, failed: bool = False, pivot: float = 0.5) -> StepResult:
    agreed = torch.tensor([3 * failed, 0, 0])
    return StepResult(torch.tensor(loss), torch.randn(8, 3), torch.tensor(pivot), agreed[0] > 0, agreed)


def line(step: int) -> Progressed:
    return Progressed(step, step / 10, 0.1, 50.0, 100.0, 0.05, bad_images=1)


def test_effective_rank_is_k_for_white_and_1_on_a_line() -> None:
    white = torch.linalg.qr(torch.randn(64, 6, dtype=torch.float64) - 0)[0]
    white = white - white.mean(0)
    white = torch.linalg.qr(white)[0]
    assert effective_rank(white + 1000, Ranks()).item() == pytest.approx(6)
    assert effective_rank(torch.randn(64, 1) * torch.ones(1, 6), Ranks()).item() == pytest.approx(1)


def test_failed_steps_do_not_count_in_the_mean() -> None:
    sums = LossSums(CPU)
    for step in (result(1.0), result(float("nan"), failed=True, pivot=0.0), result(3.0, pivot=0.2)):
        sums.add(step)
    loss, failed, pivot, _ = sums.take(torch.randn(8, 3), Ranks()).tolist()
    assert (loss, failed) == (2.0, 1.0)
    assert pivot == 0.0
    sums.add(result(5.0))
    assert sums.take(torch.randn(8, 3), Ranks())[:3].tolist() == [5.0, 0.0, 0.5]


def test_sums_go_through_a_checkpoint() -> None:
    sums, other = LossSums(CPU), LossSums(CPU)
    sums.add(result(1.0, pivot=0.1))
    other.load(sums.state(Ranks()))
    other.add(result(2.0))
    loss, _, pivot, _ = other.take(torch.randn(8, 3), Ranks()).tolist()
    assert loss == 1.5
    assert pivot == pytest.approx(0.1)


def test_late_hands_out_in_order_and_only_what_is_due() -> None:
    late = Late(2)
    for i in range(3):
        late.put(i, torch.tensor([float(i)]))
    assert late.take() == [(0, [0.0])]
    assert late.take() == []
    assert late.take(everything=True) == [(1, [1.0]), (2, [2.0])]


def test_values_are_those_at_the_time() -> None:
    late, values = Late(0), torch.tensor([1.0])
    late.put("then", values)
    values.fill_(2.0)
    assert late.take() == [("then", [1.0])]


def test_a_line_is_there_at_once(tmp_path: Path) -> None:
    """A run that is killed has left all of its lines."""
    writer = MetricsWriter(tmp_path, 0, 10, tensorboard=False)
    writer.write(line(1), [1.0, 0, 0.5, 3.0])
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
    writer.close()


def test_lines_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0, 10, tensorboard=False)
    for step in (2, 4, 6):
        writer.write(line(step), [1.0, 0, 0.5, 3.0])
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    writer = MetricsWriter(tmp_path, 4, 10, tensorboard=False)
    writer.write(line(6), [float("nan"), 2, 0.0, float("nan")])
    writer.close()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(at["step"], at["loss"]) for at in lines] == [(2, 1.0), (4, 1.0), (6, None)]
    assert [(at["failed_steps"], at["bad_images"]) for at in lines] == [(0, 1), (0, 1), (2, 1)]


def test_tensorboard_has_each_step_once_after_ten_restarts(tmp_path: Path) -> None:
    """Each start goes on after the second last step of the one before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in range(0, 20, 2):
        writer = MetricsWriter(tmp_path, first, 30, tensorboard=True)
        for step in range(first + 1, first + 5):
            writer.write(line(step), [float(step), 0, 0.5, 3.0])
        writer.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [(step, float(step)) for step in range(1, 23)]


def test_a_full_disk_costs_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It takes half of the first line, nothing of the second, and is empty again for the third."""
    writer = MetricsWriter(tmp_path, 0, 10, tensorboard=False)
    file, room = writer._file, [20, 0, 0, 10_000]

    def write(data: bytes) -> int:
        limit = room.pop(0) if len(room) > 1 else room[0]
        if not limit:
            raise OSError(28, "No space left on device")
        return file.write(data[:limit])

    writer._file = SimpleNamespace(write=write, close=file.close)
    for step in (1, 2, 3):
        writer.write(line(step), [1.0, 0, 0.5, 3.0])
    writer.close()
    assert [json.loads(text)["step"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert [r.getMessage() for r in caplog.records if "No space" in r.getMessage()] != []
    assert len([r for r in caplog.records if "No space" in r.getMessage()]) == 1


@pytest.mark.parametrize("odd", ["7", "{}", '{"step": "3"}', "[" * 100_000, "\udcff"])
def test_a_line_that_is_no_record_is_dropped(odd: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + odd.encode("utf-8", "surrogateescape") + b"\n")
    MetricsWriter(tmp_path, 4, 10, tensorboard=False).close()
    assert path.read_text() == '{"step": 1}\n'
