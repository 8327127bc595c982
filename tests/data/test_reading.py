"""Reading retries temporary errors of a file system, and reports the files that it waits for."""

import errno
import logging
import os
import resource
import threading
import time
from pathlib import Path

import pytest
from pictures import encoded, make_folder, make_tar

import trainer.data.reader as reading
from trainer.data.index import Index, open_index
from trainer.data.index_build import _inspect_file as inspect_file
from trainer.data.reader import ImageReader
from trainer.data.verify import check_data
from trainer.errors import InputError

PICTURES = {f"train/c/{i}.png": encoded("PNG") for i in range(4)}


@pytest.fixture
def folder(tmp_path: Path) -> Index:
    """Return the index of a folder of four images."""
    return open_index(make_folder(tmp_path / "folder", PICTURES), "train")


@pytest.fixture
def shards(tmp_path: Path) -> Index:
    """Return the index of two shards of two images each."""
    for number in range(2):
        members = [
            (f"{number}{i}.{kind}", encoded("PNG") if kind == "png" else b"0")
            for i in range(2)
            for kind in ("png", "cls")
        ]
        make_tar(tmp_path / f"tars/train-{number:06d}.tar", members)
    return open_index(tmp_path / "tars", "train")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the waits in seconds that the reader asks for; none happens."""
    waited: list[float] = []
    monkeypatch.setattr(reading.time, "sleep", waited.append)
    return waited


def failing(index: Index, monkeypatch: pytest.MonkeyPatch, *errors: OSError) -> list[int]:
    """Make the next reads fail with these errors. Return the list of all reads."""
    asked, left, read = [], list(errors), index.read

    def read_or_fail(i: int) -> bytes:
        asked.append(i)
        if left:
            raise left.pop(0)
        return read(i)

    monkeypatch.setattr(index, "read", read_or_fail)
    return asked


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENOTCONN]
)
def test_a_temporary_error_is_retried_after_a_wait(folder, pauses, monkeypatch, number):
    asked = failing(folder, monkeypatch, *[OSError(number, os.strerror(number), "x")] * 2)
    data, problem = ImageReader(folder).read(1)
    assert (data, problem) == (PICTURES["train/c/1.png"], None)
    assert asked == [1, 1, 1]
    assert pauses == [0.1, 1.0]


def test_an_image_is_unusable_after_three_tries(folder, pauses, monkeypatch):
    asked = failing(folder, monkeypatch, *[OSError(errno.EIO, "Input/output error", "/x/1.png")] * 3)
    data, problem = ImageReader(folder).read(1)
    assert data == b""
    assert problem == "[Errno 5] Input/output error: '/x/1.png' (3 tries)"
    assert len(asked) == 3
    assert pauses == [0.1, 1.0]


@pytest.mark.parametrize(
    "number", [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, None]
)
def test_a_permanent_error_is_not_retried(folder, pauses, monkeypatch, number):
    """number: None stands for a truncated tar."""
    error = OSError("cut") if number is None else OSError(number, os.strerror(number), "x")
    asked = failing(folder, monkeypatch, error)
    assert ImageReader(folder).read(1)[1] == str(error)
    assert (asked, pauses) == ([1], [])


def test_unusable_content_is_not_read_again(folder, pauses, tmp_path, monkeypatch):
    (tmp_path / "folder/train/c/1.png").write_bytes(b"<html>")
    asked = failing(folder, monkeypatch)
    assert "not a readable image" in ImageReader(folder).read(1)[1]
    assert (asked, pauses) == ([1], [])


def test_temporary_errors_are_logged_once_a_run(folder, pauses, monkeypatch, caplog):
    error = OSError(errno.EIO, "Input/output error", "/x/1\n.png")
    reader = ImageReader(folder)
    with caplog.at_level(logging.WARNING):
        for i in range(3):
            failing(folder, monkeypatch, error)
            assert reader.read(i)[1] is None
    (record,) = caplog.records
    assert "'/x/1\\n.png'" in record.getMessage()
    assert "a later try succeeded" in record.getMessage()


# --- file descriptors of shards ---


def test_a_stale_descriptor_of_a_shard_is_replaced(shards, monkeypatch, tmp_path):
    """The descriptor keeps its number, which other threads use, and then refers to the file that now has the name."""
    before = [shards.read(i) for i in range(4)]
    numbers = dict(shards._descriptors)
    old = tmp_path / "tars/train-000000.tar"
    fresh = tmp_path / "fresh.tar"
    fresh.write_bytes(old.read_bytes())
    os.replace(fresh, old)
    stale = {os.fstat(fd).st_ino for fd in numbers.values()}
    pread = os.pread

    def stale_pread(fd: int, count: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino in stale and os.fstat(fd).st_nlink == 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return pread(fd, count, offset)

    monkeypatch.setattr(os, "pread", stale_pread)
    opened_before = len(os.listdir("/proc/self/fd"))
    assert [shards.read(i) for i in range(4)] == before
    assert shards._descriptors == numbers
    assert os.fstat(numbers[0]).st_ino == old.stat().st_ino
    assert len(os.listdir("/proc/self/fd")) == opened_before


def test_a_lasting_error_names_the_shard(shards, pauses, monkeypatch, tmp_path):
    def broken(fd: int, count: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    shards.read(0)
    monkeypatch.setattr(os, "pread", broken)
    assert (
        ImageReader(shards).read(0)[1] == f"[Errno 5] Input/output error: '{tmp_path}/tars/train-000000.tar' (3 tries)"
    )


# --- reads in progress ---


def test_reads_that_hang_are_named_with_their_time_longest_first(folder, monkeypatch):
    go_on, read = threading.Event(), folder.read

    def slow(i: int) -> bytes:
        assert go_on.wait(10)
        return read(i)

    monkeypatch.setattr(folder, "read", slow)
    reader = ImageReader(folder)
    assert reader.waiting_for() == []
    threads = []
    for i in (2, 0):
        threads.append(threading.Thread(target=reader.read, args=(i,)))
        threads[-1].start()
        while len(reader.waiting_for()) < len(threads):
            time.sleep(0.001)
    time.sleep(0.05)
    (first, longest), (second, shorter) = reader.waiting_for()
    assert (first, second) == (folder.name(2), folder.name(0))
    assert 0.05 <= shorter <= longest < 5
    go_on.set()
    for thread in threads:
        thread.join()
    assert reader.waiting_for() == []


def test_a_read_that_raises_is_not_reported_as_waiting(folder, monkeypatch):
    failing(folder, monkeypatch, MemoryError())
    reader = ImageReader(folder)
    with pytest.raises(MemoryError):
        reader.read(1)
    assert reader.waiting_for() == []


def test_a_pipe_or_folder_in_place_of_an_image_is_refused_at_once(folder, tmp_path):
    path = tmp_path / "folder/train/c/1.png"
    path.unlink()
    os.mkfifo(path)
    assert ImageReader(folder).read(1)[1] == f"{path}: not a plain file any more"
    path.unlink()
    path.mkdir()
    assert "Is a directory" in ImageReader(folder).read(1)[1]
    assert str(path) in ImageReader(folder).read(1)[1]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_shortage_of_the_machine_makes_no_image_unusable(folder, pauses, monkeypatch, number):
    failing(folder, monkeypatch, OSError(number, os.strerror(number), "/x/1.png"))
    with pytest.raises(InputError, match=rf"cannot read /x/1.png: {os.strerror(number)}: \w+"):
        ImageReader(folder).read(1)
    monkeypatch.setattr("builtins.open", lambda *_, **__: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    with pytest.raises(InputError, match=os.strerror(number)):
        inspect_file("x")
    with pytest.raises(InputError, match=os.strerror(number)):
        check_data(folder.root, threads=1)


def test_more_shards_than_the_process_may_open_are_read(tmp_path):
    for number in range(40):
        make_tar(tmp_path / f"train-{number:06d}.tar", [("a.png", encoded("PNG"))])
    index = open_index(tmp_path, "train")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 20, hard))
    try:
        assert {ImageReader(index).read(i)[1] for i in range(40)} == {None}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
