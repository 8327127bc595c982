"""Pipes among the images do not block, and odd file names stay on one line wherever they are shown."""

import json
import logging
import os
from pathlib import Path

import pytest
from pictures import encoded, make_folder, make_tar

from trainer.cli import main
from trainer.data.index import open_index
from trainer.data.index_file import _HEADER, MAGIC, VERSION, read_index
from trainer.data.verify import check_data
from trainer.errors import InputError

ODD = "a\n\x1b[2Jb" + os.fsdecode(b"\xff")
SHOWN = "a\\n\\x1b[2Jb\\udcff"


@pytest.fixture
def odd_folder(tmp_path: Path) -> Path:
    """Return an image folder with a usable image, an unusable one with an odd name, and a pipe."""
    root = make_folder(tmp_path / "set", {"train/c/good.png": encoded("PNG"), f"train/c/{ODD}.png": b"no picture"})
    os.mkfifo(root / "train/c/pipe.png")
    return root


def test_the_index_skips_pipes_and_escapes_odd_names(odd_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(open_index(odd_folder, "train")) == 1
    assert caplog.records[0].getMessage().isprintable()
    lines = (odd_folder / ".wmse_index/train.skipped.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"c/{SHOWN}.png", "c/pipe.png"]
    assert lines[1].endswith("a pipe, socket or device")


def test_check_data_names_pipes_and_escapes_odd_names(odd_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_data(odd_folder).bad[-1] == ("train/c/pipe.png", "a pipe, socket or device")
    assert main(["check-data", str(odd_folder)]) == 1
    assert f"train/c/{SHOWN}.png: not a readable image" in capsys.readouterr().out.splitlines()[0]


def test_prepare_lists_pipes_and_escapes_odd_names(odd_folder: Path, tmp_path: Path) -> None:
    assert main(["prepare", str(odd_folder), str(tmp_path / "dest")]) == 0
    lines = (tmp_path / "dest/train.skipped.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"c/{SHOWN}.png", "c/pipe.png"]


@pytest.mark.parametrize("members", [[(f"{ODD}.cls", b"1")], [(f"{ODD}.png", encoded("PNG")), (f"{ODD}.cls", b"x")]])
def test_errors_about_tar_members_are_one_line(tmp_path: Path, members: list) -> None:
    make_tar(tmp_path / "train-000000.tar", members)
    with pytest.raises(InputError) as caught:
        open_index(tmp_path, "train")
    assert SHOWN in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("layout", [["label", "|O", 1], ["label", "<i4", -1], ["label", "V0", 1]])
def test_an_index_with_invalid_metadata_is_refused(tmp_path: Path, layout: list) -> None:
    metadata = json.dumps({"split": "train", "class_names": ["c"], "columns": [layout]}).encode()
    (tmp_path / "train.index").write_bytes(_HEADER.pack(MAGIC, VERSION, len(metadata)) + metadata + bytes(512))
    with pytest.raises(InputError, match="not a usable index"):
        read_index(tmp_path / "train.index")
    (tmp_path / "train.index").write_bytes(_HEADER.pack(MAGIC, VERSION, 100_000) + b"[" * 100_000)
    with pytest.raises(InputError, match="not a usable index"):
        read_index(tmp_path / "train.index")
