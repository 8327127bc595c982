"""Read run folders for the page. A file that is missing or damaged becomes a line in `Run.problems`, never an error."""

from __future__ import annotations

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
from trainer.files import parse_object
from trainer.run.starts import read_starts

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
    def is_of_another_run(self) -> bool:
        """Whether it measured a checkpoint of another run."""
        return self.content.get("checkpoint_of_this_run") is False

    @property
    def label(self) -> str:
        """Name of the protocol for people."""
        return text(self.content, "label") or self.protocol

    @property
    def how(self) -> str:
        """Description of the measurement."""
        # Only k-NN has no `protocol`, but a metric and a vote.
        parts = [text(self.content, key) for key in ("metric", "vote")]
        vote = "; ".join(part for part in parts if part)
        return text(self.content, "protocol") or vote

    @property
    def warnings(self) -> list[str]:
        """Signs of a collapse that the diagnostics found."""
        found = self.content.get("warnings")
        if not isinstance(found, list):
            return []
        return [str(line) for line in found]

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of `top1`, in percent."""
        # A result with several accuracies, such as that of k-NN by cosine, has their intervals under `by_k` or `shares`.
        limits = self.content.get("interval95")
        if not isinstance(limits, list) or len(limits) != 2:
            return None
        low, high = limits
        return (low, high) if isinstance(low, float) and isinstance(high, float) else None


@dataclass(frozen=True)
class Run:
    """Content of the files of a run."""

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
    certificate: dict[str, Any] = field(default_factory=dict)
    """certificate.json, which `wmse verify` wrote; empty if it is missing."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """starts.jsonl; empty for a run of an older version."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by dotted name; empty without a config."""
        return plain_settings(self.config) if self.config else {}

    def last_results(self) -> list[Result]:
        """Return the results of the last evaluated checkpoint."""
        of_run = [result for result in self.results if result.is_of_run]
        steps = [result.step for result in of_run if result.step is not None]
        # The baselines have no step, so they are not among the last results.
        if not steps:
            return []
        last_step = max(steps)
        return [result for result in of_run if result.step == last_step]


def collect_run(folder: Path, name: str, status: dict[str, Any]) -> Run:
    """Read the files of a run. status: its row of `describe_runs`."""
    problems = list(status["problems"])
    state = read_json(folder / "state.json", [])  # `describe_runs` has listed its problems
    config, sources = read_config(folder / "config.yaml", problems)
    lines = read_lines(folder / "metrics.jsonl", problems)
    # The epoch of a line is rounded, so the last line gives the most exact number of steps in an epoch.
    last = lines[-1] if lines else state
    step = number(last, "step")
    epoch = number(last, "epoch")
    steps_per_epoch = step / epoch if step and epoch else None
    return Run(
        folder=folder,
        name=name,
        status=status,
        state=state,
        config=config,
        sources=sources,
        lines=lines,
        results=read_results(folder / "eval", steps_per_epoch, problems),
        log=read_log(folder / "log.txt", problems),
        certificate=read_json(folder / "certificate.json", problems),
        starts=read_starts(folder),
        problems=problems,
    )


def read_config(path: Path, problems: list[str]) -> tuple[Config | None, dict[str, str]]:
    """Read the settings, and the source of each setting, which stands in a comment behind its value."""
    try:
        config = load_config(path, [])
        content = path.read_text(encoding="utf-8")
    except (InputError, OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"cannot read config.yaml: {error}")
        return None, {}
    # The comments with the sources are lost when YAML is parsed, so the lines are read as text.
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
        # Opening a named pipe would block.
        if not stat.S_ISREG(path.stat().st_mode):
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


def read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl. The last one is damaged if the run is writing it."""
    found = []
    num_damaged = 0
    for line in _read_bytes(path, problems).splitlines():
        values = parse_object(line)
        # A line of a program that was killed may be cut, or hold anything.
        if number(values, "step") is not None:
            found.append(values)
        else:
            num_damaged += 1
    if num_damaged:
        problems.append(f"{path.name} has {num_damaged} damaged or incomplete lines, which are left out")
    return found


def read_results(folder: Path, steps_per_epoch: float | None, problems: list[str]) -> list[Result]:
    """Read all results: checkpoints in the order of their steps, then the baselines; each in the order of `PROTOCOLS`."""
    found = []
    for path in sorted(folder.glob("*.json")):
        # A name with a dot in front belongs to a result that is being written.
        if path.name.startswith("."):
            continue
        result = _read_result(path, steps_per_epoch, problems)
        if result is not None:
            found.append(result)
    return sorted(found, key=_order)


def _read_result(path: Path, steps_per_epoch: float | None, problems: list[str]) -> Result | None:
    """Read one result; None with a new line in `problems` if it is damaged."""
    own_problems: list[str] = []
    content = read_json(path, own_problems)
    for problem in own_problems:
        # The page names files relative to the run folder.
        is_named = problem.startswith(path.name)
        problems.append(f"eval/{problem}" if is_named else problem)
    if own_problems:
        return None
    keys = content.get("figures")
    checkpoint = text(content, "checkpoint")
    if not isinstance(keys, list) or checkpoint is None:
        problems.append(f"eval/{path.name} is not a result of an evaluation")
        return None

    figures: dict[str, float] = {}
    for key in map(str, keys):
        value = number(content, key)
        if value is not None:
            figures[key] = value
    # The baselines have no step, and a run without metrics has no known number of steps in an epoch.
    step = number(content, "step")
    epoch = None
    if step is not None and steps_per_epoch:
        epoch = step / steps_per_epoch
    return Result(
        file=path.name,
        protocol=path.stem.partition(f"_{checkpoint}")[0],
        checkpoint=checkpoint,
        step=None if step is None else int(step),
        epoch=epoch,
        figures=figures,
        content=content,
    )


def _order(result: Result) -> tuple[Any, ...]:
    """Return the key by which results are sorted."""
    # A protocol of a newer program comes after those that this one knows.
    place = len(PROTOCOLS)
    if result.protocol in PROTOCOLS:
        place = PROTOCOLS.index(result.protocol)
    is_baseline = result.step is None
    step = result.step or 0
    return is_baseline, step, result.checkpoint, place, result.file


def read_log(path: Path, problems: list[str]) -> dict[str, str]:
    """Return commit, torch and device of the last start that log.txt names."""
    content = _read_bytes(path, problems, last=_LOG_BYTES).decode(errors="backslashreplace")
    # A resumed run has one such line for each start, and the last start is the one that matters.
    for line in reversed(content.splitlines()):
        match = _COMMIT.search(line)
        if match:
            commit, torch, device = match.groups()
            return {
                "commit": commit,
                "torch": torch,
                "device": device,
            }
    return {}
