"""The whole loop, watched: what is measured is the loop itself, and the parts of a step add up to it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.test_bench_phases import Event
from trainer.bench.end2end import (
    PROFILED_STEPS,
    WARMUP_STEPS,
    Watch,
    bench_end2end,
    device_parts,
    host_parts,
    interval_ns,
    note_start,
    where_time_goes,
    window_rates,
)
from trainer.bench.phases import PHASES, host_ranges
from trainer.config.loading import load_config
from trainer.loop import train
from trainer.run.signals import StopRequest
from trainer.run.state import RunState

CPU = torch.device("cpu")


class FakeProfiler:
    """Says when it was started and stopped."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self) -> None:
        self.said.append("start")

    def stop(self) -> list[str]:
        self.said.append("stop")
        return ["event"]


def watch_of(seconds: float, most_profiled: int = 100) -> Watch:
    watch: Any = Watch(seconds, FakeProfiler(), most_profiled)  # type: ignore[arg-type]
    return watch


def test_the_loop_is_measured(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config, ["--data.root", str(tiny_set), "--optimizer.epochs", "1"])
    seen = []

    def watched_train(run: Any, stop: StopRequest, state: RunState) -> int:
        seen.append((run.run_dir, run.step.loss))
        code = train(run, stop, state)
        seen.append([json.loads(line)["step"] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()])
        return code

    handlers = logging.getLogger().handlers[:]
    try:
        result = bench_end2end(config, 1.0, watched_train, trace=tmp_path / "trace.json")
    finally:
        logging.getLogger().handlers[:] = handlers
    assert result is not None
    assert json.loads(json.dumps(result)) == result
    assert seen[0][1] == config.wmse
    assert not seen[0][0].exists(), "the run folder is temporary"
    made = WARMUP_STEPS + result["steps"] + PROFILED_STEPS
    assert made <= len(seen[1]) <= made + 5, "an epoch of 3 steps does not end it; a few more until all agree to stop"
    assert result["views_per_s"] > 0
    assert result["share_of_compute"] == pytest.approx(result["views_per_s"] / result["compute"]["views_per_s"])
    step = result["step"]
    assert set(step["host_ms"]) == {"data_wait", *PHASES, "rest"}
    assert sum(step["host_ms"].values()) == pytest.approx(step["step_ms"])
    assert sum(step["percent"].values()) == pytest.approx(100)
    assert min(step["percent"].values()) > 0
    assert step["loop_overhead_percent"] == pytest.approx(step["percent"]["agree"] + step["percent"]["rest"])
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_what_a_step_counts_as() -> None:
    """A step a second: the warm-up, then 8 s of measured steps, then a quarter as many, but 5 at least, profiled; then stop."""
    for seconds, most, profiled in ((8.0, 100, PROFILED_STEPS), (40.0, 100, 10), (40.0, 7, 7)):
        watch, stop = watch_of(seconds, most), StopRequest()
        calls = 0
        while not stop.asked:
            note_start(watch, stop, 100.0 + calls)
            calls += 1
        assert watch.starts[0] == 100 + WARMUP_STEPS
        assert (watch.measured, watch.to_profile) == (seconds, profiled)
        assert calls == WARMUP_STEPS + seconds + profiled + 1  # the last only says that the one before is over
        assert watch.profiler.said == ["start", "stop"]  # type: ignore[attr-defined]
        assert watch.events == ["event"]
        note_start(watch, stop, 1000.0)  # steps until all ranks have agreed
        assert watch.profiler.said == ["start", "stop"]  # type: ignore[attr-defined]


def test_other_ranks_only_take_part() -> None:
    watch, stop = watch_of(1.0), StopRequest()
    watch.is_first = False
    for call in range(50):
        note_start(watch, stop, float(call))
    assert not stop.asked
    assert watch.profiler.said == []  # type: ignore[attr-defined]


def test_windows_are_of_equally_many_steps() -> None:
    assert window_rates([0.0, 2.0, 3.0, 7.0], 8) == [4.0, 8.0, 2.0]
    starts = [float(at) for at in range(26)]  # 25 steps: 12 windows of 2, the first step left over
    rates = window_rates([-50.0, *starts[1:]], 8)
    assert rates == [8.0] * 12


def two_steps() -> list[Any]:
    """Steps of 10 ms that begin at 1 and 11, then the start of a third; between them 1 ms of waiting and 1 of the loop's."""
    events = []
    for at in (1.0, 11.0, 21.0):
        phases = (("forward", 0, 2), ("loss", 2, 1), ("backward", 3, 3), ("agree", 6, 1), ("update", 7, 1))
        events += [Event(name, at + begin, length, annotation=True) for name, begin, length in phases]
    return events


def test_parts_add_up_to_the_step() -> None:
    events = two_steps()
    intervals = interval_ns(host_ranges(events), 3)
    assert intervals == [(1_000_000, 11_000_000), (11_000_000, 21_000_000)]
    parts = host_parts(events, intervals, 1.0)
    assert parts == {"data_wait": 1, "forward": 2, "loss": 1, "backward": 3, "agree": 1, "update": 1, "rest": 1}


def test_a_step_in_parts_is_one_step() -> None:
    """With accumulation each step has two ranges of forward, loss and backward."""
    events = [
        Event(name, at + begin, 1, annotation=True)
        for at in (0, 10, 20)
        for begin, name in enumerate(("forward", "loss", "backward", "forward", "loss", "backward", "agree", "update"))
    ]
    intervals = interval_ns(host_ranges(events), 3)
    assert intervals == [(0, 10_000_000), (10_000_000, 20_000_000)]
    assert host_parts(events, intervals, 0.5) == {
        "data_wait": 0.5, "forward": 2, "loss": 2, "backward": 2, "agree": 1, "update": 1, "rest": 1.5
    }  # fmt: skip


def test_the_waits_are_those_of_the_profiled_steps() -> None:
    """The wait inside a step's interval is the one for the next step's batch."""
    watch = watch_of(1.0)
    watch.measured, watch.to_profile, watch.events = 2, 3, two_steps()
    watch.waits = [9.0, 9.0, 9.0, 0.001, 0.002, 9.0]
    found = where_time_goes(watch, CPU, alone=True)
    assert found["profiled_steps"] == 2
    assert found["step_ms"] == 10
    assert found["host_ms"]["data_wait"] == pytest.approx(1.5)
    assert found["percent"]["data_wait"] == pytest.approx(15)
    assert found["loop_overhead_percent"] == pytest.approx(10 + 5)


def test_parts_of_a_gpu_add_up_to_the_step() -> None:
    """20 ms: 15 busy, of which 1 is the all-reduce's alone and 2 of torch's outside the ranges; 5 idle, 3 of them for data."""
    busy = {"forward": 4, "loss": 1, "backward": 6, "agree": 0.5, "update": 0.5, "outside": 2, "all_reduce": 4,
            "augmentation": 0, "busy": 15}  # fmt: skip
    parts = device_parts(busy, 20, 3)
    summed = ("data_wait", *PHASES, "beside", "rest")
    assert sum(parts[name] for name in summed) == 20
    assert (parts["data_wait"], parts["beside"], parts["rest"], parts["idle"]) == (3, 1, 4, 5)
