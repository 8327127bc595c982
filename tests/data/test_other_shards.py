"""Tar shards of other tools: names with a prefix or without a split, and labels in .cls, .json or .txt."""

import json
from pathlib import Path

import pytest
from pictures import encoded, make_tar

from trainer.data.index import open_index
from trainer.data.verify import check_data
from trainer.errors import InputError

JPEG = encoded("JPEG")

Sample = dict[str, str | bytes]  # suffix -> contents


def shard(path: Path, *samples: Sample, start: int = 0) -> Path:
    members = []
    for number, sample in enumerate(samples, start):
        parts = {"jpg": JPEG, **sample} if not {"png", "webp"} & sample.keys() else sample
        for suffix, data in parts.items():
            members.append((f"{number:09d}.{suffix}", data.encode() if isinstance(data, str) else data))
    return make_tar(path, members)


def labelled(**values: object) -> Sample:
    return {"json": json.dumps({"key": "000000000", "caption": "a cat", "width": 34, **values})}


@pytest.mark.parametrize(
    ("samples", "labels", "class_names"),
    [
        ([{"cls": "1"}, {"cls": "0"}], [1, 0], ["0", "1"]),
        ([{"cls": "1", "json": "not read", "txt": "5"}, {"cls": "-1"}], [1, -1], ["0", "1"]),
        ([labelled(label=2), labelled(cls=0), labelled(**{"class": 1})], [2, 0, 1], ["0", "1", "2"]),
        ([labelled(class_id=1), labelled(target=0)], [1, 0], ["0", "1"]),
        ([labelled(target=0, label=1), labelled(label=None, cls=0)], [1, 0], ["0", "1"]),
        ([labelled(label="dog"), labelled(label="cat"), labelled(label="dog")], [1, 0, 1], ["cat", "dog"]),
        ([labelled(label="dog"), {}], [0, -1], ["dog"]),
        ([labelled(label="10"), labelled(label="2")], [10, 2], [str(number) for number in range(11)]),
        ([labelled(), {"json": "[1, 2]"}, labelled(label=True), labelled(label=[1, 2])], [-1] * 4, []),
        ([{"txt": "1"}, {"txt": " 0\n"}], [1, 0], ["0", "1"]),
        ([{"txt": "1"}, {"txt": "2 cats"}], [-1, -1], []),
        ([labelled(label=1) | {"txt": "a cat"}, labelled(label=0)], [1, 0], ["0", "1"]),
        ([labelled() | {"txt": "1"}, {"txt": "0"}], [1, 0], ["0", "1"]),
        ([{}, {}], [-1, -1], []),
        ([{"png": encoded("PNG"), "cls": "0"}, {"cls": "1", "webp": encoded("WEBP")}], [0, 1], ["0", "1"]),
    ],
)
def test_labels_are_read_from_cls_json_and_txt(
    tmp_path: Path, samples: list[Sample], labels: list[int], class_names: list[str]
) -> None:
    # The samples of a split may lie in several shards.
    shard(tmp_path / "train-0000.tar", *samples[:1])
    shard(tmp_path / "train-0001.tar", *samples[1:], start=1)
    index = open_index(tmp_path, "train")
    assert (index.labels.tolist(), index.class_names) == (labels, class_names)
    report = check_data(tmp_path)
    assert (report.checked, report.bad) == (len(samples), [])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"json": "{"}], r"train-0000.tar: 000000000.json: cannot be read as JSON"),
        (
            [labelled(label=1), labelled(label="cat")],
            "train-0000.tar/000000000.jpg: the label 1 is a number, but other",
        ),
        ([labelled(label=10**9)], "train-0000.tar: 000000000.json: the label 1000000000 under 'label' is too large"),
        ([labelled(label=-2)], "train-0000.tar/000000000.jpg: label -2 is not one of"),
        ([{"txt": "-2"}], "train-0000.tar/000000000.jpg: label -2 is not one of"),
        ([{"json": " " * (2**24 + 1)}], "train-0000.tar: 000000000.json: has 16777217 bytes"),
    ],
)
def test_wrong_labels_are_named_with_tar_and_member(tmp_path: Path, samples: list[Sample], message: str) -> None:
    shard(tmp_path / "train-0000.tar", *samples)
    with pytest.raises(InputError, match=message):
        open_index(tmp_path, "train")
    ((name, problem),) = check_data(tmp_path).bad
    assert "train" in name + problem


def test_too_many_class_names_are_refused(tmp_path: Path) -> None:
    shard(tmp_path / "train-0000.tar", *[labelled(label=f"a caption, {i}") for i in range(5)])
    with pytest.raises(InputError, match=r"the labels name 5 classes, more than data.max_classes 4"):
        open_index(tmp_path, "train", max_classes=4)


def test_names_of_classes_have_the_same_numbers_in_all_splits(tmp_path: Path) -> None:
    shard(tmp_path / "set-train-0000.tar", *[labelled(label=name) for name in ("cat", "dog", "ant")])
    shard(tmp_path / "set-val-0000.tar", labelled(label="dog"))
    index = open_index(tmp_path, "val")
    assert (index.labels.tolist(), index.class_names) == ([2], ["ant", "cat", "dog"])
    # A class that is new in the training split changes the numbers of the others.
    shard(tmp_path / "set-train-0001.tar", labelled(label="bee"))
    index = open_index(tmp_path, "val")
    assert (index.labels.tolist(), index.class_names) == ([3], ["ant", "bee", "cat", "dog"])
    shard(tmp_path / "set-val-0000.tar", labelled(label="eel"))
    with pytest.raises(
        InputError, match=r"set-val-0000.tar/000000000.jpg: the label 'eel' is not one of the 4 classes"
    ):
        open_index(tmp_path, "val")
    (tmp_path / "dataset.json").write_text('{"class_names": ["eel", "cat", "ant", "dog", "bee"]}')
    assert open_index(tmp_path, "val").labels.tolist() == [0]


def test_the_index_is_kept_if_the_training_split_names_no_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard(tmp_path / "train-0000.tar", {}, {})
    shard(tmp_path / "val-0000.tar", labelled(label="dog"))
    caplog.set_level("INFO")
    for _ in range(2):
        assert open_index(tmp_path, "val").class_names == ["dog"]
    assert "indexing them again" not in caplog.text


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("imagenet1k-train-0000.tar", "train"),
        ("imagenet1k-validation-00.tar", "validation"),
        ("cc3m_train-000123.tar", "train"),
        ("00000.tar", "train"),
        ("train-000000.tar", "train"),
    ],
)
def test_names_of_other_tools_open_as_the_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, split: str
) -> None:
    path = shard(tmp_path / name, {"cls": "0"}, {"cls": "1"})
    path.with_name("00000.parquet").write_bytes(b"x")
    path.with_name("00000_stats.json").write_text("{}")
    index = open_index(tmp_path, split)
    assert index.labels.tolist() == [0, 1]
    assert index.name(0) == f"{name}/000000000.jpg"
    assert (f"no shards have this name: reading {name}" in caplog.text) == (not name.startswith("train"))
    assert check_data(tmp_path).checked == 2
    wanted = "--data.test_split" if split == "validation" else "--data.train_split"
    with pytest.raises(InputError, match=wanted):
        open_index(tmp_path, "val")


def test_the_exact_name_and_folders_come_first(tmp_path: Path) -> None:
    shard(tmp_path / "a-train-0000.tar", {"cls": "0"})
    shard(tmp_path / "b-train-0000.tar", {"cls": "0"}, {"cls": "0"})
    with pytest.raises(InputError, match=r"'train' could be any of a-train-\*.tar, b-train-\*.tar"):
        open_index(tmp_path, "train")
    assert len(open_index(tmp_path, "b-train")) == 2
    (tmp_path / "train").mkdir()
    (tmp_path / "train/a.jpg").write_bytes(JPEG)
    assert open_index(tmp_path, "train").name(0) == "a.jpg"
    shard(tmp_path / "train-0000.tar", {}, {}, {})
    assert len(open_index(tmp_path, "train")) == 3
