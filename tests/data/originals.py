"""Tiny data sets in the exact layouts of the downloads: CIFAR, STL-10, Fashion-MNIST, ImageNet and Tiny ImageNet."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
from pictures import encoded, image, make_folder, make_tar


class Python2Pickler(pickle._Pickler):
    """Writes texts as Python 2 did, the program that wrote CIFAR's files: as strings of bytes."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_bytes(self, text: str | bytes) -> None:
        data = text.encode("latin1") if isinstance(text, str) else text
        self.write(b"T" + struct.pack("<i", len(data)) + data)

    dispatch[str] = save_bytes
    dispatch[bytes] = save_bytes


def python2_pickle(content: object) -> bytes:
    """Return a pickle of protocol 2 that refers to numpy by the module names of that time."""
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2, fix_imports=False).dump(content)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def colours(count: int, side: int, seed: int) -> np.ndarray:
    """Return random images, (count, side, side, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def planes(images: np.ndarray) -> np.ndarray:
    """Return images as CIFAR stores them: a red, a green and a blue plane, row by row, (n, 3072)."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


CIFAR10_IMAGES = colours(12, 32, 0)  # two for each of the five training files and the test file
CIFAR10_LABELS = [3, 8, 0, 6, 1, 9, 2, 7, 5, 4, 9, 0]
CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR10_FILES = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
CIFAR100_IMAGES = colours(5, 32, 1)  # three for training, two to test
CIFAR100_FINE = [19, 99, 0, 49, 33]
CIFAR100_COARSE = [11, 13, 4, 10, 17]
CIFAR100_NAMES = [f"fine {number}" for number in range(100)]


def cifar10_python() -> dict[str, bytes]:
    meta = {"num_cases_per_batch": 2, "label_names": CIFAR10_NAMES, "num_vis": 3072}
    files = {"batches.meta": python2_pickle(meta), "readme.html": b"<html>"}
    for number, name in enumerate(CIFAR10_FILES):
        part = slice(2 * number, 2 * number + 2)
        batch = {
            "batch_label": f"training batch {number + 1} of 5",
            "labels": CIFAR10_LABELS[part],
            "data": planes(CIFAR10_IMAGES[part]),
            "filenames": ["a_s_000004.png", "b_s_000005.png"],
        }
        files[name] = python2_pickle(batch)
    return {f"cifar-10-batches-py/{name}": data for name, data in files.items()}


def cifar10_binary() -> dict[str, bytes]:
    files = {"batches.meta.txt": "".join(f"{name}\n" for name in CIFAR10_NAMES).encode() + b"\n"}
    records = np.column_stack([np.array(CIFAR10_LABELS, np.uint8), planes(CIFAR10_IMAGES)])
    for number, name in enumerate(CIFAR10_FILES):
        files[f"{name}.bin"] = records[2 * number : 2 * number + 2].tobytes()
    return {f"cifar-10-batches-bin/{name}": data for name, data in files.items()}


def cifar100_python() -> dict[str, bytes]:
    files = {"meta": python2_pickle({"fine_label_names": CIFAR100_NAMES, "coarse_label_names": ["c"] * 20})}
    for name, part in (("train", slice(3)), ("test", slice(3, 5))):
        batch = {
            "filenames": ["x_s_000001.png"] * len(CIFAR100_FINE[part]),
            "batch_label": f"{name}ing batch 1 of 1",
            "fine_labels": CIFAR100_FINE[part],
            "coarse_labels": CIFAR100_COARSE[part],
            "data": planes(CIFAR100_IMAGES[part]),
        }
        files[name] = python2_pickle(batch)
    return {f"cifar-100-python/{name}": data for name, data in files.items()}


def cifar100_binary() -> dict[str, bytes]:
    columns = [np.array(CIFAR100_COARSE, np.uint8), np.array(CIFAR100_FINE, np.uint8), planes(CIFAR100_IMAGES)]
    records = np.column_stack(columns)
    files = {
        "train.bin": records[:3].tobytes(),
        "test.bin": records[3:].tobytes(),
        "fine_label_names.txt": "\n".join(CIFAR100_NAMES).encode(),
        "coarse_label_names.txt": b"c\n" * 20,
    }
    return {f"cifar-100-binary/{name}": data for name, data in files.items()}


STL10_IMAGES = {"train": colours(3, 96, 2), "test": colours(2, 96, 3), "unlabeled": colours(4, 96, 4)}
STL10_LABELS = {"train": [1, 9, 0], "test": [5, 0]}
STL10_NAMES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]


def stl10() -> dict[str, bytes]:
    """Return the files of stl10_binary/: channels first, each of them column by column, and labels that begin at 1."""
    files = {"class_names.txt": "\n".join(STL10_NAMES).encode() + b"\n", "fold_indices.txt": b"0 1 2\n"}
    for part, images in STL10_IMAGES.items():
        files[f"{part}_X.bin"] = images.transpose(0, 3, 2, 1).tobytes()
    for part, labels in STL10_LABELS.items():
        files[f"{part}_y.bin"] = bytes(label + 1 for label in labels)
    return {f"stl10_binary/{name}": data for name, data in files.items()}


FASHION_IMAGES = colours(5, 28, 5)[..., 0]
FASHION_LABELS = [9, 0, 3, 7, 2]


def fashion_mnist(compressed: bool = True) -> dict[str, bytes]:
    files = {}
    for stem, part in (("train", slice(3)), ("t10k", slice(3, 5))):
        images = FASHION_IMAGES[part]
        labels = FASHION_LABELS[part]
        header = struct.pack(">4I", 2051, len(images), 28, 28)
        files[f"{stem}-images-idx3-ubyte"] = header + images.tobytes()
        files[f"{stem}-labels-idx1-ubyte"] = struct.pack(">2I", 2049, len(labels)) + bytes(labels)
    return {f"{name}.gz": gzip.compress(data) for name, data in files.items()} if compressed else files


def make_archive(path: Path, files: dict[str, bytes]) -> Path:
    """Write a .tar.gz of these files, with an entry for their folder as in the originals."""
    folder = next(iter(files)).partition("/")[0]
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo(folder)
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


# The order of the numbers ILSVRC2012_ID is not that of the WNIDs.
WNIDS = {1: "n02119789", 2: "n01440764", 3: "n02100735"}
IMAGENET_VAL_IDS = [2, 3, 1, 2]


def jpeg(seed: int) -> bytes:
    return encoded("JPEG", image(seed=seed))


def imagenet_train_images() -> dict[str, dict[str, bytes]]:
    """Return WNID -> file name -> bytes; one image of each class is of another kind than the rest."""
    found = {}
    for number, wnid in WNIDS.items():
        files = {f"{wnid}_{i}.JPEG": jpeg(10 * number + i) for i in (10, 2, 33)}
        found[wnid] = files
    return found


def imagenet_train_tar(path: Path) -> Path:
    """Write a tar of the tars of the classes, each padded as GNU tar does it."""
    members = []
    for wnid, files in imagenet_train_images().items():
        inner = make_tar(path.with_name("inner"), list(files.items()))
        members.append((f"{wnid}.tar", inner.read_bytes()))
        inner.unlink()
    return make_tar(path, members)


def imagenet_val_images() -> list[bytes]:
    return [jpeg(100 + i) for i in range(len(IMAGENET_VAL_IDS))]


def imagenet_val_tar(path: Path) -> Path:
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, len(IMAGENET_VAL_IDS) + 1)]
    members = list(zip(names, imagenet_val_images(), strict=True))
    return make_tar(path, members[::-1])


def imagenet_devkit(path: Path, meta: bytes) -> Path:
    ids = "".join(f"{number}\n" for number in IMAGENET_VAL_IDS).encode()
    data = "ILSVRC2012_devkit_t12/data"
    return make_archive(
        path,
        {f"{data}/meta.mat": meta, f"{data}/ILSVRC2012_validation_ground_truth.txt": ids, f"{data}/x.txt": b"x"},
    )


TINY_WNIDS = ["n02124075", "n04067472", "n01443537"]


def tiny_imagenet(root: Path) -> Path:
    """Write ROOT/tiny-imagenet-200 with three classes; return that folder."""
    files = {"wnids.txt": "\n".join(TINY_WNIDS).encode() + b"\n", "words.txt": b"n02124075\tEgyptian cat\n"}
    for number, wnid in enumerate(TINY_WNIDS):
        for i in range(2):
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = jpeg(10 * number + i)
        files[f"train/{wnid}/{wnid}_boxes.txt"] = f"{wnid}_0.JPEG\t0\t0\t62\t62\n".encode()
    lines = []
    for i, wnid in enumerate([TINY_WNIDS[1], TINY_WNIDS[2], TINY_WNIDS[0], TINY_WNIDS[2]]):
        files[f"val/images/val_{i}.JPEG"] = jpeg(50 + i)
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    files["val/val_annotations.txt"] = "".join(lines).encode()
    files |= {f"test/images/test_{i}.JPEG": jpeg(70 + i) for i in range(2)}
    return make_folder(root / "tiny-imagenet-200", files)
