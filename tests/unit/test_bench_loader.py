"""The loader's benchmark: cold reads are cold, the sweep tries what it says and names the best as words that can be typed."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import trainer.bench.loader_sweep as sweep_module
from trainer.bench.loader_sweep import bench_loader_sweep, grid, words
from trainer.bench.loading import ColdIndex, endless_loader

from trainer.bench import loading
from trainer.bench.loader import bench_loader
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.data.index import open_index
from trainer.data.loader import Batch
from trainer.data.prepare import prepare

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def config(tiny_config: Path, tiny_set: Path) -> Config:
    return load_config(tiny_config, ["--data.root", str(tiny_set)])


@pytest.mark.parametrize("form", ["folder", "shards"])
def test_a_cold_read_asks_the_kernel_to_forget_the_file_first(
    tiny_set: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "shards":
        prepare(str(tiny_set), tmp_path / "set")
    index = open_index(tiny_set if form == "folder" else tmp_path / "set", "train")
    happened: list[str] = []

    def forget(descriptor: int, *rest: int) -> None:
        assert rest == (0, 0, os.POSIX_FADV_DONTNEED)
        happened.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "posix_fadvise", forget)
    read = index.read
    monkeypatch.setattr(index, "read", lambda i: happened.append("read") or read(i))
    cold = ColdIndex(index)
    assert cold.read(3) == read(3)
    where, then = happened
    assert then == "read"
    assert where.endswith(".tar" if form == "shards" else f"train/{index.name(3)}")
    assert len(cold) == len(index)
    assert cold.heights is index.heights


def test_the_pages_are_really_gone(tmp_path: Path) -> None:
    """Where the folder's file system has pages to drop; util-linux's fincore counts them."""
    from tests.conftest import write_images

    write_images(tmp_path / "train" / "cats", 2, seed=0, size=(200, 200))
    index = open_index(tmp_path, "train")
    file = tmp_path / "train" / index.name(0)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # a page that is being written stays
    index.read(0)

    def cached() -> int:
        command = ["fincore", "--noheadings", "--bytes", "--output", "RES", str(file)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    try:
        before = cached()
    except FileNotFoundError:
        pytest.skip("no fincore here")
    ColdIndex(index).forget(0)
    if subprocess.run(["stat", "-f", "-c", "%T", str(file)], capture_output=True, text=True).stdout.strip() == "tmpfs":
        pytest.skip("files of a tmpfs are nowhere but in memory")
    assert before > 0
    assert cached() == 0


def test_cold_and_warm_show_the_same_batches(config: Config) -> None:
    cold, warm = endless_loader(config, cold=True), endless_loader(config)
    for _ in range(3):
        assert torch.equal(next(cold).views, next(warm).views)


def test_the_result_has_both_caches_and_what_was_used(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(ColdIndex, "forget", lambda self, i: forgotten.append(i))
    result = bench_loader(config, 0.2)
    assert len(forgotten) >= 8 * config.data.images_per_step  # warm-up and five windows
    assert result["figures"].keys() == result["page_cache"].keys() == {"cold", "warm"}
    for figure in result["figures"].values():
        assert len(figure["samples"]) == figure["windows"] == 5
        assert 0 < figure["quartile_1"] <= figure["median"] <= figure["quartile_3"]
    assert result["views_per_s"] == result["figures"]["warm"]["median"]
    assert result["prefetch_batches"] == config.data.prefetch_batches
    assert {"threads", "read_ahead_steps", "commit", "dali"} <= result.keys()
    assert "hw_decoder_load" not in result


def test_the_grid_starts_with_the_configs_own_and_repeats_nothing(config: Config) -> None:
    tried = grid(config, CPU)
    assert tried[0]["prefetch_batches"] == config.data.prefetch_batches
    assert all(setting not in tried[:i] for i, setting in enumerate(tried))
    assert all("hw_decoder_load" not in setting for setting in tried)
    assert {setting["prefetch_batches"] for setting in tried} >= {1, 2, 4}
    assert {setting["hw_decoder_load"] for setting in grid(config, CUDA)} == {1.0, 0.9, 0.65}
    assert {tuple(setting["decoder_hint"]) for setting in grid(config, CUDA)} == {(0, 0)}


def test_a_batch_is_waited_for_in_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wait for the device would be to wait for what DALI does ahead, and so for the loader to work on nothing else."""
    waited: list[str] = []

    class Views:
        device, is_cuda = CUDA, True

    class Stream:
        def synchronize(self) -> None:
            waited.append("stream")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream() if device == CUDA else None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waited.append("device"))
    batches = [Batch(step, Views(), np.arange(4), 0.0) for step in range(3)]
    clock = iter([0.0, 0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(clock))
    assert loading.measure(iter(batches), 8, 2.5) == pytest.approx(3 * 8 / 3)
    assert waited == ["stream"] * 3


def test_the_words_of_a_setting_are_the_configs(tiny_config: Path, config: Config) -> None:
    for setting in grid(config, CUDA):
        loaded = load_config(tiny_config, words(setting).split())
        assert {name: getattr(loaded.data, name) for name in setting} == {
            name: tuple(value) if isinstance(value, list) else value for name, value in setting.items()
        }


def test_the_sweep_names_the_fastest(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rates put in its place: 100, but 200 at a depth of 4 and 2 threads more than others."""
    used: list[tuple[int, int]] = []

    def loader_of(tried: Config) -> iter:
        used.append((tried.data.threads, tried.data.prefetch_batches))
        return iter(range(10))

    monkeypatch.setattr(sweep_module, "endless_loader", loader_of)
    monkeypatch.setattr(sweep_module, "own_cores", lambda: 2)
    monkeypatch.setattr(loading, "measure", lambda *_: 200.0 if used[-1] == (4, 4) else 100.0)
    result = bench_loader_sweep(config, 1.0)
    assert "--data.threads 4 --data.prefetch_batches 4" in result["best"]
    assert result["clearly_better"]
    assert len(used) == 3 * len(result["results"])
    assert used[: len(result["results"])] == used[len(result["results"]) : 2 * len(result["results"])]  # in turns
    monkeypatch.setattr(loading, "measure", lambda *_: 100.0)
    assert not bench_loader_sweep(config, 1.0)["clearly_better"]
