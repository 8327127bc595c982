"""How cost grows: each point is what it says, in the process it says."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.bench import growth
from trainer.bench.cli import GROWTH_LINES
from trainer.bench.growth import Step, _child, _in_turns, _set_point, bench_growth
from trainer.config.loading import load_config
from trainer.config.schema import Config

CPU = torch.device("cpu")
FIGURE = {"median": 1.0, "quartile_1": 1.0, "quartile_3": 1.0}


@pytest.fixture
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, ["--data.images_per_step", "32"])


def test_the_sizes_that_grow(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[Any, ...]] = []

    def in_turns(steps: list[Step], device: torch.device, seconds: float) -> list[dict[str, Any]]:
        for step in steps:
            config, k = step.config, step.config.model.embedding_size
            sizes = (config.views.num_views, config.data.images_per_step, k, config.wmse.slice_size)
            measured.append((*sizes, step.without_loss))
        assert seconds == pytest.approx(2.0 * len(steps))
        return [{"figure": FIGURE} for _ in steps]

    children: list[list[str]] = []

    def child(words: list[str]) -> dict[str, Any]:
        children.append(words)
        if "trainer.bench.start_up" in words:
            return {"images": 7, "process": len(children), "index_seconds": 0.5, "pss_bytes": 9}
        path = Path(words[words.index("--config") + 1])
        images = load_config(path, []).data.images_per_step
        return {"step_ms": FIGURE, "views_per_s": 2.0 * images}

    monkeypatch.setattr(growth, "_in_turns", in_turns)
    monkeypatch.setattr(growth, "_child", child)
    monkeypatch.setattr(growth, "write_index_only", lambda root, split, count: Path(__file__))
    result = bench_growth(config, 2.0 * (4 + 3 + 2 + 4))
    lines = {line["line"]: line["points"] for line in result["lines"]}
    assert measured == [
        *((2, 32, 8, 16, True), (2, 32, 8, 16, False), (4, 32, 8, 16, False), (8, 32, 8, 16, False)),
        *((2, images, 8, 16, False) for images in (16, 32, 64)),
        *((2, 32, k, 2 * k, False) for k in (8, 16)),
    ]
    assert [point["num_views"] for point in lines["num_views"]] == [1, 2, 4, 8]
    assert [(p["ranks"], p["views_per_s"]) for p in lines["ranks"]] == [(1, 64.0), (2, 128.0)]  # 32 images a rank
    assert "--nproc_per_node=2" in children[1]
    assert len(children) == 2 + 3 * growth.START_UPS
    assert lines["images_of_set"][0]["pss_bytes"]["median"] == 9
    assert tuple(lines) == tuple(growth.LINES) == GROWTH_LINES
    measured.clear()
    result = bench_growth(config, 2.0 * 2, ["embedding_size"])
    assert [line["line"] for line in result["lines"]] == ["embedding_size"]
    assert len(measured) == 2


def test_steps_are_measured_in_turns(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    real = growth.take_agreed_turns
    monkeypatch.setattr(
        growth, "take_agreed_turns", lambda windows, *rest: rounds.append(len(windows)) or real(windows, *rest)
    )
    four = replace(config, views=replace(config.views, num_views=4))
    parts = replace(config, optimizer=replace(config.optimizer, accumulation_steps=4))
    steps = [Step("x", 1, config, without_loss=True), Step("x", 2, config), Step("x", 4, four), Step("x", 9, parts)]
    alone, pair, quadruple, misfit = _in_turns(steps, CPU, 0.3)
    assert rounds == [3]  # all in one go
    assert 0 < alone["figure"]["median"] < quadruple["figure"]["median"]
    assert pair["figure"]["windows"] >= 3
    assert "accumulation_steps" in misfit["not_run"]  # says why, and stops no other


def test_the_index_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that imports what a rank does, and whose memory is not ours."""
    monkeypatch.setattr(growth, "START_UPS", 2)
    held = torch.ones(2**28)  # 1 GiB of this process
    point = _set_point(50_000)
    assert point["images_of_set"] == 50_000
    assert os.getpid() not in point["processes"]
    assert len(set(point["processes"])) == 2
    assert 0 < point["index_uss_bytes"]["median"] < 0.1 * 2**30
    assert 1e8 < point["uss_bytes"]["median"] < held.nbytes
    assert point["index_file_bytes"] > 27 * 50_000
    assert point["import_seconds"]["median"] > 0.5, "torch, timm and DALI are loaded"
    parts = point["open_seconds"]["median"] + point["plan_seconds"]["median"]
    assert point["figure"]["median"] == pytest.approx(parts, rel=0.5)


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(returncode=3, stdout="", stderr="Traceback ...\nRuntimeError: no memory")

    monkeypatch.setattr(growth.subprocess, "run", run)
    assert _child(["json.tool"]) == {"not_run": "exit code 3: Traceback ... RuntimeError: no memory"}
