"""Files are written atomically, and errors name the file."""

import errno
import os
from pathlib import Path

import pytest

from trainer.files import atomic_write, describe_os_error, write_text


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail_half_way() -> None:
        with atomic_write(path) as file:
            file.write(b"ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_is_synced_to_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a crash of the machine could leave an empty file with that name."""
    order: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (order.append(name), real(*a)))
    write_text(tmp_path / "c", "data")
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the folder
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o644


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "b") as file:
        file.write(b"data")
        file.flush()
        assert not (tmp_path / "b").exists()
    assert (tmp_path / "b").read_bytes() == b"data"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EIO])
def test_an_error_of_a_file_names_it_and_says_what_to_do(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"a\.txt") as caught:
        write_text(tmp_path / "a.txt", "text")
    message = describe_os_error(caught.value, needed=3 << 20)
    assert str(tmp_path / "a.txt") in message
    assert os.strerror(number) in message
    assert ("3.0 MiB are needed" in message) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert message.endswith(os.strerror(number)) == (number == errno.EIO)  # there is no advice for that
