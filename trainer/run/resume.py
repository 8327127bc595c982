"""Save a run in a checkpoint, and resume it from one."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import torch

from trainer.config.changes import changed_settings, plain_settings, refuse_changes
from trainer.data.plan import PLAN_VERSION
from trainer.data.quarantine import drop_quarantine_after
from trainer.distributed.geometry import batch_norm_images
from trainer.distributed.process_group import agree
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.metrics import MetricSums
from trainer.run.checkpoint import FORMAT, load_newest, plain_names
from trainer.run.checkpoint_check import first_difference, wanted_moments
from trainer.run.saver import Saver
from trainer.setup import Run

_log = logging.getLogger(__name__)
_LOOKS = 20
_LOOK_SECONDS = 5.0  # the directory cache of NFS holds for up to a minute


def save(run: Run, saver: Saver, step: int, sums: MetricSums) -> None:
    """Have the checkpoint after `step` updates written. Every rank calls this; the first one writes."""
    metric_sums = sums.state(run.ranks)
    if not run.ranks.is_first:
        return
    content = {
        "step": step,
        "model": plain_names(run.step.method.networks.state_dict()),
        "optimizer": run.step.optimizer.state_dict(),
        "config": plain_settings(run.config),
        "plan_version": PLAN_VERSION,
        "data": {"fingerprint": run.index.fingerprint, "images": len(run.index)},
        "world_size": run.ranks.world_size,
        "metric_sums": metric_sums,
        "loss_scale": run.step.grad_scaler.state() if run.step.grad_scaler else None,
    }
    saver.save(content)


def resume(run: Run, sums: MetricSums) -> int:
    """Load the newest checkpoint of the run folder, if there is one; returns the number of updates made so far.

    Raises InputError where settings that shape the result, or the images, are not those of the checkpoint."""
    content = _find_same(run, sums)
    step = 0 if content is None else _restore(run, content, sums)
    if run.ranks.is_first:
        drop_quarantine_after(run.quarantine, step)
    agree(torch.zeros(1, device=run.device), run.ranks)  # no rank may append to the quarantine before that
    return step


def _find_same(run: Run, sums: MetricSums) -> dict[str, Any] | None:
    """Load the newest usable checkpoint, the same on all ranks; None if there is none.

    A network file system may show a new file late to other nodes: ranks that find an older one look again for a while. Raises
    InputError if the ranks still differ then."""
    check = partial(_check_usable, run, sums)
    content = load_newest(run.checkpoints, check)
    for look in range(_LOOKS):
        step = 0 if content is None else int(content["step"])
        newest, oldest = agree(torch.tensor([step, -step], device=run.device), run.ranks).tolist()
        if newest == -oldest:
            return content
        if look == 0:
            _log.warning("this rank finds the checkpoint of step %d, others up to %d: looking again", step, newest)
        time.sleep(_LOOK_SECONDS)
        if step < newest:
            content = load_newest(run.checkpoints, check)
    raise InputError(
        f"{run.checkpoints}: this rank finds the checkpoint of step {step}, others those of {-oldest} to {newest}: the "
        "file system shows nodes different files. Start again when it has settled"
    )


def _check_usable(run: Run, sums: MetricSums, content: dict[str, Any]) -> None:
    """Raise InputError for a checkpoint that lacks a part, or whose settings are those of the run but whose tensors don't
    fit."""
    if content["format"] != FORMAT:
        raise InputError(
            f"an earlier version of this program wrote it (format {content['format']}, now {FORMAT}): start from its encoder "
            "with --init_from and another --run_dir"
        )
    wanted: dict[str, Any] = {"optimizer": dict, "config": dict, "plan_version": int, "world_size": int}
    wanted |= {
        "data": {"fingerprint": str, "images": int},
        "metric_sums": sums.state(Ranks()),
    }
    difference = first_difference({key: content[key] for key in wanted if key in content}, wanted, "checkpoint")
    odd = [key for key, value in content["config"].items() if isinstance(value, torch.Tensor)] if not difference else []
    if odd:
        difference = f"checkpoint.config.{odd[0]} is a Tensor"
    if not difference and not _changes(run, content):
        difference = _misfit(run, content)
        if content["step"] > run.schedule.total_steps:
            difference = f"step {content['step']} is beyond the run's last, {run.schedule.total_steps}"
    if difference:
        raise InputError(difference)


def _misfit(run: Run, content: dict[str, Any]) -> str | None:
    """Describe where a checkpoint does not fit this model and optimizer; None if it fits."""
    optimizer = content["optimizer"]
    moments = optimizer.get("state")
    scale = run.step.grad_scaler.state() if run.step.grad_scaler else None
    pairs: list[tuple[str, Any, dict[Any, Any]]] = [
        ("model", content["model"], plain_names(run.step.method.networks.state_dict()))
    ]
    if moments != {}:  # none where no update was made yet
        pairs.append(("optimizer.state", moments, wanted_moments(run.step.optimizer, run.config.optimizer)))
    if scale:
        pairs.append(("loss_scale", content.get("loss_scale"), scale))
    return next((text for name, found, wanted in pairs if (text := first_difference(found, wanted, name))), None)


def _restore(run: Run, content: dict[str, Any], sums: MetricSums) -> int:
    changed = _changes(run, content)
    if not run.config.allow_changes:
        refuse_changes(run.run_dir, changed)
    elif changed:
        _log.warning("continuing with changed settings:\n%s", "\n".join(f"  - {line}" for line in changed))
    misfit = _misfit(run, content)
    if misfit:
        raise InputError(
            f"the checkpoint of step {content['step']} in {run.checkpoints} does not fit this model or optimizer: {misfit}\n"
            "Use its settings again, take another --run_dir, or start from its encoder with --init_from"
        )
    # the names were compared; torch would ask for a number of batches
    run.step.method.networks.load_state_dict(content["model"], strict=False)
    # the options follow from the settings, which may have been changed on purpose
    options = run.step.optimizer.state_dict()["param_groups"]
    run.step.optimizer.load_state_dict({"state": content["optimizer"]["state"], "param_groups": options})
    sums.load(content["metric_sums"])
    if run.step.grad_scaler and content.get("loss_scale"):
        run.step.grad_scaler.load(content["loss_scale"])
    _log_ranks(run, int(content["world_size"]))
    _log.info("continuing after step %d", content["step"])
    return int(content["step"])


def _log_ranks(run: Run, world_size: int) -> None:
    """Log what changes if the number of ranks is not the `world_size` of before."""
    if world_size == run.ranks.world_size:
        return
    _log.info("saved by %d rank(s), continuing with %d", world_size, run.ranks.world_size)
    if run.config.allow_changes:  # with other settings than before there is nothing to compare
        return
    before = batch_norm_images(run.config, world_size)
    now = batch_norm_images(run.config, run.ranks.world_size)
    change = "too" if before == now else f"takes its statistics from {now} images at a time instead of {before}"
    _log.info("images, views and slices of each step stay the same, BatchNorm %s", change)


def _changes(run: Run, content: dict[str, Any]) -> list[str]:
    """List what shapes the result and differs from the checkpoint."""
    changed = changed_settings(run.config, content["config"])
    if content["plan_version"] != PLAN_VERSION:
        changed.append(f"plan version: {content['plan_version']} -> {PLAN_VERSION} (other augmentations)")
    if content["data"]["fingerprint"] != run.index.fingerprint:
        changed.append(f"training images: {content['data']['images']} -> {len(run.index)}, or other files or labels")
    return changed
