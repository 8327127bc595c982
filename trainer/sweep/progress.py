"""What is left to do for a run of a sweep, from the files of the run. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.cluster.runs import read_run
from trainer.config.changes import changed_settings, plain_settings
from trainer.config.evaluation import PROTOCOLS
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.report.collect import Result, read_results
from trainer.run.checkpoint_files import newest_step
from trainer.sweep.definition import SweepRun

NOT_EVALUATED = "not evaluated"
UNTRAINED = "random"  # name of the untrained encoder among the checkpoints of `wmse evaluate`
# Settings that do not change the untrained encoder: its weights are drawn first, and it is measured with plain BatchNorm.
_NOT_OF_ENCODER = (
    "model.projector",
    "model.embedding_size",
    "model.encoder_batch_norm",
    "model.batch_norm_ranks",
    "model.activation",
)


def protocols_of(config: Config) -> Sequence[str]:
    """Return the names of the protocols that measure the run."""
    names = config.evaluate.protocols
    return PROTOCOLS if "all" in names else names


def is_trained(config: Config) -> bool:
    """Return whether the run has come to its end."""
    run_dir = Path(config.run_dir)
    state = read_run(run_dir).state
    # A run with max_steps ends as "paused", although nothing is left to do.
    is_paused_as_asked = state.get("status") == "paused" and state.get("step") == config.max_steps
    if state.get("status") != "done" and not is_paused_as_asked:
        return False
    # With changed settings, a run that is done may have more to do.
    return not (
        config.allow_changes and changed_settings(config, plain_settings(load_config(run_dir / "config.yaml", [])))
    )


def missing(config: Config, checkpoint: str) -> list[str]:
    """Return the protocols that have not measured a checkpoint of the run, or "random", with these settings."""
    # Read the files each time, because the process of the run writes them.
    results = read_results(Path(config.run_dir) / "eval", None, [])
    return [name for name in protocols_of(config) if find_result(results, config, name, checkpoint) is None]


def last_checkpoint(config: Config) -> str:
    """Return the name of the run's newest checkpoint in results: its step."""
    return str(newest_step(Path(config.run_dir)))


def find_result(results: Iterable[Result], config: Config, protocol: str, checkpoint: str) -> Result | None:
    """Return the result of a protocol for a checkpoint that was measured with these settings; None without one."""
    for result in results:
        named = (result.protocol, result.checkpoint) == (protocol, checkpoint)
        if named and _has_settings(result, config):
            return result
    return None


def _has_settings(result: Result, config: Config) -> bool:
    """Return whether the result is one of this run's data, encoder and settings of the protocol."""
    content = result.content
    data = config.data
    wanted = {
        **plain_settings(config),
        "train_split": data.probe_split or data.train_split,
        "test_split": data.test_split,
        "data_root": str(Path(data.root).expanduser().resolve()),
    }
    # The file of a result may be damaged, or that of another run.
    settings = content.get("settings")
    if not isinstance(settings, dict) or result.is_of_another_run:
        return False
    # A result lists the settings that shape its figures, but some do not change the encoder.
    found = {key: value for key, value in settings.items() if not key.startswith(_NOT_OF_ENCODER)}
    found |= {key: content.get(key) for key in ("train_split", "test_split")}
    # The data set may have moved since the run was measured with its own settings.
    if not result.is_of_run:
        found["data_root"] = content.get("data_root")
    return all(wanted.get(key) == value for key, value in found.items())


def untrained_results(run: SweepRun, runs: Iterable[SweepRun]) -> dict[str, Result]:
    """Return {protocol: result} of the run's untrained encoder, which any run of the sweep may have measured."""
    found: dict[str, Result] = {}
    # Another seed draws another encoder.
    for other in runs:
        if other.seed != run.seed:
            continue
        results = read_results(other.run_dir / "eval", None, [])
        for protocol in protocols_of(run.config):
            result = find_result(results, run.config, protocol, UNTRAINED)
            if result is not None:
                found.setdefault(protocol, result)
    return found


def encoder_key(config: Config) -> str:
    """Return a text that is equal for runs whose untrained encoders have the same results."""
    sections = ("seed", "model.", "views.", "data.", "evaluate.", *(f"{name}." for name in PROTOCOLS))
    # The number of views and the sizes of a step only matter to the training.
    other = (*_NOT_OF_ENCODER, "views.num_views", "data.images_per_step")
    settings = plain_settings(config)
    kept = {key: value for key, value in settings.items() if key.startswith(sections) and not key.startswith(other)}
    return json.dumps(kept)


def why_unfinished(config: Config) -> str:
    """Say in a few words why the run is not finished; empty if it is trained, and evaluated with these settings."""
    if is_trained(config):
        return NOT_EVALUATED if missing(config, last_checkpoint(config)) else ""
    # Name the cause as exactly as the run recorded it.
    state = read_run(Path(config.run_dir)).state
    diverged = state.get("diverged")
    if isinstance(diverged, dict):
        return f"diverged at step {diverged.get('step')}: {diverged.get('reason')}"
    if state.get("status") == "failed":
        return f"failed: {state.get('message')}"
    if not state:
        return "not started"
    return f"{state.get('status')}, step {state.get('step')} of {state.get('total_steps', '?')}"
