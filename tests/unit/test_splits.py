"""Splits of an evaluation: classes are matched by name, and unusable splits are refused before images are encoded."""

import json
import logging
import shutil
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.conftest import TINY
from trainer.config.loading import load_config
from trainer.config.schema import DataConfig
from trainer.distributed import process_group as distributed
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.evaluate.features import Place
from trainer.evaluate.splits import open_splits, unusable_files

ALLOWED = ("--evaluate.allow_differences", "true")


def write_shard(path: Path, labels: list[int]) -> None:
    """Write a shard with labels and without class names."""
    with tarfile.open(path, "w") as tar:
        for number, label in enumerate(labels):
            picture = BytesIO()
            Image.new("RGB", (40, 36), (number, 0, 0)).save(picture, "PNG")
            for suffix, data in (("png", picture.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(data)
                tar.addfile(member, BytesIO(data))


def place_of(root: Path, train: list[int], val: list[int], *settings: str) -> Place:
    """Write shards of two splits with these labels, and return where they are evaluated."""
    write_shard(root / "train-000000.tar", train)
    write_shard(root / "val-000000.tar", val)
    (root / "tiny.yaml").write_text(TINY)
    return Place(load_config(root / "tiny.yaml", ["--data.root", str(root), *settings]), Ranks(), torch.device("cpu"))


def test_a_class_without_test_images_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """This includes the last class, whose number appears only in the training shards."""
    with caplog.at_level(logging.INFO):
        train, test = open_splits(place_of(tmp_path, [0, 0, 1, 2, 2, 2, 3], [0, 2, 2], *ALLOWED))
    assert test.labels.tolist() == [0, 2, 2]
    assert train.labels.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert "no image of 2 of the 4 classes, which are not measured: 1, 3" in caplog.text
    assert "split train: 7 images, 4 classes with 1 to 3 (median 1.5) images each" in caplog.text


def test_a_class_without_training_images_is_named_and_its_images_count_as_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train, test = open_splits(place_of(tmp_path, [0, 1, 1], [0, 4, 4, 1], *ALLOWED))
    # the label of class 4 is a number that is never predicted
    assert min(label for label in test.labels if label > 1) >= len(train.class_names)
    assert "no image of 1 classes of the split 'val', whose 2 images count as wrong: 4" in caplog.text


def test_classes_are_matched_by_name_and_not_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(tmp_path, [0, 1, 2], [0, 1, 2], *ALLOWED)
    original = distributed.open_images

    def opened(data: DataConfig, split: str, **options: bool) -> object:
        index = original(data, split, **options)
        index.class_names = ["ant", "bee", "cat"] if split == "train" else ["bee", "dog", "ant"]
        return index

    monkeypatch.setattr(distributed, "open_images", opened)
    _, test = open_splits(place)
    assert [test.class_names[label] for label in test.labels] == ["bee", "dog", "ant"]
    assert test.class_names[:3] == ["ant", "bee", "cat"]


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        ([1, 1, 1], [1, 1], r"'train' in .* has labelled images of one class only \(1\)"),
        ([0, 1, 3], [0, 1], r"'val' has no image of 1 of the 3 classes.*: 3.*--evaluate.allow_differences true"),
        ([0, 1], [0, 1, 2], r"'train' has no image of 1 classes .* whose 1 images count as wrong: 2"),
        ([0, 1], [2, 3], r"have no class in common: the first has images of 0, 1, the second of 2, 3"),
        ([0, 1], [-1, -1], r"'val' in .* has no labelled images"),
        ([-1, -1], [0, 1], r"'train' in .* has no labelled images"),
    ],
)
def test_splits_that_cannot_be_evaluated_are_refused(
    train: list[int], val: list[int], message: str, tmp_path: Path
) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps({"class_names": ["0", "1", "2", "3"]}))
    with pytest.raises(InputError, match=message):
        open_splits(place_of(tmp_path, train, val))


def test_images_without_a_label_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        train, _ = open_splits(place_of(tmp_path, [0, -1, 1, -1], [0, 1]))
    assert train.labelled.tolist() == [0, 2]
    assert "split train: 4 images, 2 classes with 1 image each, 2 images without a label" in caplog.text


def test_unusable_files_of_the_index_are_counted(
    tiny_set: Path, tmp_path: Path, tiny_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every evaluation counts them, not only the first one, which builds the index."""
    shutil.copytree(tiny_set / "train", tmp_path / "set" / "train")
    shutil.copytree(tiny_set / "val", tmp_path / "set" / "val")
    next((tmp_path / "set" / "val" / "cats").iterdir()).write_bytes(b"no picture")
    config = load_config(tiny_config, ["--data.root", str(tmp_path / "set")])
    for _ in range(2):
        caplog.clear()
        train, test = open_splits(Place(config, Ranks(), torch.device("cpu")))
        assert (len(test.labelled), unusable_files(train), unusable_files(test)) == (15, 0, 1)
        assert "the split 'val' has 1 files that are not usable images and do not count" in caplog.text
