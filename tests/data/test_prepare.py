"""wmse prepare writes image folders and published sets as shards."""

import gzip
import io
import json
import os
import struct
import sys
import tarfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torchvision
from pictures import encoded, image, make_folder, png_16_bit, png_chunks, shared
from PIL import Image

from trainer.data import named_datasets as sets
from trainer.data.image_probe import inspect_image
from trainer.data.index import open_index
from trainer.data.named_datasets import ArraySplit, KnownSet
from trainer.data.prepare import prepare
from trainer.data.shard_writer import Shrink, choose_images
from trainer.data.verify import check_data
from trainer.errors import InputError

module = sys.modules["trainer.data.prepare"]

JPEG = encoded("JPEG")
DEMO_DATA = Path(__file__).parents[2] / "demo_data"


def source_folder(root: Path) -> Path:
    files = {f"train/{name}/{i}.jpg": encoded("JPEG", image(seed=i)) for name in ("cat", "dog") for i in range(4)}
    return make_folder(root, {**files, "val/dog/v.w.jpg": JPEG})


def members(folder: Path, split: str) -> list[str]:
    return [name for path in sorted(folder.glob(f"{split}-*.tar")) for name in tarfile.open(path).getnames()]


def test_a_folder_is_written_as_shards_with_an_index(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source")
    prepare(str(source), tmp_path / "dest", images_per_shard=3, progress=False)
    shards = ["train-000000.tar", "train-000001.tar", "train-000002.tar", "train.index", "val-000000.tar", "val.index"]
    assert sorted(path.name for path in (tmp_path / "dest").iterdir()) == ["dataset.json", *shards]
    index = open_index(tmp_path / "dest", "train")
    assert index.class_names == ["cat", "dog"]
    found = sorted((int(index.labels[i]), index.read(i)) for i in range(len(index)))
    assert found == sorted((label, encoded("JPEG", image(seed=i))) for label in (0, 1) for i in range(4))
    val = open_index(tmp_path / "dest", "val")
    assert (val.labels.tolist(), val.read(0), val.name(0)) == ([1], JPEG, "val-000000.tar/v_w.jpg")
    assert json.loads((tmp_path / "dest/dataset.json").read_text())["images"] == {"train": 8, "val": 1}
    assert not (source / ".wmse_index").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "source"]


def test_sample_keys_are_unique_and_their_parts_adjacent(tmp_path: Path) -> None:
    source = make_folder(
        tmp_path / "s", {f"train/{name}/a.b.{suffix}": JPEG for name in "xyz" for suffix in ("jpg", "png")}
    )
    prepare(str(source), tmp_path / "dest", progress=False)
    names = members(tmp_path / "dest", "train")
    assert len(set(names)) == len(names) == 12
    assert all(name.count(".") == 1 for name in names)
    assert [name.split(".")[0] for name in names[::2]] == [name.split(".")[0] for name in names[1::2]]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source")
    for name in ("a", "b"):
        prepare(str(source), tmp_path / name, progress=False)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    with tarfile.open(tmp_path / "a/train-000000.tar") as tar:
        first = tar.getmembers()[0]
    assert (first.mtime, first.uid, first.gid, first.uname, first.mode) == (0, 0, 0, "", 0o644)


def test_the_order_of_the_images_is_shuffled_and_fixed() -> None:
    labels = np.repeat(np.arange(10, dtype=np.int32), 100)
    order = choose_images(labels, 1000)
    assert sorted(order) == list(range(1000))
    assert len(set(labels[order[:50]])) == 10
    assert order[:4].tolist() == [652, 293, 617, 707]  # from Philox's raw output, which numpy keeps across versions


def test_a_limit_of_images_is_spread_over_the_classes() -> None:
    labels = np.array([0] * 50 + [1] * 3 + [2] * 50, np.int32)
    counts = np.bincount(labels[choose_images(labels, 23)])
    assert counts.tolist() == [10, 3, 10]


def test_rare_kinds_are_converted_and_unusable_files_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = JPEG[: len(JPEG) // 2]
    files = {"a.webp": encoded("WEBP"), "b.png": png_16_bit(), "c.jpg": JPEG, "d.jpg": b"<html>", "e.jpg": cut}
    source = make_folder(tmp_path / "source", {f"train/cat/{name}": data for name, data in files.items()})
    prepare(str(source), tmp_path / "dest", progress=False)
    index = open_index(tmp_path / "dest", "train")
    assert sorted(index.name(i).split("/")[1] for i in range(len(index))) == ["a.png", "b.png", "c.jpg"]
    assert {inspect_image(index.read(i)).kind for i in range(len(index))} == {"direct"}
    listed = (tmp_path / "dest/train.skipped.txt").read_text().splitlines()
    assert sorted(line.split("\t")[0] for line in listed) == ["cat/d.jpg", "cat/e.jpg"]
    assert "skipped 2 of 5 files that are not usable images" in caplog.text
    assert str(tmp_path / "dest/train.skipped.txt") in caplog.text


def test_large_images_are_shrunk_and_small_ones_are_copied(tmp_path: Path) -> None:
    large = image(height=60, width=100, seed=1)
    files = {"a.jpg": encoded("JPEG", large), "b.png": encoded("PNG", large.rotate(90, expand=True)), "c.jpg": JPEG,
             "d.webp": encoded("WEBP", large), "e.jpg": encoded("JPEG", large)[:300]}  # fmt: skip
    assert max(inspect_image(JPEG)[2:4]) <= 50
    source = make_folder(tmp_path / "source", {f"train/cat/{name}": data for name, data in files.items()})
    prepare(str(source), tmp_path / "dest", shrink=Shrink(50, 95), progress=False)
    index = open_index(tmp_path / "dest", "train")
    by_name = {index.name(i).split("/")[1]: i for i in range(len(index))}
    sizes = {name: (int(index.heights[i]), int(index.widths[i])) for name, i in by_name.items()}
    assert sizes == {"a.jpg": (30, 50), "b.jpg": (50, 30), "c.jpg": inspect_image(JPEG)[2:4], "d.jpg": (30, 50)}
    assert index.read(by_name["c.jpg"]) == JPEG
    expected = np.asarray(large.resize((50, 30), Image.Resampling.LANCZOS), float)
    found = np.asarray(Image.open(io.BytesIO(index.read(by_name["d.jpg"]))), float)
    assert np.abs(found - expected).mean() < 10  # compression changes the noise; another image differs by 50
    described = json.loads((tmp_path / "dest/dataset.json").read_text())
    assert (described["max_side"], described["quality"]) == (50, 95)
    assert (tmp_path / "dest/train.skipped.txt").read_text().startswith("cat/e.jpg\t")
    for shrink in (Shrink(7), Shrink(50, 101)):
        with pytest.raises(InputError, match=f"max_side is {shrink.max_side} and quality {shrink.quality}"):
            prepare(str(source), tmp_path / "other", shrink=shrink)


def test_a_split_without_a_usable_image_is_refused(tmp_path: Path) -> None:
    files = {"train/cat/a.jpg": encoded("JPEG", image(height=300, width=400), quality=95)[:-20]}
    with pytest.raises(InputError, match=r"none of its images can be used; the first: cat/a.jpg: OSError"):
        prepare(str(make_folder(tmp_path / "s", files)), tmp_path / "dest", progress=False)
    assert not (tmp_path / "dest").exists()


def test_the_destination_must_be_empty_and_appears_only_when_complete(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source")
    with pytest.raises(InputError, match="source: is not empty"):
        prepare(str(source), source, progress=False)
    (source / "val/dog/v.w.jpg").write_bytes(b"")
    with pytest.raises(InputError, match="split val: no image among 1 files"):
        prepare(str(source), tmp_path / "dest", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    (tmp_path / "dest").mkdir()
    prepare(str(source), tmp_path / "dest", splits=["train"], progress=False)
    assert len(open_index(tmp_path / "dest", "train")) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "nowhere"}, "nowhere: neither a folder nor a known set .fashion-mnist, cifar10, cifar100, stl10"),
        ({"splits": ["test"]}, "no split test; it has train, val"),
        ({"max_images": {"vall": 3}}, "no split vall; it has train, val"),
        ({"images_per_shard": 0}, "images_per_shard is 0"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    source = str(source_folder(tmp_path / "source"))
    with pytest.raises(InputError, match=message):
        prepare(**{"source": source, "dest": tmp_path / "dest", "progress": False, **arguments})


@pytest.mark.parametrize("place", ["shards", "train/shards", "link/shards", ""])
def test_a_destination_inside_the_image_folder_is_refused(tmp_path: Path, place: str) -> None:
    """The next command would take it for a split or a class."""
    source = source_folder(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    dest = tmp_path / place if place.startswith("link") else source / place
    with pytest.raises(InputError, match="lies inside" if place else "not empty"):
        prepare(str(source), dest, progress=False)
    assert sorted(path.name for path in source.iterdir()) == ["train", "val"]


def test_splits_without_train_must_have_the_same_classes(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "s", {"a/cat/1.jpg": JPEG, "b/dog/1.jpg": JPEG})
    with pytest.raises(InputError, match="need the same ones, but they differ: a, b"):
        prepare(str(source), tmp_path / "dest", progress=False)


def test_a_missing_shard_is_named_and_a_new_index_does_without_it(tmp_path: Path) -> None:
    prepare(str(source_folder(tmp_path / "s")), tmp_path / "dest", images_per_shard=3, progress=False)
    (tmp_path / "dest/train-000001.tar").unlink()
    with pytest.raises(
        InputError, match=r"train-000001.tar is missing or does not have the size that train.index expects"
    ):
        open_index(tmp_path / "dest", "train")
    (tmp_path / "dest/train.index").unlink()
    index = open_index(tmp_path / "dest", "train")
    assert (len(index), index.class_names) == (5, ["cat", "dog"])


def test_a_published_set_may_have_an_unlabelled_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 9, 3), np.uint8)

    def load(split: str, download_dir: Path) -> ArraySplit:
        labels = np.array([2, 0, 1, 1, 0] if split == "train" else [-1] * 5, np.int32)
        return ArraySplit(images, labels, ["a", "b", "c"])

    monkeypatch.setitem(sets.SETS, "tiny", KnownSet(("train", "train+unlabeled"), load))
    prepare("tiny", tmp_path / "dest", download_dir=tmp_path, max_images={"train": 3}, progress=False)
    assert sorted(open_index(tmp_path / "dest", "train").labels) == [0, 1, 2]
    index = open_index(tmp_path / "dest", "train+unlabeled")
    assert index.labels.tolist() == [-1] * 5
    assert index.class_names == ["a", "b", "c"]
    assert (index.heights[0], index.widths[0]) == (8, 9)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_loaded_with_labels_and_class_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    found = SimpleNamespace(data=np.zeros((2, 32, 32, 3), np.uint8), targets=[1, 0], classes=["x", "y"])
    monkeypatch.setattr(torchvision.datasets, name.upper(), lambda root, train, download: found)
    split = sets.load_split(name, "train", tmp_path)
    assert (len(split), split.labels.tolist(), split.class_names) == (2, [1, 0], ["x", "y"])
    assert inspect_image(split.read(0))[2:4] == (32, 32)


def test_stl10_is_loaded_channels_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = np.zeros((2, 3, 96, 90), np.uint8)
    data[0, 0] = 255
    found = SimpleNamespace(data=data, labels=np.array([-1, -1]), classes=["x"])
    monkeypatch.setattr(torchvision.datasets, "STL10", lambda root, split, download: found)
    split = sets.load_split("stl10", "train+unlabeled", tmp_path)
    assert split.images[0, 0, 0].tolist() == [255, 0, 0]
    assert inspect_image(split.read(1))[2:4] == (96, 90)


def test_fashion_mnist_is_read_from_the_debian_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pixels = np.arange(2 * 784, dtype=np.uint32).astype(np.uint8)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(
        gzip.compress(struct.pack(">4I", 2051, 2, 28, 28) + pixels.tobytes())
    )
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(struct.pack(">2I", 2049, 2) + b"\7\3"))
    monkeypatch.setattr(sets, "DEBIAN_FASHION_MNIST", tmp_path)
    split = sets.load_split("fashion-mnist", "test", tmp_path)
    np.testing.assert_array_equal(split.images, pixels.reshape(2, 28, 28))
    assert split.labels.tolist() == [7, 3]
    assert split.class_names[7] == "Sneaker"


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(root: str, train: bool, download: bool) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fail)
    with pytest.raises(
        InputError, match=rf"cannot get cifar10 \(train\): Network is unreachable. .*into {tmp_path} yourself"
    ):
        prepare("cifar10", tmp_path / "dest", download_dir=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_real_photographs_are_prepared(tmp_path: Path) -> None:
    prepare(str(shared("photos")), tmp_path / "dest", progress=False)
    index = open_index(tmp_path / "dest", "train")
    assert len(index) == len(index.class_names) == 200
    assert sorted(index.labels) == list(range(200))


def test_the_demo_set_is_complete() -> None:
    assert sum(path.stat().st_size for path in DEMO_DATA.iterdir() if path.is_file()) <= 6_000_000
    for split, count in (("train", 10_000), ("test", 2_000)):
        index = open_index(DEMO_DATA, split)
        assert np.bincount(index.labels).tolist() == [count // 10] * 10
        assert inspect_image(index.read(count - 1)).kind == "direct"
        assert set(index.heights) == set(index.widths) == {28}
        assert index.class_names[9] == "Ankle boot"
    assert "Zalando SE" in (DEMO_DATA / "LICENSE-fashion-mnist.txt").read_text()


def test_only_the_listed_classes_are_prepared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """This holds for every split, in the order of the folders. Text behind a class name and comments are ignored."""
    names = ("ant", "bee", "cat", "great white")
    files = {f"{split}/{name}/{i}.jpg": JPEG for split in ("train", "val") for name in names for i in range(2)}
    source = make_folder(tmp_path / "source", files)
    listed = tmp_path / "list.txt"
    listed.write_text("# two of four\ngreat white\n\ncat  Felis catus # a comment\n")
    prepare(str(source), tmp_path / "dest", classes=listed, progress=False)
    for split in ("train", "val"):
        index = open_index(tmp_path / "dest", split)
        assert index.class_names == ["cat", "great white"]
        assert np.bincount(index.labels).tolist() == [2, 2]
    assert json.loads((tmp_path / "dest/dataset.json").read_text())["class_names"] == ["cat", "great white"]
    assert "skipped" not in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat\nlion\n", r"list.txt, line 2: the set has no class 'lion'; its 2 classes begin with cat, dog"),
        ("cat\n# x\ncat again\n", r"list.txt, line 3: the class 'cat' is already in line 1"),
        ("# nothing\n", "list.txt: lists no class"),
        (None, "list.txt: cannot be read as a list of classes: No such file"),
    ],
)
def test_a_list_of_classes_that_does_not_match_the_set_is_refused(
    text: str | None, message: str, tmp_path: Path
) -> None:
    source = source_folder(tmp_path / "source")
    if text is not None:
        (tmp_path / "list.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        prepare(str(source), tmp_path / "dest", classes=tmp_path / "list.txt", progress=False)
    assert not (tmp_path / "dest").exists()


def test_a_split_without_a_listed_class_is_refused(tmp_path: Path) -> None:
    """ImageNet's test split has files without classes: none belongs to a class of the list."""
    source = make_folder(source_folder(tmp_path / "source"), {"test/t.jpg": JPEG})
    (tmp_path / "list.txt").write_text("dog\n")
    with pytest.raises(InputError, match=r"test: has no folder of the listed classes.*--splits"):
        prepare(str(source), tmp_path / "dest", classes=tmp_path / "list.txt", progress=False)
    options = {"classes": tmp_path / "list.txt", "splits": ["train", "val"], "progress": False}
    prepare(str(source), tmp_path / "dest", **options)
    assert len(open_index(tmp_path / "dest", "train")) == 4


def test_a_list_of_classes_is_refused_for_a_published_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--classes is for image folders, not for cifar10"):
        prepare("cifar10", tmp_path / "dest", classes=tmp_path / "list.txt", progress=False)


# --- interruptions and unusual sets ---


def test_a_split_does_not_take_the_shards_of_one_whose_name_ends_alike(tmp_path: Path) -> None:
    source = make_folder(source_folder(tmp_path / "s"), {"my-train/cat/a.jpg": JPEG, "my-train/dog/b.jpg": JPEG})
    prepare(str(source), tmp_path / "dest", progress=False)
    assert [len(open_index(tmp_path / "dest", split)) for split in ("my-train", "train")] == [2, 8]


def test_all_splits_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "s")
    (source / "test").mkdir()
    with pytest.raises(InputError, match="test: there are no files in it"):
        prepare(str(source), tmp_path / "dest", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]
    prepare(str(source), tmp_path / "dest", splits=["train", "val"], progress=False)
    assert len(open_index(tmp_path / "dest", "train")) == 8


def test_splits_without_classes_are_prepared_without_labels(tmp_path: Path) -> None:
    source = make_folder(source_folder(tmp_path / "s"), {"test/images/t.jpg": JPEG, "extra/e.jpg": JPEG})
    prepare(str(source), tmp_path / "dest", progress=False)
    for split in ("test", "extra"):
        index = open_index(tmp_path / "dest", split)
        assert (index.labels.tolist(), index.class_names, index.read(0)) == ([-1], ["cat", "dog"], JPEG)


def test_names_that_are_not_utf_8_are_kept(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    make_folder(tmp_path / "s", {f"train/{name}/{name}.jpg": JPEG, "train/dog/a.jpg": JPEG})
    prepare(str(tmp_path / "s"), tmp_path / "dest", progress=False)
    for _ in range(2):
        index = open_index(tmp_path / "dest", "train")
        assert (sorted(index.class_names), [index.read(i) for i in range(2)]) == ([name, "dog"], [JPEG, JPEG])
        (tmp_path / "dest/train.index").unlink(missing_ok=True)  # the second time, the index is built from the tars


def test_an_interrupted_run_keeps_its_completed_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, dest = source_folder(tmp_path / "s"), tmp_path / "dest"
    prepare(str(source), tmp_path / "unbroken", progress=False)
    write = module.write_shards

    def write_or_end(*args, **options):
        if options["split"] == "val":
            raise KeyboardInterrupt
        return write(*args, **options)

    monkeypatch.setattr(module, "write_shards", write_or_end)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), dest, progress=False)
    assert "the same command continues with them" in caplog.text
    assert not dest.exists()
    written: list[str] = []

    def write_and_note(*args, **options):
        written.append(options["split"])
        return write(*args, **options)

    monkeypatch.setattr(module, "write_shards", write_and_note)
    prepare(str(source), dest, progress=False)
    assert written == ["val"]
    assert {p.name: p.read_bytes() for p in dest.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "unbroken").iterdir()
    }


def test_a_completed_split_is_rewritten_if_settings_or_images_changed(tmp_path: Path, monkeypatch) -> None:
    source, dest = source_folder(tmp_path / "s"), tmp_path / "dest"
    monkeypatch.setattr(
        module, "write_text", lambda path, text: path.write_text(text) if "dataset" not in path.name else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        prepare(str(source), dest, progress=False)
    monkeypatch.undo()
    (source / "train/cat/0.jpg").unlink()
    prepare(str(source), dest, images_per_shard=2, progress=False)
    assert len(open_index(dest, "train")) == 7
    assert len(members(dest, "train")) == 14


def test_two_runs_into_one_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = source_folder(tmp_path / "s"), tmp_path / "dest"
    write = module.write_shards

    def start_another(*args, **options):
        with pytest.raises(InputError, match="dest: another `wmse prepare` is writing it"):
            prepare(str(source), dest, progress=False)
        return write(*args, **options)

    monkeypatch.setattr(module, "write_shards", start_another)
    prepare(str(source), dest, progress=False)
    assert len(open_index(dest, "train")) == 8


def test_images_beyond_the_limits_of_training_are_skipped_and_named(tmp_path: Path) -> None:
    header = struct.pack(">IIBBBBB", 13_000, 13_000, 1, 0, 0, 0, 0)
    bomb = png_chunks((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    make_folder(tmp_path / "s", {"train/cat/a.jpg": JPEG, "train/cat/b.png": bomb})
    prepare(str(tmp_path / "s"), tmp_path / "dest", progress=False)
    assert (tmp_path / "dest/train.skipped.txt").read_text().startswith("cat/b.png\thas 13000x13000 pixels")
    assert check_data(tmp_path / "dest").bad == []
