"""Image folders and tar shards are opened as an index, and layout errors are named."""

import io
import logging
import os
import tarfile
import threading
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, image, make_folder, make_tar, shared

from tests.conftest import write_images
from trainer.data import index as index_module
from trainer.data.index import Index, open_index
from trainer.data.index_file import IndexContent, compute_fingerprint, read_index, write_index
from trainer.data.verify import check_data
from trainer.errors import InputError

JPEG = encoded("JPEG")
CMYK = encoded("JPEG", image("CMYK", height=8, width=9))


def folder_set(root: Path, more: dict[str, bytes] | None = None) -> Path:
    files = {"train/cat/a.JPEG": JPEG, "train/cat/b.JPEG": CMYK, "train/dog/a.JPEG": JPEG, "val/dog/v.JPEG": JPEG}
    return make_folder(root, {**files, **(more or {})})


def sample(key: str, label: int | str = 0, suffix: str = "jpg", data: bytes = JPEG) -> list[tuple[str, bytes]]:
    return [(f"{key}.{suffix}", data), (f"{key}.cls", str(label).encode())]


def test_a_folder_is_indexed_with_labels_sizes_and_kinds(tmp_path: Path) -> None:
    index = open_index(folder_set(tmp_path), "train")
    assert len(index) == 3
    assert index.class_names == ["cat", "dog"]
    assert [index.name(i) for i in range(3)] == ["cat/a.JPEG", "cat/b.JPEG", "dog/a.JPEG"]
    assert index.labels.tolist() == [0, 0, 1]
    assert index.heights.tolist() == [21, 8, 21]
    assert index.widths.tolist() == [34, 9, 34]
    assert [index.kind(i) for i in range(3)] == ["direct", "convert", "direct"]
    assert [index.read(i) for i in range(3)] == [JPEG, CMYK, JPEG]


def test_shards_are_indexed_with_labels_and_names(tmp_path: Path) -> None:
    make_tar(tmp_path / "train-000000.tar", [*sample("a", 3), *sample("dir/b", 0)])
    make_tar(tmp_path / "train-000001.tar", [("c.json", b"{}"), *sample("c", -1, "JPEG", CMYK), ("._c.jpg", b"x")])
    make_tar(tmp_path / "train-extra-000000.tar", sample("other"))
    index = open_index(tmp_path, "train")
    assert index.labels.tolist() == [3, 0, -1]
    assert index.class_names == ["0", "1", "2", "3"]
    assert [index.name(i) for i in range(3)] == [
        "train-000000.tar/a.jpg",
        "train-000000.tar/dir/b.jpg",
        "train-000001.tar/c.JPEG",
    ]
    assert [index.read(i) for i in range(3)] == [JPEG, JPEG, CMYK]
    assert [index.kind(i) for i in range(3)] == ["direct", "direct", "convert"]


def test_at_most_max_open_shards_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_OPEN_SHARDS", 2)
    pictures = [encoded("JPEG", image(seed=seed)) for seed in range(5)]
    for number, data in enumerate(pictures):
        make_tar(tmp_path / f"train-{number:06d}.tar", sample(str(number), data=data))
    index = open_index(tmp_path, "train")
    assert [index.read(i) for i in range(5)] == pictures
    assert len(index._descriptors) == 2


def test_a_compressed_shard_is_uncompressed_once_and_again_when_it_changes(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "test-000000.tar.gz", "w:gz") as tar:
        for name, data in sample("a"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert open_index(tmp_path, "test").read(0) == JPEG
    copy = tmp_path / ".wmse_index" / "test-000000.tar"
    first = copy.stat().st_ino
    assert open_index(tmp_path, "test").read(0) == JPEG
    assert copy.stat().st_ino == first
    os.utime(tmp_path / "test-000000.tar.gz", (0, 0))
    assert open_index(tmp_path, "test").read(0) == JPEG
    assert copy.stat().st_ino != first
    whole = (tmp_path / "test-000000.tar.gz").read_bytes()
    (tmp_path / "test-000000.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"test-000000\.tar\.gz: damaged or cut"):
        open_index(tmp_path, "test")


def test_labels_of_val_are_those_of_train_by_class_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """val has no cat and an unknown bird: dog keeps its label from train, and the log names cat and bird."""
    folder_set(tmp_path, {"val/bird/x.JPEG": JPEG})
    index = open_index(tmp_path, "val")
    assert index.labels.tolist() == [1]
    assert index.class_names == ["cat", "dog"]
    assert "1 folders are not classes of the training split and are skipped (bird)" in caplog.text
    assert "1 classes of the training split have no folder (cat)" in caplog.text


def test_classes_are_sorted_as_text(tmp_path: Path) -> None:
    make_folder(tmp_path, {f"train/{name}/x.jpg": JPEG for name in ("2", "10", "100", "Zebra", "ant")})
    assert open_index(tmp_path, "train").class_names == ["10", "100", "2", "Zebra", "ant"]


def test_hidden_files_and_folders_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hidden = ("train/.DS_Store", "train/cat/.DS_Store", "train/cat/._a.JPEG", "train/.ipynb_checkpoints/a.JPEG")
    folder_set(tmp_path, dict.fromkeys([*hidden, "train/dog/.ipynb_checkpoints/a.JPEG"], b"x"))
    index = open_index(tmp_path, "train")
    assert len(index) == 3
    assert index.class_names == ["cat", "dog"]
    assert caplog.text == ""


def test_nested_images_are_read_and_images_beside_the_classes_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = open_index(folder_set(tmp_path, {"train/dog/images/c.JPEG": CMYK, "train/loose.JPEG": JPEG}), "train")
    assert index.name(3) == "dog/images/c.JPEG"
    assert index.read(3) == CMYK
    assert "1 files next to the class folders are skipped (loose.JPEG); expected ROOT/SPLIT/CLASS/IMAGE" in caplog.text


def test_linked_class_folders_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    make_folder(tmp_path / "elsewhere", {"a.jpg": JPEG})
    (tmp_path / "set/train").mkdir(parents=True)
    (tmp_path / "set/train/cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/loop").symlink_to(tmp_path / "elsewhere")
    assert open_index(tmp_path / "set", "train").read(0) == JPEG
    assert len(open_index(tmp_path / "set", "train")) == 1


def test_names_that_are_not_ascii_are_read(tmp_path: Path) -> None:
    strange = os.fsdecode(b"latin-\xe9.jpg")
    make_folder(tmp_path, {"train/кошка/猫 1.jpg": JPEG, f"train/кошка/{strange}": CMYK})
    index = open_index(tmp_path, "train")
    shown = "latin-\\udce9.jpg"  # a byte that is not UTF-8 is shown as Python escapes it
    assert {index.name(i): index.read(i) for i in range(2)} == {"кошка/猫 1.jpg": JPEG, f"кошка/{shown}": CMYK}
    make_tar(tmp_path / "tars/train-000000.tar", sample("猫"))
    assert open_index(tmp_path / "tars", "train").name(0) == "train-000000.tar/猫.jpg"


def test_files_that_are_not_images_are_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = open_index(folder_set(tmp_path, {"train/cat/aa.JPEG": b"", "train/dog/page.jpg": b"<html>"}), "train")
    assert [index.name(i) for i in range(3)] == ["cat/a.JPEG", "cat/b.JPEG", "dog/a.JPEG"]
    assert index.labels.tolist() == [0, 0, 1]
    assert index.heights.tolist() == [21, 8, 21]
    assert "skipped 2 of 5 files that are not usable images: cat/aa.JPEG: empty file" in caplog.text
    listed = (tmp_path / ".wmse_index/train.skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == ["cat/aa.JPEG", "dog/page.jpg"]


def test_the_unusable_odd_files_are_listed(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/odd").symlink_to(shared("odd").resolve())
    index = open_index(tmp_path, "train")
    listed = (tmp_path / ".wmse_index/train.skipped.txt").read_text()
    # 02 and 08 are damaged too, but behind the first bytes, and the index reads no more than these
    assert {line[4:6] for line in listed.splitlines()} == {"01", "03", "06", "24", "29", "31", "39"}
    assert len(index) == 16


@pytest.mark.parametrize(
    ("files", "split", "message"),
    [
        ({}, "train", "no split 'train' in it .it holds: nothing"),
        ({"train/cat/a.jpg": JPEG}, "val", "no split 'val' in it .it holds: train"),
        ({"cat/a.jpg": JPEG}, "train", "no split 'train' in it .it holds: cat"),
        ({"train/.x": b""}, "train", "train: there are no files in it"),
        ({"train/cat/.x": b"", "train/dog/.x": b""}, "train", "train: there are no files in it"),
        ({"train/cat/a.jpg": JPEG, "x/b.jpg": JPEG}, "../x", "'../x' is not inside"),
        ({"train/cat/a.jpg": JPEG}, "/etc", "'/etc' is not inside"),
        ({"train/cat/a.jpg": b"text"}, "train", "no image among 1 files; cat/a.jpg: not a readable image"),
    ],
)
def test_layout_errors_name_path_and_layout(tmp_path: Path, files: dict[str, bytes], split: str, message: str) -> None:
    make_folder(tmp_path, files)
    with pytest.raises(InputError, match=message) as error:
        open_index(tmp_path, split)
    assert "expected ROOT/SPLIT/CLASS/IMAGE" in str(error.value) or "is not inside" in str(error.value)


@pytest.mark.parametrize(
    ("names", "split", "note"),
    [
        (["train/a.jpg", "train/b.jpg"], "train", "train has no class folders; its 2 files are used without labels"),
        (["a.jpg", "b.jpg"], ".", "has no class folders; its 2 files are used without labels"),
        (["train/cat/a.jpg", "val/v.jpg"], "val", "val has no class folders; its 1 files are used without labels"),
        (
            ["train/cat/a.jpg", "test/images/v.jpg"],
            "test",
            "none of its 1 folders (images) is a class of the training split (cat): its 1 files are used without labels",
        ),
    ],
)
def test_images_without_classes_have_no_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], split: str, note: str
) -> None:
    make_folder(tmp_path, dict.fromkeys(names, JPEG))
    for _ in range(2):  # the first opening builds the index, the second reads it
        index = open_index(tmp_path, split)
        assert set(index.labels.tolist()) == {-1}
        assert {index.read(i) for i in range(len(index))} == {JPEG}
        assert len(index) == sum(name.startswith(split) or split == "." for name in names)
    assert note in caplog.text
    assert caplog.text.count(note) == 1, "the second opening indexed the files again"


def test_a_folder_of_classes_is_the_split_dot(tmp_path: Path) -> None:
    make_folder(tmp_path, {"cat/a.jpg": JPEG, "dog/b.jpg": JPEG})
    index = open_index(tmp_path, ".")
    assert (index.class_names, index.labels.tolist()) == (["cat", "dog"], [0, 1])


def test_broken_links_beside_the_class_folders_are_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_folder(tmp_path, {"train/cat/a.jpg": JPEG})
    (tmp_path / "train/loop").symlink_to("loop")
    (tmp_path / "train/one").symlink_to("two")
    (tmp_path / "train/two").symlink_to("one")
    (tmp_path / "train/gone").symlink_to("/no/such/folder")
    assert open_index(tmp_path, "train").class_names == ["cat"]
    assert "4 links are broken and are skipped (gone, loop, one, two)" in caplog.text


def test_a_file_over_4_gib_is_skipped(tmp_path: Path) -> None:
    make_folder(tmp_path, {"train/cat/a.jpg": JPEG})
    with (tmp_path / "train/cat/huge.jpg").open("wb") as file:
        file.truncate(2**32 + 7)  # a sparse file, which takes no space on the disk
    assert len(open_index(tmp_path, "train")) == 1
    assert (tmp_path / ".wmse_index/train.skipped.txt").read_text() == "cat/huge.jpg\t2 GiB or larger\n"
    assert check_data(tmp_path).bad == [("train/cat/huge.jpg", "2 GiB or larger")]


def test_a_missing_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path}/nowhere: no such folder"):
        open_index(tmp_path / "nowhere", "train")


def test_an_empty_class_folder_is_a_class_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_set(tmp_path)
    (tmp_path / "train/ape").mkdir()
    assert open_index(tmp_path, "train").class_names == ["ape", "cat", "dog"]
    assert "the class folder ape holds no files" in caplog.text


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([*sample("ok"), ("b.cls", b"1")], r"b \(b.cls\) has 0 images and 1 labels"),
        ([("b.jpeg2000", JPEG), ("b.cls", b"1")], r"b \(b.jpeg2000, b.cls\) has 0 images"),
        ([("b.jpg", JPEG), ("b.png", JPEG), ("b.cls", b"1")], "has 2 images"),
        ([("b.x.jpg", JPEG), ("b.cls", b"1")], "b.x.jpg"),
        ([*sample("a"), *sample("b"), *sample("a")], "a.jpg: the parts of sample a are not adjacent"),
        (
            [("a.jpg", JPEG), ("b.jpg", JPEG), ("a.cls", b"1"), ("b.cls", b"1")],
            r"a.cls: the parts of sample a are not adjacent",
        ),
        (sample("a", "cat"), "a.cls: the label b'cat' is not a whole number"),
        (sample("a", -2), "a.jpg: label -2 is not one of the"),
    ],
)
def test_tar_errors_name_tar_and_member(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    make_tar(tmp_path / "train-000007.tar", members)
    with pytest.raises(InputError, match=message) as error:
        open_index(tmp_path, "train")
    assert "train-000007.tar" in str(error.value)


def test_a_label_beyond_the_class_names_is_refused(tmp_path: Path) -> None:
    make_tar(tmp_path / "train-000000.tar", sample("a", 2))
    (tmp_path / "dataset.json").write_text('{"class_names": ["cat", "dog"]}')
    with pytest.raises(InputError, match=r"train-000000.tar/a.jpg: label 2 is not one of the 2 classes"):
        open_index(tmp_path, "train")
    (tmp_path / "dataset.json").write_text('{"class_names": ["cat", "dog", "ape"]}')
    assert open_index(tmp_path, "train").class_names == ["cat", "dog", "ape"]
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(InputError, match=r"dataset.json: expected JSON"):
        open_index(tmp_path, "train")


def test_a_truncated_or_invalid_tar_is_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "train-000000.tar", [*sample("a"), *sample("b")])
    whole = path.read_bytes()
    for broken in (whole[:700], b"", b"\x1f\x8b" + whole[2:]):
        path.write_bytes(broken)
        with pytest.raises(
            InputError, match=r"train-000000.tar: cannot be read as an uncompressed tar file, or is cut"
        ):
            open_index(tmp_path, "train")


def test_reading_from_a_shard_that_was_truncated_after_opening_names_it(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "train-000000.tar", sample("a"))
    index = open_index(tmp_path, "train")
    os.truncate(path, 600)
    with pytest.raises(OSError, match=r"train-000000.tar: cut off: image train-000000.tar/a.jpg has 88 of"):
        index.read(0)


def test_reading_a_file_that_was_deleted_after_opening_names_it(tmp_path: Path) -> None:
    index = open_index(folder_set(tmp_path), "train")
    (tmp_path / "train/dog/a.JPEG").unlink()
    with pytest.raises(OSError, match=r"dog/a.JPEG"):
        index.read(2)


def change_nothing(root: Path) -> None:
    (root / "train/cat/a.JPEG").touch()


def add_file(root: Path) -> None:
    make_folder(root, {"train/cat/new.JPEG": JPEG})


def add_nested(root: Path) -> None:
    make_folder(root, {"train/cat/deep/new.JPEG": JPEG})


def add_class(root: Path) -> None:
    make_folder(root, {"train/ape/new.JPEG": JPEG})


def remove_class(root: Path) -> None:
    (root / "train/dog/a.JPEG").unlink()
    (root / "train/dog").rmdir()


@pytest.mark.parametrize(
    ("change", "count"), [(change_nothing, None), (add_file, 5), (add_nested, 5), (add_class, 5), (remove_class, 3)]
)
def test_the_index_is_rebuilt_when_files_were_added_or_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Path], None], count: int | None
) -> None:
    before = open_index(folder_set(tmp_path, {"train/cat/deep/old.JPEG": JPEG}), "train").fingerprint
    with caplog.at_level(logging.INFO):
        change(tmp_path)
        index = open_index(tmp_path, "train")
    assert ("indexing them again" in caplog.text) == (count is not None)
    assert (index.fingerprint != before) == (count is not None)
    assert len(index) == (count or 4)


def test_the_index_of_val_is_rebuilt_when_the_classes_of_train_change(tmp_path: Path) -> None:
    assert open_index(folder_set(tmp_path), "val").labels.tolist() == [1]
    add_class(tmp_path)
    assert open_index(tmp_path, "val").labels.tolist() == [2]


def test_the_index_of_shards_is_rebuilt_when_a_shard_is_added_or_changed(tmp_path: Path) -> None:
    make_tar(tmp_path / "train-000000.tar", sample("a"))
    assert len(open_index(tmp_path, "train")) == 1
    make_tar(tmp_path / "train-000001.tar", sample("b"))
    assert len(open_index(tmp_path, "train")) == 2
    make_tar(tmp_path / "train-000001.tar", sample("c"))  # has the same size
    assert open_index(tmp_path, "train").name(1) == "train-000001.tar/c.jpg"


def test_the_fingerprint_depends_on_labels_and_names(tmp_path: Path) -> None:
    columns = {"label": np.array([0, 1], "<i4"), "names": np.frombuffer(b"ab", np.uint8)}
    swapped = {"label": np.array([1, 0], "<i4"), "names": np.frombuffer(b"ab", np.uint8)}
    prints = [compute_fingerprint(columns, ["x", "y"]), compute_fingerprint(swapped, ["x", "y"])]
    assert len({*prints, compute_fingerprint(columns, ["x", "z"])}) == 3


def test_read_only_folders_are_indexed_in_the_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number, more in enumerate(({}, {"train/cat/c.jpg": JPEG})):
        root = folder_set(tmp_path / str(number), more)
        root.chmod(0o555)
        try:
            assert len(open_index(root, "train")) == 3 + len(more)
            assert not (root / ".wmse_index").exists()
            assert len(list((tmp_path / "cache/wmse").glob("*/train.index"))) == number + 1
            (tmp_path / "file").write_bytes(b"")
            with monkeypatch.context() as context:
                context.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
                with pytest.raises(InputError, match="set XDG_CACHE_HOME"):
                    open_index(root, "train")
        finally:
            root.chmod(0o755)


def broken_indices(whole: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "other": b"PK\3\4" + whole,
        "version": whole[:8] + b"\x63" + whole[9:],
        "cut header": whole[:50],
        "cut": whole[:-1],
        "long": whole + b"x",
        "metadata": whole[:20] + b"\xff" * 20 + whole[40:],
    }


def test_a_broken_index_is_named_and_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_index(folder_set(tmp_path), "train")
    path = tmp_path / ".wmse_index/train.index"
    whole = path.read_bytes()
    for name, data in broken_indices(whole).items():
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"{path}: not a usable index: .*Delete it"):
            read_index(path)
        caplog.clear()
        assert len(open_index(tmp_path, "train")) == 3, name
        assert "not a usable index" in caplog.text
        assert path.read_bytes() == whole


def test_several_openings_at_once_give_one_index(tmp_path: Path) -> None:
    folder_set(tmp_path, {f"train/cat/{i}.jpg": JPEG for i in range(50)})
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(open_index(tmp_path, "train").fingerprint)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert sorted(path.name for path in (tmp_path / ".wmse_index").iterdir()) == [".gitignore", "train.index"]


def test_many_threads_read_the_right_images(tmp_path: Path) -> None:
    pictures = [encoded("JPEG", image(seed=seed)) for seed in range(12)]
    for number in range(3):
        members = [part for i in range(number, 12, 3) for part in sample(f"{i:02d}", i, data=pictures[i])]
        make_tar(tmp_path / f"train-{number:06d}.tar", members)
    index = open_index(tmp_path, "train")
    wrong: list[int] = []

    def read_all() -> None:
        wrong.extend(i for _ in range(20) for i in range(12) if index.read(i) != pictures[index.labels[i]])

    threads = [threading.Thread(target=read_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folder", "shards"])
def test_an_index_of_imagenet_is_small_and_opens_fast(tmp_path: Path, form: str) -> None:
    """An index of 1,281,167 images with names like ImageNet's takes at most 64 MB and opens in well under a second."""
    count = 1_281_167
    ids = np.arange(count)
    columns = {
        "label": (ids // 1282).astype("<i4"),
        "height": np.full(count, 375, "<i4"),
        "width": np.full(count, 500, "<i4"),
        "nbytes": np.full(count, 110_000, "<u4"),
        "kind": np.zeros(count, "u1"),
    }
    if form == "shards":
        columns |= {"shard": (ids // 10_000).astype("<u2"), "block": (ids % 10_000 * 220).astype("<u4")}
    names = [f"n{1_440_764 + i // 1282:08d}_{i % 1282 * 15}.JPEG" for i in range(count)]
    class_names = [f"n{i:08d}" for i in range(1000)]
    write_index(tmp_path / "train.index", IndexContent(columns, names, {"split": "train", "class_names": class_names}))
    assert (tmp_path / "train.index").stat().st_size <= 64_000_000
    opened = timeit.repeat(lambda: Index(tmp_path / "train.index", tmp_path), number=1, repeat=5)
    assert min(opened) < 0.5  # 1 ms measured
    index = Index(tmp_path / "train.index", tmp_path)
    assert len(index) == count
    assert index.name(count - 1) == f"{class_names[999]}/{names[-1]}"
    assert index.labels[1282] == 1


def test_a_link_to_itself_is_skipped_and_named(tmp_path: Path) -> None:
    write_images(tmp_path / "set" / "train" / "cats", 3, seed=1)
    (tmp_path / "set" / "train" / "cats" / "loop.JPEG").symlink_to("loop.JPEG")
    assert len(open_index(tmp_path / "set", "train")) == 3
    (bad,) = (tmp_path / "set").rglob("train.skipped.txt")
    assert "loop.JPEG" in bad.read_text()
