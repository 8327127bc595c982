"""Files of others run no code and write nothing outside of the cache, and a run opens no network connection.

Ruff's S rules (pyproject.toml) refuse most unsafe calls.
"""

import ast
import gzip
import io
import json
import os
import pickle
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from tests.conftest import ROOT, TINY, write_images
from trainer.cli import main
from trainer.config.loading import load_config
from trainer.data.index import Index, open_index
from trainer.data.index_file import _HEADER, MAGIC, VERSION, IndexContent, read_index, write_index
from trainer.data.loader import ViewLoader
from trainer.data.quarantine import drop_quarantine_after, read_quarantine
from trainer.errors import InputError
from trainer.run.checkpoint import load_checkpoint

# --- files that contain code ---


class Trap:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return the path that a trap creates, after checking that a trap works."""
    pickle.loads(pickle.dumps(Trap(tmp_path / "works")))  # noqa: S301 - tests the trap itself
    assert (tmp_path / "works").exists()
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_checkpoint_with_code_is_refused(mark: Path, tmp_path: Path) -> None:
    content = {"format": 1, "step": 1, "model": {"w": torch.zeros(2)}}
    for place in ("model", "step", "format", "extra"):
        torch.save({**content, place: Trap(mark)}, tmp_path / f"{place}.pt")
    torch.save(Trap(mark), tmp_path / "whole.pt")
    torch.save({**content, "x": Trap(mark)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({**content, "x": Trap(mark)}))
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap(mark)))
        archive.writestr("archive/version", "3\n")
    files = sorted(tmp_path.glob("*.pt"))
    assert len(files) == 8
    for file in files:
        with pytest.raises(InputError, match=r"cannot read checkpoint .*" + file.name):
            load_checkpoint(file)
        assert not mark.exists()


def index_bytes(metadata: bytes, arrays: bytes = b"") -> bytes:
    return _HEADER.pack(MAGIC, VERSION, len(metadata)) + metadata + arrays


def crafted_indices(mark: Path) -> dict[str, bytes]:
    bomb = pickle.dumps(Trap(mark))
    start = -(_HEADER.size) % 64

    def columns(*layout: object) -> bytes:
        return json.dumps({"split": "train", "class_names": ["c"], "columns": layout}).encode()

    return {
        "a pickle": bomb,
        "a pickle as metadata": index_bytes(bomb),
        "python tags": index_bytes(b'!!python/object/apply:os.mkdir ["x"]'),
        "an array of objects": index_bytes(columns(["label", "|O", 1]), bytes(start + 8 * 64)),
        "a dtype as code": index_bytes(columns(["label", "__import__('os').mkdir('x')", 1])),
        "brackets without end": index_bytes(b"[" * 100_000),
    }


def test_an_index_with_code_is_refused(mark: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, data in crafted_indices(mark).items():
        (tmp_path / "train.index").write_bytes(data)
        with pytest.raises((InputError, TypeError, RecursionError)):
            read_index(tmp_path / "train.index")
        assert not mark.exists(), kind
        assert not (tmp_path / "x").exists(), kind


@pytest.mark.parametrize("class_name", ["..", "/etc", "c/../..", "c"])
def test_an_index_reads_no_files_outside_of_the_set(tmp_path: Path, class_name: str) -> None:
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    write_images(tmp_path / "set/train/c", 1, seed=0)
    open_index(tmp_path / "set", "train")
    path = tmp_path / "set/.wmse_index/train.index"
    metadata, columns = read_index(path)
    name = "../../../secret.jpg" if class_name == "c" else "secret.jpg"
    columns = {key: np.array(value) for key, value in columns.items() if not key.startswith("name")}
    metadata["class_names"] = [class_name]
    write_index(path, IndexContent(columns, [name], metadata))
    with pytest.raises(OSError, match="names a file outside of it"):
        Index(path, tmp_path / "set").read(0)


def test_quarantine_lines_with_code_are_ignored(mark: Path, tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    lines = [
        pickle.dumps(Trap(mark)),
        f'!!python/object/apply:os.mkdir ["{mark}"]'.encode(),
        json.dumps({"py/reduce": [{"py/function": "os.mkdir"}, [str(mark)]]}).encode(),
        json.dumps({"step": 0, "id": f"__import__('os').mkdir({str(mark)!r})", "image": "", "problem": ""}).encode(),
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert read_quarantine(path, 9) == {}
    drop_quarantine_after(path, 9)
    assert path.read_bytes() == b""
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        "run_dir: !!python/object/apply:os.mkdir [{mark}]",
        "data: {{root: !!python/object/apply:os.mkdir [{mark}]}}",
        "data: !!python/object/new:os.mkdir [{mark}]",
        "!!python/object/apply:os.mkdir [{mark}]: 1",
        "run_dir: !!python/name:os.mkdir ''",
        "run_dir: !!python/module:antigravity ''",
    ],
)
def test_a_config_with_code_is_refused(text: str, mark: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text.format(mark=mark))
    with pytest.raises(InputError, match=r"cannot read .*yaml"):
        load_config(path, [])
    assert not mark.exists()
    assert "antigravity" not in sys.modules


# --- data sets of others ---


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 36), "orange").save(buffer, "JPEG")
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def nasty_tar(path: Path, victim: Path) -> None:
    """Write a tar with images whose names point outside of the set, and a link to a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name in ("../evil", str(victim.parent / "abs"), "sub/../../evil2", "ok"):
            for suffix, data in (("jpg", picture()), ("cls", b"0")):
                info = member(f"{name}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        tar.addfile(member("link_to_folder", tarfile.SYMTYPE, str(victim.parent)))


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()}


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_tars_write_nothing_outside_of_the_cache_and_their_links_are_not_followed(tmp_path: Path, suffix: str) -> None:
    victim = tmp_path / "home/victim.jpg"
    victim.parent.mkdir()
    victim.write_bytes(b"victim")
    nasty_tar(tmp_path / f"set/train-000000.{suffix}", victim)
    before = files_below(tmp_path)
    index = open_index(tmp_path / "set", "train")
    names = [f"train-000000.tar/{name}.jpg" for name in ("../evil", victim.parent / "abs", "sub/../../evil2", "ok")]
    assert [index.name(i) for i in range(len(index))] == names
    assert all(index.read(i) == picture() for i in range(len(index)))
    after = files_below(tmp_path)
    unpacked = {"set/.wmse_index/train-000000.tar"} if suffix == "tar.gz" else set()
    assert set(after) - set(before) == {"set/.wmse_index/.gitignore", "set/.wmse_index/train.index", *unpacked}
    assert {name: after[name] for name in before} == before


def test_an_uncompressed_shard_has_the_name_of_the_shard(tmp_path: Path) -> None:
    """The name in the gzip header is ignored. A link of that name in the cache is replaced and not written through."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"victim")
    nasty_tar(tmp_path / "plain.tar", victim)
    shard = tmp_path / "set/train-000000.tar.gz"
    (tmp_path / "set/.wmse_index").mkdir(parents=True)
    with shard.open("wb") as file, gzip.GzipFile("../../evil.tar", "wb", fileobj=file) as packed:
        packed.write((tmp_path / "plain.tar").read_bytes())
    for name in ("train-000000.tar", ".gitignore", "train.index", "train.skipped.txt"):
        (tmp_path / "set/.wmse_index" / name).symlink_to(victim)
    index = open_index(tmp_path / "set", "train")
    assert index.read(0) == picture()
    assert victim.read_bytes() == b"victim"
    assert not (tmp_path / "set/.wmse_index/train-000000.tar").is_symlink()
    assert not list(tmp_path.rglob("*evil*"))


def test_a_cache_that_is_a_link_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    write_images(tmp_path / "set/train/c", 2, seed=0)
    (tmp_path / "set/.wmse_index").symlink_to(tmp_path / "home")
    assert len(open_index(tmp_path / "set", "train")) == 2
    assert list((tmp_path / "home").iterdir()) == []
    assert len(list((tmp_path / "cache/wmse").rglob("train.index"))) == 1


def test_prepare_refuses_tars_and_writes_only_to_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = tmp_path / "victim.jpg"
    victim.write_bytes(b"victim")
    nasty_tar(tmp_path / "tars/train-000000.tar", victim)
    before = files_below(tmp_path)
    assert main(["prepare", str(tmp_path / "tars"), str(tmp_path / "dest")]) == 2
    assert "holds tar shards, which can be trained on as they are" in capsys.readouterr().err
    assert files_below(tmp_path) == before
    write_images(tmp_path / "folder/train/c", 2, seed=0)
    (tmp_path / "folder/train/c/link.jpg").symlink_to(victim)
    (tmp_path / "folder/train/c/..evil.jpg").write_bytes(picture())
    (tmp_path / "folder/train/c/back\\..\\slash.jpg").write_bytes(picture())
    before = files_below(tmp_path)
    assert main(["prepare", str(tmp_path / "folder"), str(tmp_path / "dest")]) == 0
    new = set(files_below(tmp_path)) - set(before)
    assert new == {f"dest/{name}" for name in ("train-000000.tar", "train.index", "train.skipped.txt", "dataset.json")}
    with tarfile.open(tmp_path / "dest/train-000000.tar") as tar:
        assert all(m.isreg() and "/" not in m.name and not m.name.startswith(".") for m in tar)
    assert victim.read_bytes() == b"victim"


DAMAGED_NUMBERS = [
    ({"label": [0, 7]}, "a label, which is not the number of a class,"),
    ({"label": [0, -2]}, "a label, which is not the number of a class,"),
    ({"label": [0]}, "the lengths of its columns"),
    ({"shard": [0, 1]}, "the number of a shard"),
    ({"shard": [65535, 0]}, "the number of a shard"),
    ({"height": [0, 5]}, "the size of an image"),
    ({"split": "/etc"}, "its split or fingerprint"),
    ({"split": "../other"}, "its split or fingerprint"),
    ({"class_names": [1, 2, 3, 4]}, "its class names"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGED_NUMBERS)
def test_an_index_with_invalid_values_is_refused_at_once(tmp_path: Path, damage: dict, problem: str) -> None:
    nasty_tar(tmp_path / "set/train-000000.tar", tmp_path / "victim")
    open_index(tmp_path / "set", "train")
    path = tmp_path / "set/.wmse_index/train.index"
    metadata, columns = read_index(path)
    columns = {key: np.array(value[:2]) for key, value in columns.items() if not key.startswith("name")}
    for key, numbers in damage.items():
        if key in columns:
            columns[key] = np.array(numbers, columns[key].dtype)
        else:
            metadata[key] = numbers
    write_index(path, IndexContent(columns, ["a", "b"], metadata))
    with pytest.raises(InputError, match=f"not a usable index: {problem} cannot be right"):
        open_index(tmp_path / "set", "train")


# --- a whole run ---

ODD_NAMES = (
    "line\nend",
    "\x1b[2J\x1b[31mred",
    "'quotes\"",
    "<script>alert(1)<\\script>",
    "\u202etxt",
    os.fsdecode(b"\xff\xfe"),
)
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z] \S")


@pytest.fixture(scope="module")
def odd_run(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list, set]:
    """Make a run whose unusable images have odd names. Return its folder, its connections, and its network calls."""
    folder = tmp_path_factory.mktemp("odd")
    write_images(folder / "set/train/c", 42, seed=0)
    bad = [folder / "set/train/c" / f"{name}.jpg" for name in ODD_NAMES]
    for path in bad:
        path.write_bytes(picture())
    assert len(open_index(folder / "set", "train")) == 48
    for path in bad:
        path.write_bytes(b"no picture \x1b[0m\n")
    (folder / "tiny.yaml").write_text(TINY)
    connections, calls, watching = [], set(), [True]
    collect = ViewLoader._collect

    def look(self, *arguments):
        connections.append(psutil.Process().net_connections(kind="all"))
        return collect(self, *arguments)

    def audit(event: str, arguments: tuple) -> None:
        if watching and event in ("socket.bind", "socket.connect", "socket.sendto", "socket.getaddrinfo"):
            calls.add((event, str(arguments[1:])))

    sys.addaudithook(audit)  # cannot be removed again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ViewLoader, "_collect", look)
        arguments = ["--config", folder / "tiny.yaml", "--data.root", folder / "set", "--run_dir", folder / "run"]
        assert main(["pretrain", *map(str, arguments)]) == 0
    watching.clear()
    return folder, connections, calls


def test_a_run_of_one_process_opens_no_connection(odd_run) -> None:
    _, connections, calls = odd_run
    assert len(connections) == 9
    assert connections == [[]] * 9
    assert calls == set()


def test_odd_file_names_stay_on_one_line_of_the_log(odd_run) -> None:
    folder, _, _ = odd_run
    text = (folder / "run/log.txt").read_bytes().decode("utf-8")
    lines = text.removesuffix("\n").split("\n")
    assert [line for line in lines if not LOG_LINE.match(line)] == []
    assert all(line.isprintable() for line in lines)
    assert sum("skipped c/" in line for line in lines) == len(ODD_NAMES)
    assert any("skipped c/line\\nend.jpg" in line for line in lines)
    assert any("skipped c/\\x1b[2J\\x1b[31mred.jpg" in line for line in lines)


def test_odd_file_names_are_valid_json_lines(odd_run) -> None:
    folder, _, _ = odd_run
    entries = [json.loads(line) for line in (folder / "run/quarantine.jsonl").read_text(encoding="ascii").splitlines()]
    assert len(entries) == len(ODD_NAMES)
    assert all(entry["image"].isprintable() and entry["problem"].isprintable() for entry in entries)
    assert "c/'quotes\".jpg" in {entry["image"] for entry in entries}
    for line in (folder / "run/metrics.jsonl").read_text(encoding="ascii").splitlines():
        json.loads(line)


def test_a_preview_contains_only_pixels(odd_run) -> None:
    folder, _, _ = odd_run
    arguments = ["--config", folder / "tiny.yaml", "--data.root", folder / "set", "--out", folder / "p.png"]
    assert main(["preview", *map(str, arguments)]) == 0
    with Image.open(folder / "p.png") as shown:
        assert shown.format == "PNG"
        assert shown.info == {}


def test_no_source_file_loads_pickles() -> None:
    """Ruff does not check that torch.load has weights_only=True and that numpy.load does not allow pickles."""
    for folder in ("trainer", "kernels", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    assert "weights_only=True" in ast.unparse(node), f"{path}:{node.lineno}"
                if isinstance(node, ast.keyword):
                    assert node.arg != "allow_pickle", f"{path}:{node.lineno}"
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    assert not re.search(r"\b(cloudpickle|dill|joblib|shelve|hub)\b", ast.unparse(node)), path
