"""Fixtures of whole runs: the command of a short run, and the folder of the same run without a fault."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import TINY
from tests.faults import Faults, start
from tests.processes import Started, finish

Arguments = list[str | Path]


@pytest.fixture
def command(tiny_set: Path, tiny_config: Path, tmp_path: Path) -> Callable[..., Arguments]:
    """Return a function that makes the arguments of a run: 9 steps in tmp_path/run, saved after every second step."""

    def arguments(*more: str, root: Path = tiny_set) -> Arguments:
        return ["pretrain", "--config", tiny_config, "--data.root", root, "--run_dir", tmp_path / "run",
                "--log.every_steps", "2", "--checkpoint.every_steps", "2", *more]  # fmt: skip

    return arguments


class UnbrokenRun(NamedTuple):
    """The run without a fault."""

    folder: Path
    seconds: float
    """Time from the start of its process to the end."""


@pytest.fixture(scope="session")
def unbroken_run(tiny_set: Path, tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRun:
    """Return the run of `command`, made without a fault."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "tiny.yaml").write_text(TINY)
    arguments = ["pretrain", "--config", folder / "tiny.yaml", "--data.root", tiny_set, "--run_dir", folder / "run"]
    # a first run starts the fork server, so that its start does not count in `seconds`
    assert finish(start([*arguments[:-1], folder / "first", "--max_steps", "1"], folder)) == [0]
    began = time.monotonic()
    assert finish(start([*arguments, "--log.every_steps", "2"], folder)) == [0]
    return UnbrokenRun(folder / "run", time.monotonic() - began)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., list[Started]]]:
    """Return a function that starts ranks. Kill all of them at the end of the test."""
    running: list[Started] = []

    def call(command: Arguments, ranks: int = 1, **faults: object) -> list[Started]:
        running.extend(started := start(command, tmp_path, Faults(**faults), ranks))  # type: ignore[arg-type]
        return started

    yield call
    for process in running:
        if process.is_running():
            process.kill()


@pytest.fixture
def two_ranks(command: Callable[..., Arguments], begin: Callable[..., list[Started]]) -> Callable[..., list[Started]]:
    """Return a function that starts two ranks of `command` with faults in the second one."""
    return lambda *more, **faults: begin(command(*more), ranks=2, on_rank=1, **faults)
