"""Files appear whole or not at all."""

from pathlib import Path

import pytest

from trainer.files import atomic_write, write_text


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


def test_it_is_not_there_before_it_is_complete(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "b") as file:
        file.write(b"data")
        file.flush()
        assert not (tmp_path / "b").exists()
    assert (tmp_path / "b").read_bytes() == b"data"
