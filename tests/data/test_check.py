"""wmse check-data reads and decodes every file and names each one that cannot be used."""

import warnings
from pathlib import Path

import pytest
from pictures import damaged_png, encoded, image, make_folder, make_tar, shared

from trainer.cli import main
from trainer.data.prepare import prepare
from trainer.data.verify import check_data
from trainer.errors import InputError

JPEG = encoded("JPEG")


def test_the_unusable_odd_files_are_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_data(shared("odd"))
    assert {name[:2] for name, _ in report.bad} == {"01", "02", "03", "06", "08", "24", "29", "31", "39"}
    assert report.checked == 23
    assert report.converted == 5  # CMYK, WebP, GIF, 16 bits, arithmetic coding
    assert all(problem for _, problem in report.bad)


def test_a_folder_without_splits_is_checked(tmp_path: Path) -> None:
    files = {"a.jpg": JPEG, "x/y/b.png": damaged_png(), "x/c.txt": b"text", ".hidden": b"x", "x/.h/d.jpg": b"x"}
    (tmp_path / "x/y").mkdir(parents=True)
    (tmp_path / "x/loop").symlink_to(tmp_path / "x")
    report = check_data(make_folder(tmp_path, files))
    assert report.checked == 2
    assert [name for name, _ in report.bad] == ["x/y/b.png"]
    assert "1 files next to the class folders are skipped (a.jpg)" in report.notes[0]
    assert report.notes[1] == "split .: 1 files are not images and are skipped (x/c.txt)"


def test_files_that_are_not_images_are_noted_and_are_not_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "README.md": b"x",
        "labels.csv": b"x",
        "train/README": b"x",
        "train/cat/LICENSE": b"text",
        "train/list.txt": b"x",
    }
    make_folder(tmp_path, files | {"train/cat/a.jpg": JPEG, "train/cat/b.csv": b"1,2", "val/v.jpg": JPEG})
    assert main(["check-data", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "split train: 3 files, 1 class with 3 images each" in out
    assert "split val: 1 files, no labels" in out
    assert "note: split train: 2 files are not images and are skipped (train/cat/LICENSE, train/cat/b.csv)" in out
    assert f"note: {tmp_path}/val has no class folders; its 1 files are used without labels" in out
    (tmp_path / "train/cat/c.jpg").write_bytes(b"text")
    (tmp_path / "train/cat/d").write_bytes(bytes(5))
    assert main(["check-data", str(tmp_path)]) == 1
    assert [name for name, _ in check_data(tmp_path).bad] == ["train/cat/c.jpg", "train/cat/d"]


def test_only_the_given_split_of_a_folder_is_checked(tmp_path: Path) -> None:
    make_folder(tmp_path, {"train/cat/a.jpg": b"", "val/cat/a.jpg": JPEG})
    assert check_data(tmp_path, splits=["val"]).bad == []
    assert check_data(tmp_path, splits=["train"]).bad == [("train/cat/a.jpg", "empty file")]
    with pytest.raises(InputError, match="test: no such folder"):
        check_data(tmp_path, splits=["test"])


def test_shards_are_checked_by_split(tmp_path: Path) -> None:
    make_tar(
        tmp_path / "train-000000.tar", [("a.jpg", JPEG), ("a.cls", b"0"), ("b.png", damaged_png()), ("b.cls", b"0")]
    )
    make_tar(tmp_path / "train-000001.tar", [("c.cls", b"0")])
    make_tar(tmp_path / "val-000000.tar", [("d.webp", encoded("WEBP")), ("d.cls", b"0")])
    report = check_data(tmp_path)
    assert [name for name, _ in report.bad] == ["train-000001.tar", "train-000000.tar/b.png"]
    assert (report.checked, report.converted) == (3, 1)
    assert report.splits == [
        "split train: 2 files, 1 class with 2 images each",
        "split val: 1 files, 1 class with 1 image each",
    ]
    assert check_data(tmp_path, splits=["val"]).checked == 1
    with pytest.raises(InputError, match="no shards of split test; it has train, val"):
        check_data(tmp_path, splits=["test"])


def test_a_damaged_index_of_a_prepared_set_is_named(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "s", {f"train/cat/{i}.jpg": encoded("JPEG", image(seed=i)) for i in range(4)})
    prepare(str(source), tmp_path / "dest", progress=False)
    assert check_data(tmp_path / "dest").bad == []
    path = tmp_path / "dest/train.index"
    whole = bytearray(path.read_bytes())
    whole[-20] ^= 1
    path.write_bytes(whole)
    assert [name for name, _ in check_data(tmp_path / "dest").bad] == ["train.index"]
    path.write_bytes(whole[:-1])
    assert "not a usable index" in check_data(tmp_path / "dest").bad[0][1]


def test_a_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no files to check"):
        check_data(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        check_data(tmp_path / "nowhere")


@pytest.mark.parametrize("option", ["--max_image_pixels", "--max_classes"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_limit_out_of_range_is_refused(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path, {"train/cat/a.jpg": JPEG})
    assert main(["check-data", str(tmp_path), option, value]) == 2
    assert f"data.{option[2:]} is" in capsys.readouterr().err
