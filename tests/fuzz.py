"""Damages tar shards and images at random and checks that no image is lost silently and that none ends a run.

    python -m tests.fuzz [--shards N] [--images N] [--seed S] [--out FILE.json]

Shards: check-data is compared with GNU tar and Python's tarfile. Images: check-data, training without and with the decode
cache, and evaluation must agree on which images are unusable. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.conftest import ROOT, TINY
from trainer.data.index import open_index
from trainer.data.verify import check_data
from trainer.run.machine import provenance

SAMPLES, SOUND_SHARE, STEP = 12, 0.3, 16
Contents = dict[str, bytes]


def picture(rng: random.Random, mode: str = "RGB") -> Image.Image:
    """Return a smooth image of random size, in this mode of Pillow."""
    small = Image.frombytes("RGB", (6, 5), rng.randbytes(90))
    return small.resize((rng.randrange(40, 160), rng.randrange(40, 160)), Image.Resampling.BICUBIC).convert(mode)


KINDS: list[tuple[str, str, dict[str, object]]] = [
    ("JPEG", "RGB", {"quality": 90}),
    ("JPEG", "RGB", {"progressive": True}),
    ("JPEG", "L", {}),
    ("JPEG", "CMYK", {}),
    ("JPEG", "RGB", {"restart_marker_blocks": 4, "subsampling": 2}),
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "L", {}),
    ("PNG", "P", {"transparency": 0}),
    ("PNG", "I;16", {}),
    ("WEBP", "RGB", {}),
    ("GIF", "P", {}),
    ("BMP", "RGB", {}),
    ("TIFF", "RGB", {"compression": "tiff_lzw"}),
]


def encode(rng: random.Random, kind: tuple[str, str, dict[str, object]]) -> bytes:
    """Return a random image as the bytes of a file. kind: an entry of KINDS (format, mode, options)."""
    format_name, mode, options = kind
    shown = picture(rng, "L" if mode == "I;16" else mode)
    if mode == "I;16":
        shown = Image.fromarray(np.asarray(shown).astype(np.uint16) * 257)
    file = io.BytesIO()
    shown.save(file, format_name, **options)  # type: ignore[arg-type]
    return file.getvalue()


# --- damage of files ---


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def cut_at_a_block(rng: random.Random, data: bytes) -> bytes:
    return data[: 512 * rng.randrange(len(data) // 512)]


def zero_blocks(rng: random.Random, data: bytes) -> bytes:
    start = 512 * rng.randrange(len(data) // 512)
    length = 512 * rng.choice((1, 1, 2, 8, 64))
    return data[:start] + bytes(min(length, len(data) - start)) + data[start + length :]


def zero_tail(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + bytes(len(data) - start)


def join(rng: random.Random, data: bytes) -> bytes:
    return data + (data if rng.random() < 0.5 else cut(rng, data))


def set_bytes(rng: random.Random, data: bytes) -> bytes:
    """Overwrite some bytes, half of them in the first 400 bytes, where the headers are."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 4))):
        changed[rng.randrange(min(400, len(data)) if rng.random() < 0.5 else len(data))] = rng.choice(
            (0, 1, 127, 128, 255, rng.randrange(256))
        )
    return bytes(changed)


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    extra = rng.choice(
        (b"\xff\xd9", b"\xff\xda\0\2", b"\xff\xc4\0\2", b"\xff\xfe\0\4ab", rng.randbytes(rng.randrange(1, 40)))
    )
    return data[:at] + extra + data[at:]


def drop(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 60) :]


def repeat(rng: random.Random, data: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:b] + data[a:b] * rng.randrange(1, 4) + data[b:]


SHARD_DAMAGE = (flip_bits, cut, cut_at_a_block, zero_blocks, zero_tail, join)
IMAGE_DAMAGE = (flip_bits, set_bytes, cut, insert, drop, repeat, zero_tail)


# --- shards ---


def make_shard(rng: random.Random) -> tuple[bytes, Contents]:
    """Return a shard of images with labels, and its members."""
    contents: Contents = {}
    for i in range(SAMPLES):
        kind = rng.choice(KINDS[:3] + KINDS[5:8])
        contents[f"k{i:03d}.{kind[0].lower()}"] = encode(rng, kind)
        contents[f"k{i:03d}.cls"] = str(i % 3).encode()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue(), contents


def read_by_gnu_tar(shard: Path) -> Contents | None:
    """Return the members that GNU tar extracts; None if it reports an error."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["tar", "-xf", shard, "-C", folder], capture_output=True, check=False, timeout=60)
        if done.returncode or done.stderr:
            return None
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def read_by_tarfile(shard: Path) -> Contents | None:
    """Return the members that Python's tarfile reads; None if it raises."""
    try:
        with tarfile.open(shard) as tar:
            return {m.name: tar.extractfile(m).read() for m in tar if m.isreg()}  # type: ignore[union-attr]
    except Exception:  # any error counts
        return None


def read_by_this_program(shard: Path) -> Contents | None:
    """Return images and labels as training reads them; None if check-data reports a problem."""
    report = check_data(shard.parent, threads=2)
    if report.bad or report.notes:
        return None
    index = open_index(shard.parent, "train")
    found: Contents = {}
    for i in range(len(index)):
        name = index.name(i).rpartition("/")[2]
        found[name] = index.read(i)
        found[name.rpartition(".")[0] + ".cls"] = str(index.labels[i]).encode()
    return found


READERS: dict[str, Callable[[Path], Contents | None]] = {
    "GNU tar": read_by_gnu_tar,
    "Python's tarfile": read_by_tarfile,
    "wmse check-data": read_by_this_program,
}


def judge(found: Contents | None, contents: Contents) -> str:
    """Return the verdict on what a reader made of a damaged shard."""
    if found is None:
        return "named"
    if set(contents) - set(found):
        return "members lost silently"
    if any(found[name] != data for name, data in contents.items()):
        return "bytes of a member changed silently"
    return "all read"


def fuzz_shards(count: int, rng: random.Random) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Damage `count` shards. Return the number of each verdict by reader, and the checks that failed."""
    table = {name: Counter[str]() for name in READERS}
    broken = []
    for number in range(count):
        whole, contents = make_shard(rng)
        damage = SHARD_DAMAGE[number % len(SHARD_DAMAGE)]
        with tempfile.TemporaryDirectory() as folder:
            shard = Path(folder, "train-000000.tar")
            shard.write_bytes(damage(rng, whole))
            for name, read in READERS.items():
                verdict = judge(read(shard), contents)
                table[name][verdict] += 1
                if read is read_by_this_program and verdict.startswith("members lost"):
                    broken.append(f"shard {number} ({damage.__name__}): {verdict}")
    return {name: dict(counts) for name, counts in table.items()}, broken


# --- images ---


def make_images(folder: Path, count: int, rng: random.Random) -> None:
    """Write `count` images of two classes, most of them damaged."""
    for i in range(count):
        kind = rng.choice(KINDS)
        data = encode(rng, kind)
        if rng.random() > SOUND_SHARE:
            data = rng.choice(IMAGE_DAMAGE)(rng, data) or b"\0"
        path = folder / f"train/c{i % 2}/{i:05d}.{kind[0].lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def wmse(*arguments: object) -> tuple[int, str]:
    """Run `wmse ARGUMENTS` and return the exit code and the output."""
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=3600)
    return done.returncode, done.stdout + done.stderr


def numbers(names: list[str]) -> set[int]:
    """Return the numbers of the images that these lines name."""
    return {int(found[0]) for name in names if (found := re.findall(r"\b(\d{5})\.", name))}


def fuzz_images(count: int, rng: random.Random, folder: Path) -> tuple[dict[str, object], list[str]]:
    """Damage images and run all commands on them. Return the result and the checks that failed."""
    make_images(folder / "set", count, rng)
    (folder / "tiny.yaml").write_text(TINY)
    common = ("--config", folder / "tiny.yaml", "--data.root", folder / "set", "--data.max_skipped_share", 1)
    common = (*common, "--optimizer.epochs", 2, "--data.images_per_step", STEP)
    codes, outputs, seconds = {}, {}, {}
    commands: dict[str, tuple[object, ...]] = {
        "check-data": ("check-data", folder / "set"),
        "pretrain": ("pretrain", *common, "--run_dir", folder / "plain"),
        "pretrain with the decode cache": (
            *("pretrain", *common, "--run_dir", folder / "cached", "--data.decode_cache_gib", 2),
        ),
        "knn": ("knn", "--run_dir", folder / "plain", "--data.test_split", "train"),
    }
    for name, arguments in commands.items():
        began = time.monotonic()
        codes[name], outputs[name] = wmse(*arguments)
        seconds[name] = round(time.monotonic() - began, 1)
    listed = numbers((folder / "set/.wmse_index/train.skipped.txt").read_text().splitlines())
    bad = {"check-data": numbers([line for line in outputs["check-data"].splitlines() if line.startswith("train/")])}
    for name, run in (("pretrain", "plain"), ("pretrain with the decode cache", "cached")):
        lines = (folder / run / "quarantine.jsonl").read_text().splitlines()
        bad[name] = listed | numbers([json.loads(line)["image"] for line in lines])
    losses = [
        [json.loads(line)["loss"] for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("plain", "cached")
    ]
    broken = [
        f"{name}: exit code {code}\n{outputs[name][-2000:]}"
        for name, code in codes.items()
        if code != (name == "check-data")
    ]
    # an epoch does not show the images beyond its last whole step; two epochs together show nearly all
    broken += [
        f"{name} skipped images that check-data accepts: {sorted(found - bad['check-data'])}"
        for name, found in bad.items()
        if found - bad["check-data"]
    ]
    missed = bad["check-data"] - bad["pretrain"]
    broken += [f"pretrain did not name {sorted(missed)}"] if len(missed) > STEP else []
    broken += ["the decode cache changed the losses"] if losses[0] != losses[1] else []
    return {
        "images": count,
        "bad": {name: len(found) for name, found in bad.items()},
        "exit codes": codes,
        "seconds": seconds,
    }, broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shards, broken = fuzz_shards(options.shards, random.Random(options.seed))
    with tempfile.TemporaryDirectory() as folder:
        images, more = fuzz_images(options.images, random.Random(options.seed + 1), Path(folder))
    result = {
        "seed": options.seed,
        "shards": shards,
        "images": images,
        "broken": broken + more,
        **provenance(torch.device("cpu")),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
