"""Cost of starting by the size of the set, measured in new processes."""

import os
from pathlib import Path

import pytest

from trainer.bench import growth
from trainer.config.loading import load_config
from trainer.data.index import open_index


def test_the_measured_set_has_an_index_and_no_images(tmp_path: Path) -> None:
    growth.write_index_only(tmp_path, "train", 5000)
    index = open_index(tmp_path, "train")
    assert len(index) == 5000
    assert sorted(set(index.labels.tolist())) == list(range(1000))
    with pytest.raises(OSError, match="cut"):
        index.read(17)


@pytest.mark.slow
def test_starting_is_measured_in_a_new_process(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "SETS", (20_000,))
    monkeypatch.setattr(growth, "START_UPS", 1)
    result = growth.bench_growth(load_config(tiny_config, []), 1.0, ["images_of_set"])
    ((point,),) = [line["points"] for line in result["lines"]]
    assert point["images_of_set"] == 20_000
    assert os.getpid() not in point["processes"]
    assert 0 < point["index_uss_bytes"]["median"] < 0.1 * 2**30
    assert point["index_file_bytes"] > 27 * 20_000
    assert point["import_seconds"]["median"] > 0.5, "torch, timm and DALI must be imported"
    parts = point["open_seconds"]["median"] + point["plan_seconds"]["median"]
    assert point["figure"]["median"] == pytest.approx(parts, rel=0.5)
