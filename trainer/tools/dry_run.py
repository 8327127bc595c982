"""Describe at the start, or in a dry run, what a run is going to do: steps, rate, slices, memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from trainer.config.loading import describe_sources
from trainer.config.schema import Config
from trainer.data.index import Index, open_images
from trainer.data.index_build import list_class_folders
from trainer.data.tar_shards import list_shards
from trainer.distributed.cores import core_warnings, own_cores
from trainer.distributed.device import PRECISION_NAMES, autocast_dtype, compiles
from trainer.distributed.geometry import check_set_size
from trainer.distributed.ranks import launch_warnings
from trainer.errors import InputError
from trainer.run.commit import git_commit
from trainer.setup import Run, check_device
from trainer.tools.memory import memory_lines
from trainer.tools.run_plan import plan_lines, plan_warnings

_log = logging.getLogger(__name__)


def describe_run(run: Run) -> None:
    """Log the plan of a run that is about to start."""
    if run.sources:
        _log.info("%s", describe_sources(run.config, run.sources))
    _log.info("commit %s, torch %s, device %s", git_commit() or "unknown", torch.__version__, run.device)
    precision = PRECISION_NAMES[autocast_dtype(run.config, run.device)]
    scaled = " with a scaled loss" if run.step.grad_scaler else ""
    _log.info("encoder and projector in %s%s, whitening and loss in float32", precision, scaled)
    threads = run.config.data.threads or own_cores()
    for line in [
        *setting_warnings(run.config, run.ranks.world_size, run.device),
        *plan_warnings(run.config, len(run.index)),
        *launch_warnings(run.ranks),
        *(core_warnings(run.ranks, threads, on_gpu=run.device.type == "cuda") if run.ranks.is_first else []),
        *(evaluation_warnings(run.config, run.index) if run.ranks.is_first else []),
    ]:
        _log.warning(line)
    for line in plan_lines(run.config, len(run.index), run.ranks.world_size):
        _log.info(line)


def setting_warnings(config: Config, world_size: int, device: torch.device) -> list[str]:
    """Describe the settings that have no effect in this run, or make it slow."""
    lines = []
    on_gpu = device.type == "cuda"
    if on_gpu and world_size > 1 and config.model.batch_norm_ranks == "all" and not compiles(config, device):
        lines.append(
            "compile false with model.batch_norm_ranks all: BatchNorm then runs as separate operations, which keep about half "
            "as much memory again and take more time; set compile to auto"
        )
    if config.gradient_compression != "none" and world_size == 1:
        lines.append(f"gradient_compression {config.gradient_compression} has no effect: one rank sends nothing")
    lines += [
        f"{name} has no effect on a {device.type.upper()}"
        for name in ("cuda_graphs", "autotune")
        if getattr(config, name) and device.type != "cuda"
    ]
    budget = config.model.activation_memory_budget
    if budget < 1 and not compiles(config, device):
        lines.append(f"model.activation_memory_budget {budget:g} has no effect: the model is not compiled")
    after_drop = config.checkpoint.keep_every_epochs_after_drop
    if after_drop and config.optimizer.schedule != "drops":
        lines.append(
            f"checkpoint.keep_every_epochs_after_drop {after_drop} has no effect: optimizer.schedule is "
            f"{config.optimizer.schedule}, whose rate never drops"
        )
    hint = config.data.decoder_hint
    if any(hint) and (device.type != "cuda" or not all(hint)):
        lines.append(
            f"data.decoder_hint {list(hint)} has no effect: it is for a GPU's decoder, and takes both a width and a height"
        )
    return lines


def evaluation_warnings(config: Config, index: Index) -> list[str]:
    """Describe why the linear probe and k-NN will refuse the set, as far as labels and the names of folders show.

    index: the training split. The other splits are not indexed for this, since that may take minutes."""
    data = config.data
    problems = [
        _split_problem(Path(data.root).expanduser(), name, index) for name in {data.probe_split, data.test_split} - {""}
    ]
    if not data.probe_split:
        labels = np.unique(index.labels[index.labels >= 0])
        few = "images of one class only" if len(labels) else "no labels"
        problems.append("" if len(labels) > 1 else f"the split {data.train_split!r} has {few}")
    return [
        f"the run can train on this set, but can't be evaluated on it: {problem} in {data.root}. The linear probe and k-NN "
        "need two labelled splits, data.probe_split and data.test_split"
        for problem in sorted(filter(None, problems))
    ]


def _split_problem(root: Path, name: str, index: Index) -> str:
    if list_shards(root, name):
        return ""
    if not (root / name).is_dir():
        return f"there is no split {name!r}"
    if set(list_class_folders(root / name)).isdisjoint(index.class_names):
        return f"the split {name!r} has no folder that is named like a class of the split {index.split!r}"
    return ""


def dry_run(config: Config, world_size: int) -> Iterator[str]:
    """Describe the plan of a run and its memory, line by line, without starting it: for a GPU, unless config.device is cpu.

    Without data.root, data.expected_images counts. Raises InputError for what the run would refuse."""
    device = torch.device("cpu" if config.device == "cpu" else "cuda")
    check_device(config, device)
    num_images = _count_images(config)
    yield from plan_lines(config, num_images, world_size)
    for line in [*plan_warnings(config, num_images), *setting_warnings(config, world_size, device)]:
        yield f"warning: {line}"
    yield from memory_lines(config, world_size)  # takes seconds


def _count_images(config: Config) -> int:
    if config.data.root:
        num_images = len(open_images(config.data, config.data.train_split, progress=True))
    elif config.data.expected_images:
        num_images = config.data.expected_images
    else:
        raise InputError("data.root is not set, and data.expected_images is 0: give one of them")
    check_set_size(config, num_images)
    return num_images
