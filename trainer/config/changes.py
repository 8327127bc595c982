"""Which settings may change between two starts of a run. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.schema import Config, flatten
from trainer.config.setting import all_settings, shapes_result
from trainer.errors import InputError


def plain_settings(config: Config) -> dict[str, Any]:
    """Return all settings by dotted name, as a checkpoint holds them: a safe load gives lists, not tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flatten(config).items()}


def changed_settings(config: Config, then: dict[str, Any]) -> list[str]:
    """List the settings that shape the result and have changed, as "key: before -> now".

    then: as `plain_settings` gives them; a setting that is missing there is newer, and had its default.
    """
    before = plain_settings(Config()) | then
    shaping = {key for key, declared, _ in all_settings(config) if shapes_result(declared)}
    return [
        f"{key}: {before[key]} -> {value}"
        for key, value in plain_settings(config).items()
        if value != before[key] and key in shaping
    ]


def refuse_changes(run_dir: Path, changed: list[str]) -> None:
    """Raise InputError that lists what changed, if anything did."""
    if changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        raise InputError(
            f"{run_dir} holds a run with other settings:\n{listed}\n"
            "Use them again, take another --run_dir, or accept the change with --allow_changes true"
        )
