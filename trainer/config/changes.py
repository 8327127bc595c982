"""Which settings may change between two starts of a run. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.schema import Config, flatten
from trainer.errors import InputError

# settings, or beginnings of their names, that may change between restarts without changing what is learnt
_FREE = (
    "run_dir", "max_steps", "init_from", "allow_changes", "device", "timeout_minutes", "stop_timeout_seconds",
    "max_idle_restarts", "allow_idle_ranks", "compile", "autotune", "cuda_graphs", "model.activation_memory_budget",
    "data.root", "data.expected_images", "data.probe_split", "data.test_split", "data.threads", "data.read_ahead_steps",
    "data.prefetch_batches", "data.decode_cache_gib", "data.hw_decoder_load", "data.decoder_hint", "data.max_bad_share",
    "data.max_classes", "views.test_resize", "model.activation_checkpointing", "loss.max_failed_steps", "loss.backend",
    "optimizer.backend", "checkpoint.", "log.", "evaluate.",
)  # fmt: skip


def plain_settings(config: Config) -> dict[str, Any]:
    """Return all settings by dotted name, as a checkpoint holds them: a safe load gives lists, not tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flatten(config).items()}


def changed_settings(config: Config, then: dict[str, Any]) -> list[str]:
    """List the settings that shape the result and have changed, as "key: before -> now".

    then: as `plain_settings` gives them; a setting that is missing there is newer, and had its default.
    """
    before = plain_settings(Config()) | then
    return [
        f"{key}: {before[key]} -> {value}"
        for key, value in plain_settings(config).items()
        if value != before[key] and not key.startswith(_FREE)
    ]


def refuse_changes(run_dir: Path, changed: list[str]) -> None:
    """Raise InputError that lists what changed, if anything did."""
    if changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        raise InputError(
            f"{run_dir} holds a run with other settings:\n{listed}\n"
            "Use them again, take another --run_dir, or accept the change with --allow_changes true"
        )
