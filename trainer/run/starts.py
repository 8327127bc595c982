"""starts.jsonl: a line for each start of a run, with what may change its result besides the settings.

step           step at which the start began
time           local time
world_size     number of ranks
device, cores, torch_threads, versions, commit     of rank 0, as `machine.provenance` names them
images         fingerprint and number of the training images
plan_version   version of the random choices of a step
digests_since  step with which the digests of the run began
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.files import parse_object

_log = logging.getLogger(__name__)
_OF_ROUNDING = {
    "world_size": "number of ranks",
    "device": "device",
    "torch_threads": "number of threads",
}


def starts_file(run_dir: Path) -> Path:
    """Return the path of the file."""
    return run_dir / "starts.jsonl"


def note_start(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Append a start. If that fails, for example on a full disk, log it and continue."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    line = json.dumps({"time": now, **values})
    # A run must not end because a note about it cannot be written.
    try:
        with starts_file(run_dir).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        _log.error("cannot write %s: %s", starts_file(run_dir), error.strerror)


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the starts of a run in their order, without damaged lines; empty for a run of an older program."""
    # The file is missing in the folder of a run that began with an older program.
    path = starts_file(run_dir)
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        values = parse_object(line)
        if type(values.get("step")) is int:
            found.append(values)
        else:  # the program was killed while it wrote the line
            _log.warning("%s: ignored a damaged line", path)
    return found


def rounding_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe what changed between two starts so that results are rounded differently; empty: nothing."""
    changes = []
    for key, name in _OF_ROUNDING.items():
        old = before.get(key)
        new = now.get(key)
        if old != new:
            changes.append(f"the {name} changed from {old} to {new}")
    # A damaged line may hold anything.
    old_versions = before.get("versions")
    if not isinstance(old_versions, dict):
        old_versions = {}
    for package, version in now["versions"].items():
        old = old_versions.get(package)
        if old != version:
            changes.append(f"{package} changed from {old} to {version}")
    return ", ".join(changes)
