"""Run folder: lock, log, and entries of the wrong type."""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.errors import InputError
from trainer.run import folder as run_folder
from trainer.run.folder import lock_run_folder, open_run_folder, start_logging


@pytest.fixture
def log(tmp_path: Path) -> Iterator[logging.Logger]:
    """Return the root logger, which writes to tmp_path/log.txt."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    start_logging(tmp_path, 0)
    yield root
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    for handler in before[0]:
        root.addHandler(handler)
    root.setLevel(before[1])


def test_one_process_locks_the_folder_and_releases_it(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path):
        with (
            pytest.raises(InputError, match=r"in use by another process \(process \d+ on .* since 2"),
            lock_run_folder(tmp_path),
        ):
            pass
        assert (tmp_path / ".lock").read_text().count("\n") == 1
    with lock_run_folder(tmp_path):
        pass


def test_on_a_full_disk_lines_reach_only_stderr(
    log: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(text: str) -> None:
        raise OSError(28, "No space left on device")

    log.info("before")
    (file,) = [handler for handler in log.handlers if isinstance(handler, run_folder._LogFile)]
    with monkeypatch.context() as patch:
        patch.setattr(file.stream, "write", full, raising=False)
        log.info("meanwhile")
    log.info("after")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["before", "meanwhile", "after"]
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["before", "after"]


def test_the_size_of_the_log_is_bounded(log: logging.Logger, tmp_path: Path) -> None:
    (file,) = [handler for handler in log.handlers if isinstance(handler, run_folder._LogFile)]
    assert file.maxBytes == 32 << 20
    file.maxBytes = 1000
    for number in range(100):
        log.info("line %d", number)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("log.txt*")}
    assert sizes.keys() == {"log.txt", "log.txt.1"}
    assert max(sizes.values()) <= 1000
    assert (tmp_path / "log.txt").read_text().endswith("line 99\n")


FILES = (
    ".lock",
    "log.txt",
    "metrics.jsonl",
    "config.yaml",
    "state.json",
    "quarantine.jsonl",
    "images.index",
    "launch.json",
)
FOLDERS = ("checkpoints", "tensorboard", "eval")


@pytest.mark.parametrize("kind", ["link", "dangling link", "named pipe", "other"])
@pytest.mark.parametrize("name", FILES + FOLDERS)
def test_an_entry_of_another_type_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    """Writing through a link would overwrite another file, and opening a named pipe would block."""
    run_dir, other = tmp_path / "run", tmp_path / "other"
    run_dir.mkdir()
    if kind == "link":
        other.write_text("precious")
    if "link" in kind:
        (run_dir / name).symlink_to(other)
    elif kind == "named pipe":
        os.mkfifo(run_dir / name)
    elif name in FOLDERS:
        (run_dir / name).touch()
    else:
        (run_dir / name).mkdir()
    found = {"link": "a link", "dangling link": "a link", "named pipe": "a named pipe"}.get(
        kind, "a file" if name in FOLDERS else "a folder"
    )
    with pytest.raises(InputError, match=rf"cannot use the run folder .*: {re.escape(name)} is {found}, not a f"):
        open_run_folder(str(run_dir))
    assert [path.name for path in run_dir.iterdir()] == [name]
    assert not other.is_file() or other.read_text() == "precious"


def test_all_problems_are_reported_at_once_and_folders_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    assert open_run_folder(str(tmp_path / "run")) == tmp_path / "run"
    (tmp_path / "checkpoints on another disk").mkdir()
    (tmp_path / "elsewhere/checkpoints").rmdir()
    (tmp_path / "elsewhere/checkpoints").symlink_to(tmp_path / "checkpoints on another disk")
    open_run_folder(str(tmp_path / "run"))
    for name in ("log.txt", "state.json"):
        (tmp_path / "elsewhere" / name).symlink_to(tmp_path / "x")
    with pytest.raises(InputError, match=r"log\.txt is a link.*; state\.json is a link"):
        open_run_folder(str(tmp_path / "run"))
