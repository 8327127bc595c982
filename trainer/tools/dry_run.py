"""Describe a run before it starts, or in a dry run: steps, learning rate, slices, memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from trainer.config.loading import describe_sources
from trainer.config.schema import METHODS, Config, flatten
from trainer.data.index import Index, open_images
from trainer.data.index_build import list_class_folders
from trainer.data.tar_shards import list_shards
from trainer.data.tiny_imagenet import has_annotations
from trainer.distributed.cores import core_warnings, own_cores
from trainer.distributed.device import PRECISION_NAMES, autocast_dtype, compiles
from trainer.distributed.geometry import batch_norm_group_size, check_set_size
from trainer.distributed.ranks import launch_warnings
from trainer.errors import InputError
from trainer.run.commit import git_commit
from trainer.run.machine import device_name, tuned_for
from trainer.setup import Run, check_device
from trainer.tools.memory import memory_lines
from trainer.tools.run_plan import plan_lines, plan_warnings

_log = logging.getLogger(__name__)
_LARGE_VIEWS = 128  # pixels


def describe_run(run: Run) -> None:
    """Log the plan of a run that is about to start."""
    if run.sources:
        _log.info("%s", describe_sources(run.config, run.sources))
    device = f"{run.device} ({device_name(run.device)})"
    _log.info("commit %s, torch %s, device %s", git_commit() or "unknown", torch.__version__, device)
    precision = PRECISION_NAMES[autocast_dtype(run.config, run.device)]
    scaled = " with a scaled loss" if run.step.grad_scaler else ""
    _log.info("encoder and projector compute in %s%s, the loss in float32", precision, scaled)

    # Collect all warnings before logging them, so that they stand together above the plan.
    warnings = [
        *setting_warnings(run.config, run.ranks.world_size, run.device),
        *plan_warnings(run.config, len(run.index)),
        *launch_warnings(run.ranks),
    ]
    if run.ranks.is_first:
        threads = run.config.data.threads or own_cores()
        warnings += core_warnings(run.ranks, threads, on_gpu=run.device.type == "cuda")
        warnings += evaluation_warnings(run.config, run.index)
    for line in warnings:
        _log.warning("%s", line)
    for line in plan_lines(run.config, len(run.index), run.ranks.world_size):
        _log.info("%s", line)


def setting_warnings(config: Config, world_size: int, device: torch.device) -> list[str]:
    """Describe the settings that have no effect in this run, or that make it slow."""
    lines = _settings_of_other_methods(config)
    # Each block below checks one setting against the device or another setting.
    on_gpu = device.type == "cuda"
    compiled = compiles(config, device)
    over_ranks = batch_norm_group_size(config, world_size) > 1
    if on_gpu and over_ranks and not compiled and config.model.batch_norm_backend == "torch":
        lines.append(
            f"compile is false with model.batch_norm_ranks {config.model.batch_norm_ranks}: BatchNorm then runs as separate "
            "operations, which keep about half as much memory again and take more time; set compile to auto"
        )
    model = config.model
    if compiled and model.batch_norm_backend == "triton_conv" and model.activation_memory_budget < 1:
        lines.append(
            f"model.activation_memory_budget is {model.activation_memory_budget:g} with model.batch_norm_backend "
            "triton_conv: the compiler then computes the 1x1 convolutions again in backward; set the budget to 1"
        )
    if config.tuned_for and config.tuned_for != tuned_for(device):
        lines.append(
            f"some settings were measured on {config.tuned_for}, but this is {tuned_for(device)}: run `wmse tune` again"
        )
    if config.gradient_compression != "none" and world_size == 1:
        lines.append(f"gradient_compression {config.gradient_compression} has no effect: one rank sends nothing")
    if not on_gpu and config.views.size >= _LARGE_VIEWS:
        lines.append(
            f"no GPU is used: a step of {config.data.images_per_step} images with views of {config.views.size} px takes a "
            "minute or more on a CPU; docs/quickstart.md has settings for a small run"
        )
    if not on_gpu:
        ignored = [name for name in ("cuda_graphs", "autotune") if getattr(config, name)]
        lines += [f"{name} has no effect on a {device.type.upper()}" for name in ignored]
    budget = config.model.activation_memory_budget
    if budget < 1 and not compiled:
        lines.append(f"model.activation_memory_budget {budget:g} has no effect: the model is not compiled")
    after_drop = config.checkpoint.keep_every_epochs_after_drop
    if after_drop and config.optimizer.schedule != "drops":
        lines.append(
            f"checkpoint.keep_every_epochs_after_drop {after_drop} has no effect: optimizer.schedule is "
            f"{config.optimizer.schedule}, in which the learning rate never drops"
        )
    # Only the whitening cuts slices.
    simclr = config.simclr
    if config.method == "simclr" and not simclr.whiten and simclr.slice_size != type(simclr)().slice_size:
        lines.append(f"simclr.slice_size {simclr.slice_size} has no effect: simclr.whiten is false")
    hint = config.data.decoder_hint
    is_usable = on_gpu and all(hint)
    if any(hint) and not is_usable:
        lines.append(
            f"data.decoder_hint {list(hint)} has no effect: only the decoder of a GPU uses it, and needs both width and height"
        )
    return lines


def _settings_of_other_methods(config: Config) -> list[str]:
    defaults = flatten(Config())
    lines = []
    for key, value in flatten(config).items():
        section = key.partition(".")[0]
        is_of_other = section in METHODS and section != config.method
        if is_of_other and value != defaults[key]:
            lines.append(f"{key} {value} has no effect: method is {config.method}")
    return lines


def evaluation_warnings(config: Config, index: Index) -> list[str]:
    """Describe why the linear probe and k-NN will refuse the data set, as far as labels and names of folders show.

    Only the training split is indexed for this, because indexing another split may take minutes.

    index: index of the training split."""
    data = config.data
    root = Path(data.root).expanduser()
    # A set, because both settings may name the same split.
    problems = set()
    for name in (data.probe_split, data.test_split):
        if name:
            problems.add(_split_problem(root, name, index))
    # The probe then learns from the training split, whose labels are known.
    if not data.probe_split:
        classes = np.unique(index.labels[index.labels >= 0])
        if len(classes) < 2:
            few = "images of one class only" if len(classes) else "no labels"
            problems.add(f"the split {data.train_split!r} has {few}")
    return [
        f"the run can train on this data set, but cannot be evaluated on it: {problem} in {data.root}. The linear probe and "
        "k-NN need two labelled splits, data.probe_split and data.test_split"
        for problem in sorted(problems - {""})
    ]


def _split_problem(root: Path, name: str, index: Index) -> str:
    """Say why the split `name` cannot be used in an evaluation; empty if its folders show no reason."""
    # The classes of shards are inside the files, so they are not compared here.
    if list_shards(root, name):
        return ""
    if not (root / name).is_dir():
        return f"the split {name!r} does not exist"
    # The labels of Tiny ImageNet's val are in a file.
    if has_annotations(root / name):
        return ""
    if set(list_class_folders(root / name)).isdisjoint(index.class_names):
        return f"the split {name!r} has no folder with the name of a class of the split {index.split!r}"
    return ""


def dry_run(config: Config, world_size: int) -> Iterator[str]:
    """Describe the plan of a run and its memory, line by line, without starting it.

    The description is for a GPU, unless config.device is cpu. Without data.root, the number of images is
    data.expected_images. Raises InputError for settings that the run would refuse."""
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
        raise InputError(
            "data.root is empty and data.expected_images is 0: set one of them, so that steps can be counted"
        )
    check_set_size(config, num_images)
    return num_images
