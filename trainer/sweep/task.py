"""One run of a sweep, in a process or a SLURM task of its own: train it, and measure what is not measured yet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from trainer.config.changes import plain_settings
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.errors import DONE, FAILED
from trainer.sweep.progress import UNTRAINED, is_trained, last_checkpoint, missing


def run_task(file: Path, words: Sequence[str], *, untrained: bool) -> int:
    """Run the ordinary commands for the run of `--config FILE WORDS`. Returns the exit code of the first that fails, else 0.

    untrained: also measure the untrained encoder, even if the training fails."""
    from trainer.cli import main

    config = load_config(file, words)
    code = DONE
    if not is_trained(config):
        code = main(["pretrain", "--config", str(file), *words])
    # A preempted run continues later: an evaluation would take the time that is left before the job is killed.
    if code not in (DONE, FAILED):
        return code
    commands = []
    if untrained and (Path(config.run_dir) / "config.yaml").exists():
        commands.append(_evaluate(config, UNTRAINED))
    # A run that `wmse stop` has ended is not trained, though its exit code is 0.
    if is_trained(config):
        commands.append(_evaluate(config, last_checkpoint(config)))
    codes = [code, *(main(command) for command in commands if command)]
    return next((code for code in codes if code), DONE)


def _evaluate(config: Config, checkpoint: str) -> list[str]:
    """Return the command that measures a checkpoint by the protocols that are missing; empty if none is."""
    protocols = missing(config, checkpoint)
    if not protocols:
        return []
    words = ["--run_dir", config.run_dir, "--checkpoint", checkpoint]
    # A run that keeps checkpoints for a curve has all of them measured.
    if checkpoint != UNTRAINED and config.checkpoint.keep_every_epochs:
        words = ["--follow", config.run_dir]
    return ["evaluate", *words, f"--evaluate.protocols={','.join(protocols)}", *changed_words(config)]


def changed_words(config: Config) -> list[str]:
    """Return the settings that were changed after the training, as words."""
    saved = plain_settings(load_config(Path(config.run_dir) / "config.yaml", []))
    words = []
    # Without these words the evaluation would use the settings that the run has saved.
    for key, value in plain_settings(config).items():
        if value != saved[key] and key not in ("run_dir", "evaluate.protocols"):
            text = value if isinstance(value, str) else json.dumps(value)
            words.append(f"--{key}={text}")
    return words
