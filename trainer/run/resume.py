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
from trainer.run import digests
from trainer.run.checkpoint import FORMAT, load_newest, plain_names
from trainer.run.checkpoint_check import first_difference, wanted_moments
from trainer.run.cost import RunCost
from trainer.run.saver import Saver
from trainer.setup import Run

_log = logging.getLogger(__name__)
_LOOKS = 20
_LOOK_SECONDS = 5.0  # NFS caches directories for up to a minute


def save(run: Run, saver: Saver, step: int, sums: MetricSums, cost: RunCost | None = None) -> None:
    """Start to write the checkpoint after `step` updates. Every rank calls this, rank 0 writes.

    cost: account of the run; None: it is not kept."""
    metric_sums, rows = sums.state_and_rows(run.ranks)  # a collective
    if not run.ranks.is_first:
        return
    grad_scaler = run.step.grad_scaler
    content = {
        "step": step,
        "model": plain_names(run.step.method.networks.state_dict()),
        "optimizer": run.step.optimizer.state_dict(),
        "config": plain_settings(run.config),
        "plan_version": PLAN_VERSION,
        "data": {"fingerprint": run.index.fingerprint, "images": len(run.index)},
        "class_names": run.index.class_names,
        "world_size": run.ranks.world_size,
        "metric_sums": metric_sums,
        "digests": sums.digests.content(rows),
        "loss_scale": grad_scaler.state() if grad_scaler else None,
        "online_probe": run.step.online_probe.state() if run.step.online_probe else None,
        "cost": cost.content() if cost else None,
    }
    saver.save(content)


def resume(run: Run, sums: MetricSums, cost: RunCost | None = None) -> int:
    """Load the newest checkpoint of the run folder, if it has one. Returns the number of updates made so far.

    cost: account of the run, which learns what is repeated; None: it is not kept.
    Raises InputError if the images, or settings that change the result, differ from those of the checkpoint."""
    content = _find_same(run, sums)
    # All ranks have found the same step, so all of them start fresh or all of them resume.
    step = 0 if content is None else _restore(run, content, sums)
    if cost:
        cost.resumed((content or {}).get("cost"), from_checkpoint=content is not None)
    if run.ranks.is_first:
        drop_quarantine_after(run.quarantine, step)
    # A barrier: no rank may append to quarantine.jsonl before rank 0 has rewritten it.
    agree(torch.zeros(1, device=run.device), run.ranks)
    return step


def _find_same(run: Run, sums: MetricSums) -> dict[str, Any] | None:
    """Load the newest usable checkpoint, the same on all ranks; None if the run has no checkpoint.

    A network file system may show a new file late to other nodes, so ranks that find an older checkpoint look again for
    a while. Raises InputError if the ranks still differ then."""
    check = partial(_check_usable, run, sums)
    content = load_newest(run.checkpoints, check)
    for look in range(_LOOKS):
        step = 0 if content is None else int(content["step"])
        # `agree` returns maxima; the maximum of the negative steps gives the minimum.
        newest, negative_oldest = agree(torch.tensor([step, -step], device=run.device), run.ranks).tolist()
        oldest = -negative_oldest
        if newest == oldest:
            return content
        if look == 0:
            _log.warning(
                "this rank finds the checkpoint of step %d, other ranks up to %d: it looks again", step, newest
            )
        time.sleep(_LOOK_SECONDS)
        if step < newest:
            content = load_newest(run.checkpoints, check)
    raise InputError(
        f"{run.checkpoints}: this rank finds the checkpoint of step {step}, other ranks those of steps {oldest} to {newest}: "
        "the file system shows different files to different nodes. Start the run again in some minutes"
    )


def _check_usable(run: Run, sums: MetricSums, content: dict[str, Any]) -> None:
    """Raise InputError if a checkpoint lacks an entry, or if it has the run's settings but other tensors."""
    if content["format"] != FORMAT:
        raise InputError(
            f"an earlier version of this program wrote it (format {content['format']}, now {FORMAT}): start from its encoder "
            "with --init_from and another --run_dir"
        )
    # Entries and their types.
    wanted: dict[str, Any] = {
        "optimizer": dict,
        "config": dict,
        "plan_version": int,
        "world_size": int,
        "data": {"fingerprint": str, "images": int},
        "metric_sums": sums.state(Ranks()),
    }
    if "digests" in content:  # an older program wrote none
        wanted["digests"] = digests.WANTED
    found = {key: content[key] for key in wanted if key in content}
    difference = first_difference(found, wanted, "checkpoint")
    if difference:
        raise InputError(difference)
    for key, value in content["config"].items():
        if isinstance(value, torch.Tensor):
            raise InputError(f"checkpoint.config.{key} is a Tensor")
    # With changed settings the tensors may well not fit; `_restore` then names the changes.
    if _changes(run, content):
        return
    if content["step"] > run.schedule.total_steps:
        raise InputError(f"step {content['step']} is beyond the run's last step, {run.schedule.total_steps}")
    misfit = _misfit(run, content)
    if misfit:
        raise InputError(misfit)


def _misfit(run: Run, content: dict[str, Any]) -> str | None:
    """Describe where a checkpoint does not fit this model and optimizer; None if it fits."""
    model = plain_names(run.step.method.networks.state_dict())
    misfit = first_difference(content["model"], model, "model")
    moments = content["optimizer"].get("state")
    if not misfit and moments != {}:  # an optimizer has no moments before its first update
        expected = wanted_moments(run.step.optimizer, run.config.optimizer)
        misfit = first_difference(moments, expected, "optimizer.state")
    if not misfit and run.step.grad_scaler:
        misfit = first_difference(content.get("loss_scale"), run.step.grad_scaler.state(), "loss_scale")
    return misfit


def _restore(run: Run, content: dict[str, Any], sums: MetricSums) -> int:
    """Load a checkpoint into model, optimizer, metric sums and loss scale. Returns its step.

    Raises InputError if its settings differ and allow_changes is false, or if its tensors do not fit."""
    step = int(content["step"])
    changed = _changes(run, content)
    if not run.config.allow_changes:
        refuse_changes(run.run_dir, changed)
    elif changed:
        listed = "\n".join(f"  - {line}" for line in changed)
        _log.warning("continuing with changed settings:\n%s", listed)
    misfit = _misfit(run, content)
    if misfit:
        raise InputError(
            f"the checkpoint of step {step} in {run.checkpoints} does not fit this model or optimizer: {misfit}\n"
            "Use its settings again, use another --run_dir, or start from its encoder with --init_from"
        )
    # `_misfit` has compared the names. A strict load would ask for BatchNorm's number of batches, which is not saved.
    run.step.method.networks.load_state_dict(content["model"], strict=False)
    # The optimizer's options come from the settings, which the user may have changed on purpose.
    options = run.step.optimizer.state_dict()["param_groups"]
    moments = content["optimizer"]["state"]
    run.step.optimizer.load_state_dict({"state": moments, "param_groups": options})
    sums.load(content["metric_sums"])
    sums.digests.load(content.get("digests"), step, is_first=run.ranks.is_first)
    if "digests" not in content:
        _log.warning("the checkpoint of step %d has no digests of rows and losses: they start anew", step)
    loss_scale = content.get("loss_scale")
    if run.step.grad_scaler and loss_scale:
        run.step.grad_scaler.load(loss_scale)
    probe = run.step.online_probe
    if probe and not (content.get("online_probe") and probe.load(content["online_probe"])):
        _log.warning("the checkpoint of step %d has no online probe of these classes: it starts at zero", step)
    _log_ranks(run, int(content["world_size"]))
    _log.info("continuing after step %d", step)
    return step


def _log_ranks(run: Run, old_world_size: int) -> None:
    """Log what a changed number of ranks changes."""
    world_size = run.ranks.world_size
    if old_world_size == world_size:
        return
    _log.info("%d rank(s) saved the checkpoint, the run continues with %d", old_world_size, world_size)
    if run.config.allow_changes:  # the old settings may divide the images differently
        return
    before = batch_norm_images(run.config, old_world_size)
    now = batch_norm_images(run.config, world_size)
    change = "too" if before == now else f"takes its statistics from {now} images at a time instead of {before}"
    _log.info("images, views and slices of each step stay the same, BatchNorm %s", change)


def _changes(run: Run, content: dict[str, Any]) -> list[str]:
    """List the differences from the checkpoint that change the result: settings, plan version, images."""
    changed = changed_settings(run.config, content["config"])
    plan_version = content["plan_version"]
    if plan_version != PLAN_VERSION:
        changed.append(f"plan version: {plan_version} -> {PLAN_VERSION} (other augmentations)")
    data = content["data"]
    if data["fingerprint"] != run.index.fingerprint:
        changed.append(f"training images: {data['images']} -> {len(run.index)}, or other files or labels")
    return changed
