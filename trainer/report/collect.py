"""Read run folders for the page. A file that is missing or damaged becomes a line in `Run.problems`, never an error."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainer.cluster.runs import number, read_json, text
from trainer.config.changes import plain_settings
from trainer.config.evaluation import PROTOCOLS
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.errors import InputError

_SOURCE = re.compile(r"^( *)(\w+):(.*?)(?:  # (.*))?$")  # a line of config.yaml: indent, name, value, source
_COMMIT = re.compile(r"commit (\S+), torch (\S+), device (.+)$")  # in log.txt, once for each start
_LOG_BYTES = 4 << 20  # the end of log.txt that is searched


@dataclass(frozen=True)
class Result:
    """Measurement of one encoder by one protocol: a file in RUN/eval."""

    file: str
    protocol: str
    checkpoint: str
    """The step of a checkpoint, "random" or "pixels"."""
    step: int | None
    epoch: float | None
    figures: dict[str, float]
    """The numbers that the result wants to be shown."""
    content: dict[str, Any]

    @property
    def is_of_run(self) -> bool:
        """Whether it measured this run with the run's settings. The file of any other measurement has a digest in its name."""
        return self.file == f"{self.protocol}_{self.checkpoint}.json"

    @property
    def label(self) -> str:
        """Name of the protocol for people."""
        return text(self.content, "label") or self.protocol

    @property
    def how(self) -> str:
        """How the protocol measures."""
        vote = [text(self.content, key) for key in ("metric", "vote")]
        return text(self.content, "protocol") or "; ".join(part for part in vote if part)

    @property
    def warnings(self) -> list[str]:
        """Signs of a collapse that the diagnostics found."""
        found = self.content.get("warnings")
        return [str(line) for line in found] if isinstance(found, list) else []

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of `top1`, in percent."""
        limits = self.content.get("interval95")
        if not isinstance(limits, list) or len(limits) != 2:
            return None
        low, high = limits
        return (low, high) if isinstance(low, float) and isinstance(high, float) else None


@dataclass(frozen=True)
class Run:
    """What the files of a run say."""

    folder: Path
    name: str
    status: dict[str, Any]
    """The row of `wmse status`."""
    state: dict[str, Any]
    config: Config | None
    """None: config.yaml is missing or cannot be read."""
    sources: dict[str, str]
    """Source of each setting by dotted name, as config.yaml names it: a file, "command line" or "default"."""
    lines: list[dict[str, Any]]
    """metrics.jsonl."""
    results: list[Result]
    log: dict[str, str]
    """commit, torch and device of the last start."""
    problems: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by dotted name; empty without a config."""
        return plain_settings(self.config) if self.config else {}

    def last_results(self) -> list[Result]:
        """Return the results of the last evaluated checkpoint."""
        steps = [result.step for result in self.results if result.is_of_run and result.step is not None]
        return [result for result in self.results if result.is_of_run and steps and result.step == max(steps)]


def collect_run(folder: Path, name: str, status: dict[str, Any]) -> Run:
    """Read the files of a run. status: its row of `describe_runs`."""
    problems = list(status["problems"])
    state = read_json(folder / "state.json", [])  # `describe_runs` has listed its problems
    config, sources = _read_config(folder / "config.yaml", problems)
    lines = _read_lines(folder / "metrics.jsonl", problems)
    # The epoch of a line is rounded, so the last line gives the most exact number of steps in an epoch.
    last = lines[-1] if lines else state
    step, epoch = number(last, "step"), number(last, "epoch")
    steps_per_epoch = step / epoch if step and epoch else None
    results = _read_results(folder / "eval", steps_per_epoch, problems)
    log = _read_log(folder / "log.txt", problems)
    return Run(folder, name, status, state, config, sources, lines, results, log, problems)


def _read_config(path: Path, problems: list[str]) -> tuple[Config | None, dict[str, str]]:
    try:
        config = load_config(path, [])
        content = path.read_text(encoding="utf-8")
    except (InputError, OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"cannot read config.yaml: {error}")
        return None, {}
    sources = {}
    section = ""
    for line in content.splitlines():
        match = _SOURCE.match(line)
        if not match:
            continue
        indent, name, value, source = match.groups()
        if not indent:
            section = ""
        # A name without a value starts a section.
        if not value.strip():
            section = f"{name}."
        elif source:
            sources[section + name] = source
    return config, sources


def _read_bytes(path: Path, problems: list[str], last: int | None = None) -> bytes:
    """Read a file, or its `last` bytes; empty if it is missing or cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would block
            problems.append(f"{path.name} is not a file")
            return b""
        with path.open("rb") as file:
            if last is not None:
                file.seek(max(0, path.stat().st_size - last))
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        problems.append(f"cannot read {path.name}: {error.strerror}")
        return b""


def _read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl. The last one is damaged if the run is writing it."""
    found, damaged = [], 0
    for line in _read_bytes(path, problems).splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict) and number(values, "step") is not None:
            found.append(values)
        else:
            damaged += 1
    if damaged:
        problems.append(f"{path.name} has {damaged} damaged or incomplete lines, which are left out")
    return found


def _read_results(folder: Path, steps_per_epoch: float | None, problems: list[str]) -> list[Result]:
    """Read all results: checkpoints in the order of their steps, then the baselines; each in the order of `PROTOCOLS`."""
    found = []
    # A name with a dot in front belongs to a result that is being written.
    for path in sorted(path for path in folder.glob("*.json") if not path.name.startswith(".")):
        own_problems: list[str] = []
        content = read_json(path, own_problems)
        names = content.get("figures")
        checkpoint = text(content, "checkpoint")
        if not own_problems and (not isinstance(names, list) or checkpoint is None):
            own_problems.append(f"{path.name} is not a result of an evaluation")
        problems += [f"eval/{problem}" if problem.startswith(path.name) else problem for problem in own_problems]
        if own_problems or not isinstance(names, list) or checkpoint is None:
            continue
        values = {str(key): number(content, str(key)) for key in names}
        step = number(content, "step")
        found.append(
            Result(
                path.name,
                path.stem.partition(f"_{checkpoint}")[0],
                checkpoint,
                None if step is None else int(step),
                step / steps_per_epoch if step is not None and steps_per_epoch else None,
                {key: value for key, value in values.items() if value is not None},
                content,
            )
        )

    def order(result: Result) -> tuple[Any, ...]:
        place = PROTOCOLS.index(result.protocol) if result.protocol in PROTOCOLS else len(PROTOCOLS)
        return result.step is None, result.step or 0, result.checkpoint, place, result.file

    return sorted(found, key=order)


def _read_log(path: Path, problems: list[str]) -> dict[str, str]:
    """Return commit, torch and device of the last start that log.txt names."""
    content = _read_bytes(path, problems, last=_LOG_BYTES).decode(errors="backslashreplace")
    starts = [match for line in content.splitlines() if (match := _COMMIT.search(line))]
    return dict(zip(("commit", "torch", "device"), starts[-1].groups(), strict=True)) if starts else {}
