"""What a checkpoint costs is measured of the real thing, and nothing stays behind."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.bench import checkpoint as bench
from trainer.bench.checkpoint import MIN_SAVES, bench_checkpoint
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.models.networks import build_encoder_projector
from trainer.run.checkpoint import load_checkpoint


@pytest.fixture
def config(tiny_config: Path) -> Config:
    return load_config(tiny_config, ["--data.root", "unused"])


@pytest.fixture(autouse=True)
def short_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WORK_SECONDS", 0.01)
    monkeypatch.setattr(bench, "WORK_OPERATIONS", 3)


def test_figures_of_a_small_model(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[dict[str, Any]] = []

    def load(path: Path) -> dict[str, Any]:
        assert path.is_relative_to(tmp_path)
        loaded.append(load_checkpoint(path))
        return loaded[-1]

    monkeypatch.setattr(bench, "load_checkpoint", load)
    (tmp_path / "step_00000001.pt").write_text("of somebody else")
    result = bench_checkpoint(config, 0.01, tmp_path)
    assert json.loads(json.dumps(result)) == result
    assert [p.name for p in tmp_path.glob("step*")] == ["step_00000001.pt"]
    assert not list(tmp_path.glob("bench*"))

    # what was measured is the config's model with the optimizer's moments
    model = build_encoder_projector(config, Ranks()).to(choose_device(config, Ranks()))
    parameters = list(model.parameters())
    numel = sum(p.numel() for p in parameters)
    assert result["parameters"] == numel
    assert result["bytes"] > 3 * 4 * numel  # Adam keeps two
    state = loaded[0]["optimizer"]["state"]
    assert [state[i]["exp_avg"].shape for i in range(len(parameters))] == [p.shape for p in parameters]
    assert all(torch.equal(value, loaded[0]["model"][name]) for name, value in model.state_dict().items())

    # the first save is left out, and the figures fit together
    assert result["stall_ms"]["windows"] == result["write_s"]["windows"] == len(loaded) - 1 >= 3
    assert 0 < result["stall_ms"]["median"] < 1000 * result["write_s"]["median"]
    assert result["percent_of_loop"]["standing_still"] == pytest.approx(result["stall_ms"]["median"] / 3000)
    assert {"device", "cores", "versions", "commit", "file_system"} <= set(result)


def test_a_folder_that_is_not_there(config: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--folder .*nowhere: there is no such folder"):
        bench_checkpoint(config, 1.0, tmp_path / "nowhere")


def test_saves_go_on_until_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a saver that has nothing to do; each round then takes a millisecond."""
    made = SimpleNamespace(save=lambda content: None, under_way=lambda: False, wait=lambda: None, close=lambda: None)
    monkeypatch.setattr(bench, "Saver", lambda *_, **__: made)
    monkeypatch.setattr(bench, "load_checkpoint", lambda path: None)
    monkeypatch.setattr(bench, "WORK_SECONDS", 0.0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for seconds, least, most in ((0.0, MIN_SAVES, MIN_SAVES), (0.5, MIN_SAVES + 1, 10**9)):
        found = bench._measure(model, optimizer, torch.device("cpu"), tmp_path, seconds)
        assert least <= len(found["stall"]) == len(found["write"]) == len(found["load"]) <= most
        assert len(found["first_stall"]) == 1
        assert found["slowdown"] == []


def test_what_the_loop_loses() -> None:
    """Saving every 300 s: 0.6 s of standing still, then 3 s at half the speed, of which the half is lost."""
    found = {"first_stall": [5.0], "stall": [0.6] * 3, "write": [3.0] * 3, "load": [1.0] * 3, "slowdown": [1.5] * 3}
    summary = bench._summary(found)
    assert summary["percent_of_loop"] == {"standing_still": pytest.approx(0.2), "with_slowdown": pytest.approx(0.7)}
    assert (summary["stall_ms"]["median"], summary["first_stall_ms"]) == (pytest.approx(600), 5000)
    too_short = bench._summary(found | {"slowdown": [1.5]})
    assert too_short["slowdown"] is None
    assert too_short["percent_of_loop"] == {"standing_still": pytest.approx(0.2)}


def test_work_is_counted_while_the_file_is_written_only() -> None:
    left = iter([True, True, False])
    pieces = bench._work_while(lambda: next(left), torch.device("cpu"))
    assert len(pieces) == 2
    assert all(seconds > 0 for seconds in pieces)


def test_the_file_system_is_that_of_the_longest_mount_point() -> None:
    assert bench._file_system(Path("/proc/self")) == "proc"
    assert bench._file_system(Path(__file__)) not in ("proc", "unknown")
