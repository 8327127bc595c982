"""The step alone: the figures fit together, warm-up is no part of them."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.bench import compute, floor, roofline
from trainer.bench.compute import BATCH_NORMS, WARMUP_STEPS, bench_compute, measure_compute, take_agreed_turns
from trainer.bench.phases import PHASES
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "PRODUCT_SHAPES", ((2, 8, 4),))
    monkeypatch.setattr(floor, "COPY_BYTES", (2**12,))
    monkeypatch.setattr(roofline, "MATMUL_SIZES", {"cpu": (32,)})


@pytest.fixture
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, ["--data.root", "nowhere"])


def test_figures_of_a_tiny_model(config: Config, tmp_path: Path) -> None:
    result = bench_compute(config, 0.3, trace=tmp_path / "trace.json", batch_norm=True)
    assert result is not None
    assert json.loads(json.dumps(result)) == result
    assert result["views_per_s"] * result["step_ms"]["median"] == pytest.approx(16 * 2 * 1e3, rel=0.2)
    assert result["views_per_s_a_rank"] == result["views_per_s"]
    assert (result["images_per_step"], result["num_views"], result["side"]) == (16, 2, 32)
    assert (result["skipped_steps"], result["ranks"], result["precision"]) == (0, 1, "float32")
    assert set(result["phases"]["host_ms"]) == set(PHASES)
    assert sum(result["phases"]["percent"].values()) == pytest.approx(100)
    assert result["roofline"]["flop_utilisation"] > 0
    assert {"device", "cores", "versions", "commit"} <= set(result)
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert set(PHASES) <= names
    assert set(result["batch_norm"]) == {"joint_local", "per_view_local"}  # alone, all ranks are one
    assert result["batch_norm"]["joint_local"]["percent_above"] == 0


class SlowAtFirst:
    """A step whose first calls take 50 ms, as if it compiled."""

    def __init__(self) -> None:
        config = SimpleNamespace(data=SimpleNamespace(images_per_step=8), views=SimpleNamespace(num_views=4))
        model = torch.nn.Linear(3, 5)
        self.run = SimpleNamespace(device=CPU, ranks=Ranks(), config=config, model=model)
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        time.sleep(0.05 if self.calls <= WARMUP_STEPS else 0.001)
        with torch.profiler.record_function("forward"):
            torch.ones(2) + 1

    def take_failed(self) -> int:
        return 0


def test_warm_up_is_left_out() -> None:
    result = measure_compute(SlowAtFirst(), 0.1)  # type: ignore[arg-type]
    assert result["step_ms"]["quartile_3"] < 20
    assert result["views_per_s"] == pytest.approx(32e3 / result["step_ms"]["median"], rel=0.1)
    assert result["parameters"] == 20


def test_windows_fill_the_time_with_the_same_calls_each() -> None:
    """From the clock of the windows: 10 ms a call for 1 s in turns of two functions; then 1 us a call."""
    calls: dict[str, list[int]] = {"a": [], "b": []}

    def window(name: str, seconds: float) -> compute.Window:
        def made(count: int) -> float:
            calls[name].append(count)
            return count * seconds

        return made

    found = take_agreed_turns({"a": window("a", 0.01), "b": window("b", 0.03)}, 1.0, Ranks())
    assert calls == {"a": [1] * 26, "b": [1] * 26}  # one each before, to tell how long a call is
    assert found == {"a": [pytest.approx(1e4)] * 25, "b": [pytest.approx(3e4)] * 25}
    calls["a"].clear()
    found = take_agreed_turns({"a": window("a", 1e-6)}, 10.0, Ranks())
    assert len(found["a"]) == compute.MAX_WINDOWS
    assert sum(calls["a"]) * 1e-6 == pytest.approx(10.0, rel=0.05)
    calls["a"].clear()
    take_agreed_turns({"a": window("a", 0.01)}, 1.0, Ranks(), min_calls=5)
    assert calls["a"] == [1] + [5] * 20
    calls["b"].clear()
    assert len(take_agreed_turns({"b": window("b", 5.0)}, 1.0, Ranks())["b"]) == compute.MIN_WINDOWS


def test_ways_of_batch_norm_are_settings(config: Config) -> None:
    for changed in BATCH_NORMS.values():
        for name, value in changed.items():
            assert hasattr(config.model, name), name
            words = [f"--model.{name}", value]
            assert getattr(load_config(None, words).model, name) == value
