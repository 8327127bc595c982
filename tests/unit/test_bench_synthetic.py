"""A run without a set: the step is the real one, the batches differ."""

from pathlib import Path

import pytest
import torch
from trainer.bench.synthetic import synthetic_run, synthetic_views, write_index_only

from trainer.config.loading import load_config
from trainer.data.index import open_index
from trainer.distributed.ranks import Ranks


def test_the_set_opens_and_cannot_be_read(tmp_path: Path) -> None:
    write_index_only(tmp_path, "train", 5000)
    index = open_index(tmp_path, "train")
    assert len(index) == 5000
    assert sorted(set(index.labels.tolist())) == list(range(1000))
    with pytest.raises(OSError, match="cut"):
        index.read(17)


def test_a_run_without_a_set(tiny_config: Path, tmp_path: Path) -> None:
    config = load_config(tiny_config, ["--views.num_views", "3", "--data.images_per_step", "32"])
    folder = tmp_path / "set"
    folder.mkdir()
    run = synthetic_run(config, Ranks(), torch.device("cpu"), folder)
    assert run.step.loss == config.wmse
    views = synthetic_views(run)
    assert (views.shape, views.dtype) == ((3 * 32, 3, 32, 32), torch.uint8)
    assert views.is_contiguous(memory_format=torch.channels_last)
    assert len({view.numpy().tobytes() for view in views}) == 3 * 32
    assert not torch.equal(views, synthetic_views(run, 1))
    assert not run.step(views, 0, 0.0).failed
