"""Benchmark of the loader: cold reads come from the disk, and the sweep names the best options."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import write_images
from trainer.bench.loader import ColdIndex, as_options, bench_loader, bench_loader_sweep, endless_loader, grid
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.data.index import open_index
from trainer.data.prepare import prepare

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def config(tiny_config: Path, tiny_set: Path) -> Config:
    """Return the tiny config for `tiny_set`."""
    return load_config(tiny_config, ["--data.root", str(tiny_set)])


@pytest.mark.parametrize("form", ["folder", "shards"])
def test_a_cold_read_drops_the_file_from_the_page_cache_first(
    tiny_set: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "shards":
        prepare(str(tiny_set), tmp_path / "set")
    index = open_index(tiny_set if form == "folder" else tmp_path / "set", "train")
    forgotten: list[str] = []

    def forget(descriptor: int, *rest: int) -> None:
        assert rest == (0, 0, os.POSIX_FADV_DONTNEED)
        forgotten.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "posix_fadvise", forget)
    cold = ColdIndex(index)
    assert cold.read(3) == index.read(3)
    assert len(cold) == len(index)
    assert len(forgotten) == 1
    assert forgotten[0].endswith(".tar" if form == "shards" else f"train/{index.name(3)}")


def test_the_pages_of_a_cold_file_are_dropped(tmp_path: Path) -> None:
    """fincore of util-linux counts the pages. A tmpfs holds files only in the page cache."""
    write_images(tmp_path / "train" / "cats", 2, seed=0, size=(200, 200))
    index = open_index(tmp_path, "train")
    file = tmp_path / "train" / index.name(0)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # pages that are not written yet are not dropped
    index.read(0)

    def cached() -> int:
        command = ["fincore", "--noheadings", "--bytes", "--output", "RES", str(file)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    try:
        before = cached()
    except FileNotFoundError:
        pytest.skip("needs fincore")
    if subprocess.run(["stat", "-f", "-c", "%T", str(file)], capture_output=True, text=True).stdout.strip() == "tmpfs":
        pytest.skip("the file is on a tmpfs")
    ColdIndex(index).forget(0)
    assert before > 0
    assert cached() == 0


@pytest.mark.slow
def test_the_result_has_cold_and_warm_figures_and_the_options_used(config: Config) -> None:
    assert torch.equal(next(endless_loader(config, cold=True)).views, next(endless_loader(config)).views)
    result = bench_loader(config, 0.2)
    assert result["figures"].keys() == result["page_cache"].keys() == {"cold", "warm"}
    for figure in result["figures"].values():
        assert len(figure["samples"]) == figure["windows"] == 5
        assert 0 < figure["quartile_1"] <= figure["median"] <= figure["quartile_3"]
    assert result["views_per_s"] == result["figures"]["warm"]["median"]
    assert result["prefetch_batches"] == config.data.prefetch_batches
    assert {"threads", "read_ahead_steps", "commit", "dali"} <= result.keys()
    assert "hw_decoder_load" not in result


def test_the_grid_starts_with_the_settings_of_the_config(tiny_config: Path, config: Config) -> None:
    for device in (CPU, CUDA):
        tried = grid(config, device)
        assert tried[0]["prefetch_batches"] == config.data.prefetch_batches
        assert all(setting not in tried[:i] for i, setting in enumerate(tried))
        assert all(("hw_decoder_load" in setting) == (device == CUDA) for setting in tried)
        for setting in tried[-1:]:
            data = load_config(tiny_config, as_options(setting).split()).data
            assert all(list(value) == list(getattr(data, name)) if isinstance(value, list) else
                       value == getattr(data, name) for name, value in setting.items())  # fmt: skip


@pytest.mark.slow
def test_the_sweep_names_the_fastest_options(config: Config) -> None:
    result = bench_loader_sweep(config, 0.1)
    medians = {as_options(point["setting"]): point["figures"]["median"] for point in result["results"]}
    assert list(medians) == [as_options(setting) for setting in grid(config, CPU)]
    assert medians[result["best"]] == max(medians.values())
    assert result["clearly_better"] in (True, False)
