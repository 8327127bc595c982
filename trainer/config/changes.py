"""Compare the settings of two starts of a run, and refuse changes of the result. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.schema import Config, flatten
from trainer.config.setting import all_settings, shapes_result
from trainer.errors import InputError


def plain_settings(config: Config) -> dict[str, Any]:
    """Return all settings by dotted name, in the form of a checkpoint: with lists, because a safe load gives no tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flatten(config).items()}


def changed_settings(config: Config, then: dict[str, Any]) -> list[str]:
    """List the settings that shape the result and have changed, as "key: before -> now".

    then: the earlier settings, from `plain_settings`. A setting that is missing in them is newer, and had its default value.
    """
    # Compare in the form of a checkpoint, in which a tuple is a list.
    before = plain_settings(Config()) | then
    shaping = {key for key, declared, _ in all_settings(config) if shapes_result(declared)}
    changed = []
    for key, value in plain_settings(config).items():
        if key in shaping and value != before[key]:
            changed.append(f"{key}: {before[key]} -> {value}")
    return changed


def refuse_changes(run_dir: Path, changed: list[str]) -> None:
    """Raise InputError that lists the changes, if there are any."""
    if changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        raise InputError(
            f"{run_dir} holds a run with other settings:\n{listed}\n"
            "Use these settings again, choose another --run_dir, or accept the change with --allow_changes true"
        )
