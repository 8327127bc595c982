"""wmse prepare reads data sets in the layout of their download: folders, and archives that it does not unpack."""

import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import originals
import pytest
from originals import make_archive
from pictures import encoded, make_folder, make_tar
from PIL import Image

from trainer.cli import main
from trainer.data.array_split import ArraySplit
from trainer.data.index import Index, open_index
from trainer.data.prepare import prepare
from trainer.data.verify import check_data
from trainer.errors import InputError

# Layout -> its archive, its files, and what is in them: split -> (images, labels), and the class names.
ARRAY_SETS = {
    "cifar10 python": ("cifar-10-python.tar.gz", originals.cifar10_python),
    "cifar10 binary": ("cifar-10-binary.tar.gz", originals.cifar10_binary),
    "cifar100 python": ("cifar-100-python.tar.gz", originals.cifar100_python),
    "cifar100 binary": ("cifar-100-binary.tar.gz", originals.cifar100_binary),
    "stl10": ("stl10_binary.tar.gz", originals.stl10),
}


def expected(layout: str) -> tuple[dict[str, tuple[np.ndarray, list[int]]], list[str]]:
    if layout.startswith("cifar100"):
        images, labels = originals.CIFAR100_IMAGES, originals.CIFAR100_FINE
        return {"train": (images[:3], labels[:3]), "test": (images[3:], labels[3:])}, originals.CIFAR100_NAMES
    if layout.startswith("cifar10"):
        images, labels = originals.CIFAR10_IMAGES, originals.CIFAR10_LABELS
        return {"train": (images[:10], labels[:10]), "test": (images[10:], labels[10:])}, originals.CIFAR10_NAMES
    parts, labels = originals.STL10_IMAGES, originals.STL10_LABELS
    joined = np.concatenate([parts["train"], parts["unlabeled"]])
    splits = {split: (parts[split], labels[split]) for split in ("train", "test")}
    return splits | {"train+unlabeled": (joined, labels["train"] + [-1] * 4)}, originals.STL10_NAMES


def check_split(index: Index, images: np.ndarray, labels: list[int], class_names: list[str]) -> None:
    """Check that an index holds exactly these images with their labels, in any order."""
    assert index.class_names == class_names
    found = []
    for i in range(len(index)):
        pixels = np.asarray(Image.open(io.BytesIO(index.read(i))))
        found.append((int(index.labels[i]), pixels.shape, pixels.tobytes()))
    wanted = [(label, pixels.shape, pixels.tobytes()) for label, pixels in zip(labels, images, strict=True)]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("form", ["folder", "parent", "archive", "folder of the archive"])
@pytest.mark.parametrize("layout", ARRAY_SETS)
def test_a_download_is_prepared_with_pixels_labels_and_class_names(tmp_path: Path, layout: str, form: str) -> None:
    archive, make_files = ARRAY_SETS[layout]
    files = make_files()
    source = tmp_path / "downloads"
    source.mkdir()
    if "archive" in form:
        make_archive(source / archive, files)
        source = source / archive if form == "archive" else source
    else:
        make_folder(source, files)
        source = source / next(iter(files)).partition("/")[0] if form == "folder" else source
    prepare(str(source), tmp_path / "dest", progress=False)
    splits, class_names = expected(layout)
    description = json.loads((tmp_path / "dest/dataset.json").read_text())
    assert description["class_names"] == class_names
    assert description["images"] == {split: len(labels) for split, (_, labels) in splits.items()}
    for split, (images, labels) in splits.items():
        check_split(open_index(tmp_path / "dest", split), images, labels, class_names)
    # nothing is left of the archive, neither beside it nor in the prepared set
    assert not list(tmp_path.rglob("*.bin")) or "archive" not in form
    assert not (tmp_path / "downloads/.wmse_index").exists()
    assert {path.suffix for path in (tmp_path / "dest").iterdir()} == {".tar", ".index", ".json"}


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("folder", ["", "FashionMNIST/raw/"])
def test_fashion_mnist_is_prepared_from_its_four_files(tmp_path: Path, compressed: bool, folder: str) -> None:
    files = originals.fashion_mnist(compressed)
    make_folder(tmp_path / "s", {folder + name: data for name, data in files.items()})
    prepare(str(tmp_path / "s"), tmp_path / "dest", progress=False)
    names = open_index(tmp_path / "dest", "test").class_names
    assert (names[9], names[0]) == ("Ankle boot", "T-shirt/top")
    images, labels = originals.FASHION_IMAGES, originals.FASHION_LABELS
    check_split(open_index(tmp_path / "dest", "train"), images[:3], labels[:3], names)
    check_split(open_index(tmp_path / "dest", "test"), images[3:], labels[3:], names)


def test_stl10_without_its_unlabelled_images_has_two_splits(tmp_path: Path) -> None:
    files = {name: data for name, data in originals.stl10().items() if "unlabeled" not in name}
    prepare(str(make_folder(tmp_path / "s", files)), tmp_path / "dest", progress=False)
    assert json.loads((tmp_path / "dest/dataset.json").read_text())["images"] == {"train": 3, "test": 2}


def test_the_pixels_of_stl10_stay_on_the_disk(tmp_path: Path) -> None:
    """The unlabelled images take 2.7 GB: they are a mapping of the file, which is hashed and read in pieces."""
    from trainer.data.stl10 import open_split

    make_folder(tmp_path, originals.stl10())
    with (tmp_path / "stl10_binary/unlabeled_X.bin").open("r+b") as file:
        file.truncate(100_000 * 3 * 96 * 96)  # a sparse file, which takes no space on the disk
    images = open_split(tmp_path / "stl10_binary", "train+unlabeled", tmp_path)
    assert (len(images), images.labels.tolist()[:4]) == (100_003, [1, 9, 0, -1])
    base = images._parts[1].images
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
    pixels = np.asarray(Image.open(io.BytesIO(images.read(4))))
    np.testing.assert_array_equal(pixels, originals.STL10_IMAGES["unlabeled"][1])


def test_fingerprints_of_arrays_depend_on_pixels_labels_and_names() -> None:
    images = np.zeros((1500, 2, 2), np.uint8)
    other = images.copy()
    other[1400, 1, 1] = 1
    labels = np.zeros(1500, np.int32)
    splits = [ArraySplit(images, labels, ["a"]), ArraySplit(other, labels, ["a"]), ArraySplit(images, labels, ["b"])]
    splits.append(ArraySplit(images, labels - 1, ["a"]))
    assert len({split.fingerprint for split in splits}) == 4
    assert splits[0].fingerprint == ArraySplit(images.copy(), labels, ["a"]).fingerprint


class Harmful:
    """Runs a program when it is unpickled by a reader that allows it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("harm",)


def test_a_pickle_cannot_run_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = originals.cifar10_python()
    files["cifar-10-batches-py/data_batch_3"] = pickle.dumps({"data": Harmful(), "labels": [1]}, protocol=2)
    make_folder(tmp_path / "s", files)
    with pytest.raises(InputError, match=r"data_batch_3 cannot be read as a file of CIFAR: it refers to posix.mkdir"):
        prepare(str(tmp_path / "s"), tmp_path / "dest", progress=False)
    assert not (tmp_path / "harm").exists()


def drop(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


def cut(name: str, nbytes: int = 5) -> Callable[[Path], None]:
    return lambda root: os.truncate(root / name, (root / name).stat().st_size - nbytes)


def relabel(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        data = bytearray((root / name).read_bytes())
        data[0] = 200
        (root / name).write_bytes(data)

    return change


def write(name: str, data: bytes) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / name).write_bytes(data)

    return change


@pytest.mark.parametrize(
    ("make_files", "damage", "message"),
    [
        (
            originals.cifar10_python,
            write("cifar-10-batches-py/batches.meta", originals.python2_pickle({"label_names": 5})),
            "batches.meta holds no list of label_names",
        ),
        (originals.cifar10_python, drop("cifar-10-batches-py/data_batch_4"), "data_batch_4 is missing"),
        (originals.cifar10_python, cut("cifar-10-batches-py/data_batch_4"), "data_batch_4 cannot be read"),
        (originals.cifar10_binary, cut("cifar-10-batches-bin/test_batch.bin"), "test_batch.bin has 6141 bytes, not a"),
        (
            originals.cifar10_binary,
            relabel("cifar-10-batches-bin/test_batch.bin"),
            "labels from 0 to 200, but 10 class",
        ),
        (originals.stl10, drop("stl10_binary/train_y.bin"), "train_y.bin is missing"),
        (originals.stl10, cut("stl10_binary/unlabeled_X.bin"), "unlabeled_X.bin has 110587 bytes"),
        (originals.stl10, cut("stl10_binary/test_y.bin", 1), "test_X.bin has 2 images, but test_y.bin 1 labels"),
        (originals.fashion_mnist, cut("t10k-labels-idx1-ubyte.gz"), "t10k-labels-idx1-ubyte.gz: damaged or cut off"),
        (originals.fashion_mnist, drop("t10k-labels-idx1-ubyte.gz"), "t10k-labels-idx1-ubyte.gz is missing"),
        (lambda: originals.fashion_mnist(False), cut("train-images-idx3-ubyte"), "no IDX file of bytes, or cut off"),
    ],
)
def test_a_damaged_download_is_refused_and_named(
    tmp_path: Path, make_files: Callable[[], dict[str, bytes]], damage: Callable[[Path], None], message: str
) -> None:
    source = make_folder(tmp_path / "s", make_files())
    damage(source)
    with pytest.raises(InputError, match=message) as error:
        prepare(str(source), tmp_path / "dest", progress=False)
    assert str(source) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "cifar-10-python.tar.gz", originals.cifar10_python())
    os.truncate(archive, 3000)
    with pytest.raises(InputError, match=r"cifar-10-python.tar.gz: damaged or cut off"):
        prepare(str(archive), tmp_path / "dest", progress=False)


def test_what_is_recognised_is_listed_in_help_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for source in (tmp_path, tmp_path / "notes.txt", tmp_path / "nowhere"):
        with pytest.raises(InputError) as error:
            prepare(str(source), tmp_path / "dest", progress=False)
        for text in ("cifar-10-python.tar.gz", "ILSVRC2012_img_train.tar", "tiny-imagenet-200", "SPLIT/CLASS/IMAGE"):
            assert text in str(error.value)
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    shown = capsys.readouterr().out
    assert "stl10_binary.tar.gz" in shown
    assert "fashion-mnist, cifar10, cifar100, stl10" in shown


def test_a_folder_with_several_downloads_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "s", originals.cifar10_python() | originals.cifar100_binary())
    with pytest.raises(
        InputError, match=r"several data sets: give one of them: .*cifar-10-batches-py, .*cifar-100-bin"
    ):
        prepare(str(tmp_path / "s"), tmp_path / "dest", progress=False)
    # the archive beside its own folder is the same set
    source = make_folder(tmp_path / "t", originals.cifar10_python())
    make_archive(source / "cifar-10-python.tar.gz", originals.cifar10_python())
    prepare(str(source), tmp_path / "dest", progress=False)


# --- ImageNet ---


def meta_mat() -> bytes:
    """Return a meta.mat with three classes and two synsets above them, as scipy writes it."""
    scipy_io = pytest.importorskip("scipy.io")
    rows = [(number, wnid, f"words {wnid}", 0) for number, wnid in originals.WNIDS.items()]
    rows += [(1001, "n00001740", "entity", 2), (1002, "n00001930", "physical entity", 3)]
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height"]
    synsets = np.zeros((len(rows), 1), [(name, object) for name in [*fields, "num_train_images"]])
    for row, (number, wnid, words, num_children) in enumerate(rows):
        children = np.arange(num_children, dtype=np.uint16)
        synsets[row, 0] = (float(number), wnid, words, "gloss", float(num_children), children, 0.0, 1300.0)
    buffer = io.BytesIO()
    scipy_io.savemat(buffer, {"synsets": synsets})
    return buffer.getvalue()


def imagenet(root: Path, train: bool = True, val: bool = True) -> Path:
    root.mkdir()
    if train:
        originals.imagenet_train_tar(root / "ILSVRC2012_img_train.tar")
    if val:
        originals.imagenet_val_tar(root / "ILSVRC2012_img_val.tar")
        originals.imagenet_devkit(root / "ILSVRC2012_devkit_t12.tar.gz", meta_mat())
    return root


def check_imagenet(dest: Path, split: str, classes: list[str]) -> None:
    index = open_index(dest, split)
    found = sorted((index.class_names[index.labels[i]], index.read(i)) for i in range(len(index)))
    wanted = [(wnid, data) for wnid, files in originals.imagenet_train_images().items() for data in files.values()]
    if split == "val":
        wnids = [originals.WNIDS[number] for number in originals.IMAGENET_VAL_IDS]
        wanted = list(zip(wnids, originals.imagenet_val_images(), strict=True))
    assert index.class_names == sorted(classes)
    assert found == sorted((wnid, data) for wnid, data in wanted if wnid in classes)


WNIDS = list(originals.WNIDS.values())


def test_imagenet_is_prepared_from_its_tars(tmp_path: Path) -> None:
    prepare(str(imagenet(tmp_path / "s")), tmp_path / "dest", progress=False)
    for split in ("train", "val"):
        check_imagenet(tmp_path / "dest", split, WNIDS)
    names = open_index(tmp_path / "dest", "train").name(0)
    assert names.startswith("train-000000.tar/n0")
    assert json.loads((tmp_path / "dest/dataset.json").read_text())["class_names"] == sorted(WNIDS)
    assert len(list(tmp_path.rglob("*"))) == 2 + 3 + 5, "something was unpacked"


@pytest.mark.parametrize("split", ["train", "val"])
def test_one_tar_of_imagenet_is_enough(tmp_path: Path, split: str) -> None:
    prepare(str(imagenet(tmp_path / "s", split == "train", split == "val")), tmp_path / "dest", progress=False)
    check_imagenet(tmp_path / "dest", split, WNIDS)
    assert [path.name for path in (tmp_path / "dest").glob("*.index")] == [f"{split}.index"]


def test_a_list_of_classes_applies_to_imagenets_tars(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{WNIDS[2]}  a dog\n{WNIDS[1]}\n")
    prepare(str(imagenet(tmp_path / "s")), tmp_path / "dest", classes=tmp_path / "list.txt", progress=False)
    for split in ("train", "val"):
        check_imagenet(tmp_path / "dest", split, WNIDS[1:])


def test_images_of_imagenet_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    source = tmp_path / "s"
    good, bad = originals.jpeg(0), originals.jpeg(1)[:-30]
    inner = make_tar(tmp_path / "inner", [("n01440764_1.JPEG", good), ("n01440764_2.JPEG", bad)])
    make_tar(source / "ILSVRC2012_img_train.tar", [("n01440764.tar", inner.read_bytes())])
    prepare(str(source), tmp_path / "dest", progress=False)
    assert (tmp_path / "dest/train.skipped.txt").read_text().startswith("n01440764/n01440764_2.JPEG\t")
    assert len(open_index(tmp_path / "dest", "train")) == 1


def test_val_of_imagenet_needs_the_devkit_and_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = imagenet(tmp_path / "s")
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "scipy.io", None)
        with pytest.raises(InputError, match="needs the package scipy: pip install scipy"):
            prepare(str(source), tmp_path / "dest", progress=False)
    (source / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    with pytest.raises(InputError, match=r"ILSVRC2012_img_val.tar: its labels are in ILSVRC2012_devkit_t12.tar.gz"):
        prepare(str(source), tmp_path / "dest", progress=False)
    prepare(str(source), tmp_path / "dest", splits=["train"], progress=False)
    check_imagenet(tmp_path / "dest", "train", WNIDS)


def test_a_damaged_tar_of_imagenet_is_refused(tmp_path: Path) -> None:
    """A zeroed header inside a class's tar ends that tar for Python's reader, which would lose the images after it."""
    source = imagenet(tmp_path / "s", val=False)
    path = source / "ILSVRC2012_img_train.tar"
    data = bytearray(path.read_bytes())
    start = data.rindex(b"n01440764_2.JPEG")
    data[start : start + 512] = bytes(512)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"ILSVRC2012_img_train.tar: n01440764.tar: its members end at byte"):
        prepare(str(source), tmp_path / "dest", progress=False)
    os.truncate(path, 20_000)
    with pytest.raises(InputError, match=r"ILSVRC2012_img_train.tar: .*cut off"):
        prepare(str(source), tmp_path / "dest", progress=False)


def test_unpacked_folders_beside_imagenets_tars_count(tmp_path: Path) -> None:
    source = imagenet(tmp_path / "s", val=False)
    make_folder(source, {"train/n01440764/a.JPEG": originals.jpeg(0)})
    prepare(str(source), tmp_path / "dest", progress=False)
    assert len(open_index(tmp_path / "dest", "train")) == 1


# --- Tiny ImageNet ---


def tiny_labels(index: Index) -> dict[bytes, str]:
    return {index.read(i): index.class_names[index.labels[i]] for i in range(len(index))}


@pytest.mark.parametrize("prepared", [False, True])
def test_tiny_imagenet_has_labels_in_train_and_val(
    tmp_path: Path, prepared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = originals.tiny_imagenet(tmp_path)
    if prepared:
        prepare(str(tmp_path), tmp_path / "dest", progress=False)
        root = tmp_path / "dest"
        assert not list(root.glob("*.skipped.txt"))
    first, second, third = originals.TINY_WNIDS
    train = open_index(root, "train")
    assert train.class_names == sorted(originals.TINY_WNIDS)
    assert np.bincount(train.labels).tolist() == [2, 2, 2]
    val = open_index(root, "val")
    assert val.class_names == train.class_names
    assert tiny_labels(val) == {originals.jpeg(50 + i): wnid for i, wnid in enumerate([second, third, first, third])}
    test = open_index(root, "test")
    assert test.labels.tolist() == [-1, -1]
    assert "skipped" not in caplog.text
    report = check_data(root)
    assert (report.checked, report.bad) == (12, [])


def test_val_of_tiny_imagenet_alone_takes_its_classes_from_the_list(tmp_path: Path) -> None:
    root = originals.tiny_imagenet(tmp_path)
    (root / "train").rename(tmp_path / "elsewhere")
    val = open_index(root, "val")
    assert val.class_names == sorted(originals.TINY_WNIDS)
    assert val.name(0) == "images/val_0.JPEG"
    (root / "wnids.txt").unlink()
    for name, split in ((root, "val"), (root / "val", ".")):
        val = open_index(name, split)
        assert (val.class_names, len(val)) == (sorted(originals.TINY_WNIDS), 4)


def test_changed_annotations_give_a_new_index_and_broken_ones_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = originals.tiny_imagenet(tmp_path)
    before = open_index(root, "val").labels.tolist()
    path = root / "val/val_annotations.txt"
    path.write_text(path.read_text().replace("val_0.JPEG\tn04067472", "val_0.JPEG\tn02124075"))
    after = open_index(root, "val").labels.tolist()
    assert (before[0], after[0], before[1:]) == (2, 1, after[1:])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    assert len(open_index(root, "val")) == 3
    assert "1 files are skipped, because val_annotations.txt gives them no class" in caplog.text
    path.write_text("val_0.JPEG n02124075\n")
    with pytest.raises(InputError, match=r"val_annotations.txt, line 1: expected NAME<tab>CLASS"):
        open_index(root, "val")
    path.write_text("val_0.JPEG\tn99999999\n")
    with pytest.raises(InputError, match=r"4 files are skipped, because val_annotations.txt .* or delete it"):
        open_index(root, "val")
    path.write_text("\ufeffval_0.JPEG\tn02124075\n", encoding="utf-8")
    assert open_index(root, "val").name(0) == "images/val_0.JPEG"


def test_a_list_of_classes_applies_to_the_annotations(tmp_path: Path) -> None:
    root = originals.tiny_imagenet(tmp_path)
    (tmp_path / "list.txt").write_text(originals.TINY_WNIDS[2])
    prepare(str(root), tmp_path / "dest", splits=["train", "val"], classes=tmp_path / "list.txt", progress=False)
    assert [len(open_index(tmp_path / "dest", split)) for split in ("train", "val")] == [2, 2]


def test_val_that_was_sorted_into_class_folders_is_read_by_them(tmp_path: Path) -> None:
    root = originals.tiny_imagenet(tmp_path)
    make_folder(root, {f"val/{originals.TINY_WNIDS[0]}/images/val_9.JPEG": originals.jpeg(0)})
    assert tiny_labels(open_index(root, "val")) == {originals.jpeg(0): originals.TINY_WNIDS[0]}


# --- other image folders ---

JPEG = encoded("JPEG")


@pytest.mark.parametrize(
    ("names", "classes", "note"),
    [
        (["a.jpg", "b.PNG"], [], "all images below it become the split train, without labels"),
        (["a.jpg", "deep/er/b.jpg"], [], "all images below it become the split train, without labels"),
        (["cat/a.jpg", "dog/b.jpg"], ["cat", "dog"], "its 2 folders are classes and become the split train"),
    ],
)
def test_a_folder_without_splits_becomes_the_split_train(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], classes: list[str], note: str
) -> None:
    caplog.set_level("INFO")
    source = make_folder(tmp_path / "s", {name: originals.jpeg(i) for i, name in enumerate(names)})
    prepare(str(source), tmp_path / "dest", progress=False)
    index = open_index(tmp_path / "dest", "train")
    assert index.class_names == classes
    assert sorted(index.labels.tolist()) == ([0, 1] if classes else [-1, -1])
    assert {index.read(i) for i in range(2)} == {originals.jpeg(0), originals.jpeg(1)}
    assert note in caplog.text


def test_a_list_of_classes_applies_to_class_folders_without_splits(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "s", {"cat/a.jpg": JPEG, "dog/b.jpg": JPEG})
    (tmp_path / "list.txt").write_text("dog\n")
    prepare(str(source), tmp_path / "dest", classes=tmp_path / "list.txt", progress=False)
    assert open_index(tmp_path / "dest", "train").class_names == ["dog"]


def test_splits_of_other_names_are_prepared_and_named_in_errors(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "s", {"train/cat/a.jpg": JPEG, "valid/cat/b.jpg": JPEG})
    prepare(str(source), tmp_path / "dest", progress=False)
    for root in (source, tmp_path / "dest"):
        assert open_index(root, "valid").labels.tolist() == [0]
        with pytest.raises(
            InputError, match=r"no split 'val' in it .*Its splits are train, valid.*--data.test_split valid"
        ):
            open_index(root, "val")
