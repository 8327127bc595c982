"""The command of a short run, and the folder of the same run when nothing happens to it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import TINY
from tests.faults import Faults, start
from tests.processes import Started, finish

Words = list[str | Path]


@pytest.fixture
def command(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> Callable[..., Words]:
    """Return the words of a run of 9 steps in tmp_path/run that is saved after every second step."""

    def words(*more: str, root: Path = tiny_set) -> Words:
        return ["pretrain", "--config", tiny_config, "--data.root", root, "--run_dir", tmp_path / "run",
                "--log.every_steps", "2", "--checkpoint.every_steps", "2", *more]  # fmt: skip

    return words


class UnbrokenRun(NamedTuple):
    """The run that nothing happened to."""

    folder: Path
    seconds: float
    """From the start of its process to the end."""


@pytest.fixture(scope="session")
def unbroken_run(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRun:
    """Make the run of `command` without a fault."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "tiny.yaml").write_text(TINY)
    words = ["pretrain", "--config", folder / "tiny.yaml", "--data.root", tiny_set, "--run_dir", folder / "run"]
    assert finish(start([*words[:-1], folder / "first", "--max_steps", "1"], folder)) == [0]  # starts the fork server
    began = time.monotonic()
    assert finish(start([*words, "--log.every_steps", "2"], folder)) == [0]
    return UnbrokenRun(folder / "run", time.monotonic() - began)


@pytest.fixture
def two_ranks(command: Callable[..., Words], tmp_path: Path) -> Iterator[Callable[..., list[Started]]]:
    """Return a function that starts two ranks with faults in the second one; they are killed at the end of the test."""
    started: list[Started] = []

    def begin(*more: str, **faults: Any) -> list[Started]:
        started.extend(start(command(*more), tmp_path, Faults(on_rank=1, **faults), ranks=2))
        return started

    yield begin
    for process in started:
        process.kill()
