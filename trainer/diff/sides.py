"""The two runs of `wmse diff`, as their files describe them. Nothing is written to a run folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.cluster.runs import read_run, whole
from trainer.config.schema import Config
from trainer.data.index import Index, open_images
from trainer.data.quarantine import read_entries
from trainer.errors import InputError
from trainer.report.collect import read_config, read_lines, read_log
from trainer.run.checkpoint import load_checkpoint
from trainer.run.checkpoint_files import list_checkpoints
from trainer.run.starts import read_starts

_log = logging.getLogger(__name__)
_OF_ENVIRONMENT = ("commit", "plan_version", "device", "world_size", "torch_threads")


@dataclass
class Side:
    """One of the two runs."""

    name: str
    """A or B."""
    folder: Path
    config: Config
    lines: list[dict[str, Any]]
    """metrics.jsonl."""
    starts: list[dict[str, Any]]
    """starts.jsonl."""
    quarantine: list[dict[str, Any]]
    checkpoints: dict[int, Path]
    """By step."""
    problems: list[str]

    @property
    def digests_since(self) -> int:
        """Step with which the digests began."""
        # A damaged line may hold anything.
        return (whole(self.starts[-1], "digests_since") or 0) if self.starts else 0

    @cached_property
    def data(self) -> dict[str, Any]:
        """Fingerprint and number of the training images; empty if no file tells."""
        # All starts of a run train on the same images.
        images = self.starts[-1].get("images") if self.starts else None
        if isinstance(images, dict):
            return {
                "fingerprint": images.get("fingerprint"),
                "images": images.get("count"),
            }
        # A run of an older version only has them in its checkpoints.
        for path in reversed(self.checkpoints.values()):
            try:
                content = load_checkpoint(path)
            except InputError as error:
                self.problems.append(str(error))
                continue
            return dict(content.get("data", {}))
        return {}

    @property
    def knows_images(self) -> bool:
        """Whether the files of the run tell the number of its images, on which their order depends."""
        return type(self.data.get("images")) is int

    @cached_property
    def index(self) -> Index | None:
        """The images that the run trains on; None if they are not here, or are others now."""
        kept = self.folder / "images.index"
        try:
            # A run keeps the index of its images, which may have been indexed again since.
            if kept.exists():
                index = Index(kept, Path(self.config.data.root))
            else:
                index = open_images(self.config.data, self.config.data.train_split)
        except (InputError, OSError) as error:
            _log.warning("cannot open the images of %s, so crops are not compared: %s", self.name, error)
            return None
        # Sizes of other images would give other crops.
        return index if index.fingerprint == self.data.get("fingerprint") else None

    def environment(self) -> dict[str, list[tuple[int, Any]]]:
        """Return commit, hardware and versions by name, each as (first step, value) of every change within the run."""
        found: dict[str, list[tuple[int, Any]]] = {}
        for start in self.starts:
            values = {key: start.get(key) for key in _OF_ENVIRONMENT}
            versions = start.get("versions")
            if isinstance(versions, dict):
                values |= versions
            for key, value in values.items():
                history = found.setdefault(key, [])
                # Most starts change nothing.
                if not history or history[-1][1] != value:
                    history.append((start["step"], value))
        return found


def read_side(name: str, folder: Path) -> Side:
    """Read a run. Raises InputError if the folder is not a run, or its settings cannot be read."""
    if not (folder / "config.yaml").is_file():
        raise InputError(f"{folder} is not the folder of a run that has started: it has no config.yaml")
    # Problems of other files are notes of the comparison; without settings there is none.
    problems: list[str] = []
    config, _ = read_config(folder / "config.yaml", problems)
    if config is None:
        raise InputError(f"{folder}: {problems[0]}")
    starts = read_starts(folder)
    if not starts:
        starts = _start_of_old_run(folder, problems)
    return Side(
        name,
        folder,
        config,
        lines=read_lines(folder / "metrics.jsonl", problems),
        starts=starts,
        quarantine=read_entries(folder / "quarantine.jsonl"),
        checkpoints=dict(list_checkpoints(folder / "checkpoints")),
        problems=problems,
    )


def _start_of_old_run(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return what the log and state.json of a run without starts.jsonl tell; empty if they tell nothing."""
    found = read_log(folder / "log.txt", problems)
    if not found:
        return []
    world_size = read_run(folder).state.get("world_size")
    start = {
        "step": 0,
        "commit": found["commit"],
        "world_size": world_size,
        "versions": {"torch": found["torch"]},
    }
    return [start]
