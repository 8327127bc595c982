"""A damaged tar file is refused, where other programs silently read only a part of its images."""

import io
import logging
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from pictures import encoded, image, make_tar

from tests.conftest import write_images
from trainer.cli import main
from trainer.data.index import open_index
from trainer.data.prepare import prepare
from trainer.data.verify import check_data
from trainer.errors import InputError

COUNT = 6
PICTURES = [encoded("JPEG", image(seed=i)) for i in range(COUNT)]
MEMBERS = [
    (f"k{i:02d}.{suffix}", data)
    for i in range(COUNT)
    for suffix, data in (("jpg", PICTURES[i]), ("cls", str(i).encode()))
]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Return a sound shard of COUNT images and their labels."""
    return make_tar(tmp_path / "train-000000.tar", MEMBERS)


def member_start(shard: Path, name: str) -> int:
    """Return the position of a member's header in the shard, in bytes."""
    with tarfile.open(shard) as tar:
        return tar.getmember(name).offset


def overwrite(shard: Path, start: int, data: bytes) -> None:
    with shard.open("r+b") as file:
        file.seek(start)
        file.write(data)


def flip_a_bit_of_a_header(shard: Path) -> None:
    start = member_start(shard, "k02.jpg") + 3
    overwrite(shard, start, bytes([shard.read_bytes()[start] ^ 1]))


def cut_between_samples(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[: member_start(shard, "k02.jpg")])


def cut_inside_a_header(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[: member_start(shard, "k02.jpg") + 200])


def zero_the_tail(shard: Path) -> None:
    start = member_start(shard, "k02.jpg")
    overwrite(shard, start, bytes(shard.stat().st_size - start))


def zero_a_block(shard: Path) -> None:
    overwrite(shard, member_start(shard, "k02.jpg"), bytes(512))


def zero_a_whole_sample(shard: Path) -> None:
    start, end = (member_start(shard, f"k{i:02d}.jpg") for i in (2, 3))
    overwrite(shard, start, bytes(end - start))


def join_with_cat(shard: Path) -> None:
    second = make_tar(shard.with_name("second.tar"), [("x.jpg", PICTURES[0]), ("x.cls", b"0")])
    shard.write_bytes(shard.read_bytes() + second.read_bytes())
    second.unlink()


def negative_size(shard: Path) -> None:
    header = bytearray(tarfile.TarInfo("x.jpg").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 10 + b"\xfc\x00"  # -1024 in GNU's base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    start = member_start(shard, "k02.jpg")
    overwrite(shard, start, bytes(header))


DAMAGE = [
    (flip_a_bit_of_a_header, "not begin with a valid header"),
    (cut_between_samples, "is cut off after its last whole member"),
    (cut_inside_a_header, "is cut off after its last whole member"),
    (zero_the_tail, "bytes of zeros follow, more than a tar's padding"),
    (zero_a_block, "bytes follow after zeros"),
    (zero_a_whole_sample, "bytes follow after zeros"),
    (join_with_cat, "several tar files were joined by `cat`"),
    (negative_size, "a size of -1024 bytes"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_tar_of_which_only_a_part_could_be_read_is_refused(shard: Path, damage, message: str) -> None:
    damage(shard)
    with pytest.raises(InputError, match=message) as caught:
        open_index(shard.parent, "train")
    assert str(shard) in str(caught.value)
    report = check_data(shard.parent)
    assert [name for name, _ in report.bad] == [shard.name]
    assert message in report.bad[0][1]


def test_check_data_reads_all_images_of_a_prepared_set_with_a_damaged_header(tmp_path: Path) -> None:
    """The index of a prepared set knows the position of each image: training reads all of them, and so does check-data."""
    write_images(tmp_path / "source/train/c", COUNT, seed=0)
    prepare(str(tmp_path / "source"), tmp_path / "set", progress=False)
    shard = tmp_path / "set/train-000000.tar"
    with tarfile.open(shard) as tar:
        third = [member.name for member in tar if not member.name.endswith("cls")][2]
    overwrite(shard, member_start(shard, third) + 150, b"9")  # a digit of the checksum
    report = check_data(tmp_path / "set")
    assert report.checked == COUNT
    assert [name for name, _ in report.bad] == [shard.name, "train.index"]
    assert "not begin with a valid header" in report.bad[0][1]


def test_a_label_that_differs_from_the_index_is_named(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_images(tmp_path / "source/train" / name, 2, seed=0)
    prepare(str(tmp_path / "source"), tmp_path / "set", progress=False)
    shard = tmp_path / "set/train-000000.tar"
    with tarfile.open(shard) as tar:
        label = next(member for member in tar if member.name.endswith("cls"))
    overwrite(shard, label.offset_data, b"1" if shard.read_bytes()[label.offset_data :][:1] == b"0" else b"0")
    assert "1 of its images differ from those in the tars" in dict(check_data(tmp_path / "set").bad)["train.index"]


def test_tars_with_usual_padding_are_read(shard: Path) -> None:
    whole = shard.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for size in (end + 512, end + 1024, end + 1024 + 9 * 1024):
        shard.write_bytes(whole[:end] + bytes(size - end))
        assert len(open_index(shard.parent, "train")) == COUNT


@pytest.mark.parametrize("option", ["--sparse", "--format=posix --sparse"])
def test_a_sparse_image_file_is_refused(tmp_path: Path, option: str) -> None:
    with (tmp_path / "a.bmp").open("wb") as file:
        file.write(b"BM")
        file.seek(1 << 20)  # leaves a hole
        file.write(b"x")
    (tmp_path / "a.cls").write_bytes(b"0")
    shard = tmp_path / "set/train-000000.tar"
    shard.parent.mkdir()
    subprocess.run(["tar", *option.split(), "-cf", shard, "-C", tmp_path, "a.bmp", "a.cls"], check=True)
    with pytest.raises(InputError, match=r"a.bmp: is a sparse file"):
        open_index(shard.parent, "train")


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
@pytest.mark.parametrize("name", ["b.jpg", "b.cls"])
def test_an_image_or_label_that_is_not_a_regular_file_is_refused(shard: Path, kind: bytes, name: str) -> None:
    with tarfile.open(shard, "a") as tar:
        link = tarfile.TarInfo(name)
        link.type, link.linkname = kind, "k00.jpg"
        tar.addfile(link)
    with pytest.raises(InputError, match=rf"{name}: is a (link|special file)"):
        open_index(shard.parent, "train")


def test_an_image_name_with_two_dots_is_refused_if_it_has_a_label_and_else_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a label such a file is surely an image of the set; without one it may be a mask or a depth map."""
    twin = [("img.1.cls", b"1"), ("img.1.jpg", PICTURES[1]), ("img.cls", b"0"), ("img.jpg", PICTURES[0])]
    make_tar(tmp_path / "train-000000.tar", twin)
    with pytest.raises(InputError, match=r"sample img .* ends at its first dot: rename files with more dots"):
        open_index(tmp_path, "train")
    make_tar(tmp_path / "train-000000.tar", [("img.cls", b"0"), ("img.jpg", PICTURES[0]), ("img.mask.png", b"x")])
    with caplog.at_level(logging.WARNING):
        assert len(open_index(tmp_path, "train")) == 1
    assert "skipped (train-000000.tar/img.mask.png)" in caplog.text
    assert "img.mask.png" in check_data(tmp_path).notes[0]


def test_images_without_a_label_are_counted_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tar(tmp_path / "train-000000.tar", [("0.jpg", PICTURES[0]), ("0.txt", b"x"), ("1.jpg", PICTURES[1])])
    index = open_index(tmp_path, "train")
    assert (index.labels.tolist(), index.class_names) == ([-1, -1], [])
    assert "2 of 2 images have no label" in caplog.text
    assert check_data(tmp_path).splits == ["split train: 2 files, no labels"]


def test_a_label_beyond_the_largest_number_of_classes_is_refused(tmp_path: Path) -> None:
    make_tar(tmp_path / "train-000000.tar", [("a.jpg", PICTURES[0]), ("a.cls", b"999999999")])
    with pytest.raises(InputError, match=r"label 999999999 is not one of the 100000 classes .* data.max_classes"):
        open_index(tmp_path, "train")
    make_tar(tmp_path / "train-000000.tar", [("a.jpg", PICTURES[0]), ("a.cls", b"7")])
    assert len(open_index(tmp_path, "train", max_classes=8).class_names) == 8
    (tmp_path / ".wmse_index/train.index").unlink()
    with pytest.raises(InputError, match="label 7 is not one of the 7 classes"):
        open_index(tmp_path, "train", max_classes=7)


def test_a_compressed_shard_that_does_not_fit_on_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gzip
    import shutil

    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=(1 << 28) + (5 << 20)))
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.jpg"))
    (tmp_path / "train-000000.tar.gz").write_bytes(gzip.compress(tar.getvalue() + bytes(64 << 20)))
    with pytest.raises(InputError, match=r"train-000000.tar.gz: unpacks to more than the 0.25 GiB that are free"):
        open_index(tmp_path, "train")
    assert sorted(path.name for path in (tmp_path / ".wmse_index").iterdir()) == [".gitignore"]


def test_check_data_names_a_damaged_tar_and_exits_with_1(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-data", str(shard.parent)]) == 0
    flip_a_bit_of_a_header(shard)
    assert main(["check-data", str(shard.parent)]) == 1
    assert capsys.readouterr().out.splitlines()[-3].startswith("train-000000.tar: ")


ODD_HEADERS = {
    "GNU.sparse.map": "no numbers",
    "GNU.sparse.size": "x",
    "size": "9" * 30,
    "path": "x\0y",
}


@pytest.mark.parametrize("key", ODD_HEADERS)
def test_invalid_pax_headers_give_a_short_message(tmp_path: Path, key: str) -> None:
    with tarfile.open(tmp_path / "train-000000.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("a.jpg", "a.cls"):
            info = tarfile.TarInfo(name)
            info.pax_headers = {key: ODD_HEADERS[key], "GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
            info.size = len(PICTURES[0])
            tar.addfile(info, io.BytesIO(PICTURES[0]))
    report = check_data(tmp_path)
    assert [name for name, _ in report.bad] == ["train-000000.tar"]
    assert report.bad[0][1].isprintable()
    assert len(report.bad[0][1]) < 500


def test_a_member_size_beyond_any_file_is_refused(shard: Path) -> None:
    header = bytearray(tarfile.TarInfo("x.jpg").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + b"\x7f" * 11
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    overwrite(shard, member_start(shard, "k02.jpg"), bytes(header))
    with pytest.raises(InputError, match=r"train-000000\.tar: "):
        open_index(shard.parent, "train")


def test_a_shard_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train-000000.tar")
    for read in (check_data, lambda path: open_index(path, "train")):
        with pytest.raises(InputError, match=r"train-000000\.tar: has the name of a shard, but is not a file"):
            read(tmp_path)


def test_a_gap_in_the_shard_numbers_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (0, 1, 4):
        make_tar(tmp_path / f"train-{number:06d}.tar", [(f"{number}.jpg", PICTURES[number]), (f"{number}.cls", b"0")])
    open_index(tmp_path, "train")
    assert "split train: no shard has number 2, 3: 2 may be missing" in caplog.text
    assert "no shard has number 2, 3" in check_data(tmp_path).notes[0]
    make_tar(tmp_path / "train-01.tar", [("x.jpg", PICTURES[5])])
    assert "several shards have the same number" in "".join(check_data(tmp_path).notes)
    make_tar(tmp_path / "train-20261128123456.tar", [("y.jpg", PICTURES[5])])
    assert "may be missing" in check_data(tmp_path).notes[0]


def test_a_compressed_shard_that_is_not_gzip_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train-000000.tar.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match=r"damaged or cut off: Not a gzipped file"):
        open_index(tmp_path, "train")
