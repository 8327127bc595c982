"""Checks of a run before `wmse launch` starts or submits it, and the summary that it prints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from trainer.cluster.jobs import NO_ANSWER, find_job
from trainer.cluster.runs import LOST_SECONDS, read_run
from trainer.cluster.site import Site
from trainer.cluster.snapshot import PACKAGES
from trainer.config.changes import changed_settings, plain_settings, refuse_changes
from trainer.config.loading import KEYS, load_config
from trainer.config.schema import Config, DataConfig
from trainer.data.index import open_images
from trainer.distributed.geometry import batch_norm_images, indivisible_images, micro_batches, usable_ranks
from trainer.errors import InputError
from trainer.run.checkpoint_files import newest_step
from trainer.run.folder import check_run_dir_is_set
from trainer.tools.run_plan import plan_lines, plan_warnings


@dataclass(frozen=True)
class Request:
    """Request of the command line."""

    config: Sequence[Path]
    settings: Sequence[str]
    """Words such as --seed 1, which override the config."""
    array: str
    """KEY=V1,V2,...: one run for each value; empty for a single run."""
    nodes: str
    """A number of nodes, or a range such as 4-8."""
    ranks_per_node: int
    site: Site
    with_evaluator: bool
    data_on_nodes: bool
    """Whether the data set is only visible from the compute nodes."""


def read_configs(request: Request) -> list[Config]:
    """Load the settings of every run, with absolute paths. Each run of an array has a folder below run_dir."""
    if not request.array:
        return [absolute(load_config(request.config, request.settings))]
    key, equals, listed = request.array.partition("=")
    values = [value for value in listed.split(",") if value]
    # run_dir is the common folder, in which each run gets a folder of its value.
    key_is_allowed = key == "config" or (key in KEYS and key != "run_dir")
    if not equals or not values or not key_is_allowed:
        raise InputError(
            f"--array is {request.array!r}: give a setting and its values, as seed=0,1,2, or config=a.yaml,b.yaml"
        )
    if len(set(values)) < len(values):
        raise InputError(f"--array is {request.array!r}: a value is listed twice, remove one")
    configs = []
    for value in values:
        if key == "config":
            config = load_config(Path(value), request.settings)
            name = Path(value).stem
        else:
            config = load_config(request.config, [*request.settings, f"--{key}={value}"])
            name = value.replace("/", "_")
        short_key = key.rpartition(".")[2]
        configs.append(absolute(config, f"{short_key}-{name}"))
    if len({config.run_dir for config in configs}) < len(configs):
        raise InputError(
            f"--array is {request.array!r}: two values would share a run folder, give the files different names"
        )
    return configs


def absolute(config: Config, subfolder: str = "") -> Config:
    """Make the paths absolute, since the job starts in another working directory.

    subfolder: folder of the run in run_dir."""
    check_run_dir_is_set(config.run_dir)

    # An empty path means that the setting is not used.
    def full(path: str) -> str:
        return os.path.abspath(os.path.expanduser(path)) if path else path

    folder = os.path.join(config.run_dir, subfolder)
    data = replace(config.data, root=full(config.data.root))
    return replace(
        config,
        run_dir=full(folder),
        init_from=full(config.init_from),
        data=data,
    )


def fit_to_nodes(config: Config, nodes: tuple[int, int], ranks_per_node: int) -> Config:
    """Adapt the settings so that the run can train on any number of nodes in the range.

    The global batch stays the same. The micro-batch of a rank is that of the largest number of nodes, so that the memory
    suffices."""
    least, most = nodes
    if least == most:
        return config
    # SLURM may give any number of nodes in the range, and not every number divides the global batch.
    config = replace(config, allow_idle_ranks=True)
    if config.optimizer.images_per_micro_batch == 0:
        images_per_rank = config.data.images_per_step // usable_ranks(config, most * ranks_per_node)
        micro_batch = images_per_rank // micro_batches(config, images_per_rank)
        # On many nodes a rank may hold a part of a slice only. With fewer nodes a micro-batch must hold whole slices.
        micro_batch = max(micro_batch, indivisible_images(config))
        optimizer = replace(config.optimizer, images_per_micro_batch=micro_batch, accumulation_steps=1)
        config = replace(config, optimizer=optimizer)
    return config


def check_run(config: Config, nodes: tuple[int, int], request: Request) -> None:
    """Check a run and print a summary. Raises InputError if it cannot train."""
    lines = describe_run(config, nodes, request)
    _refuse_active(Path(config.run_dir))
    print(f"run {config.run_dir}")
    print("\n".join(f"  {line}" for line in lines))


def describe_run(config: Config, nodes: tuple[int, int], request: Request) -> list[str]:
    """Describe the plan of a run, with its warnings. Raises InputError if the run cannot train in its folder."""
    run_dir = Path(config.run_dir)
    if not config.run_dir.isprintable() or "%" in config.run_dir:
        raise InputError(
            f"run_dir is {config.run_dir!r}, but names in batch scripts may not have % or control characters: use another name"
        )
    # The snapshot of the code would copy the run, and with it the snapshot.
    if any(run_dir.is_relative_to(package) for package in PACKAGES):
        raise InputError(f"run_dir {run_dir} is inside the code of this program: use a folder elsewhere")
    if os.path.isdir(run_dir):
        refuse_other_settings(config, run_dir)
    num_images = _count_images(config, request)
    least, most = nodes
    ranks_per_node = request.ranks_per_node
    if least == most:
        lines = plan_lines(config, num_images, most * ranks_per_node)
    else:
        lines = _range_lines(config, least, most, ranks_per_node)
        lines.append(f"on {most} node(s):")
        lines += plan_lines(config, num_images, usable_ranks(config, most * ranks_per_node))
    return lines + [f"warning: {line}" for line in plan_warnings(config, num_images)]


def _count_images(config: Config, request: Request) -> int:
    """Return the number of training images. Raises InputError if the data set cannot be used."""
    data = config.data
    if not request.data_on_nodes:
        # The evaluator also needs the test split: report an error now rather than in its job.
        if request.with_evaluator:
            _images_in(data, data.test_split)
        return _images_in(data, data.train_split)
    if not data.expected_images:
        raise InputError(
            "--data_on_nodes: set data.expected_images, since the images cannot be counted on this machine"
        )
    return data.expected_images


@cache
def _images_in(data: DataConfig, split: str) -> int:
    """Return the number of images in a split. Several runs of one command open it once."""
    return len(open_images(data, split, progress=True))


def _refuse_active(run_dir: Path) -> None:
    """Raise InputError if a run is active in the folder."""
    run = read_run(run_dir)
    job = find_job(run.job_id)
    # If SLURM does not answer, believe the state of a run that has ended.
    has_ended = job is not None and job.state == NO_ANSWER and run.is_over(None)
    is_alive = run.silent_seconds < LOST_SECONDS and not run.process_is_gone
    holder = ""
    if job and job.is_active and not has_ended:
        holder = f"SLURM job {run.job_id} ({job.state})"
    elif run.status in ("starting", "running") and is_alive:
        holder = f"process {run.state.get('pid')} on {run.state.get('host')}"
    if holder:
        raise InputError(
            f"{run_dir} is in use by {holder}: end it with `wmse stop {run_dir}`, or use another --run_dir"
        )


def refuse_other_settings(config: Config, run_dir: Path) -> None:
    """Raise InputError if the run in the folder has other settings."""
    # Without a checkpoint the run starts again, with any settings.
    saved = run_dir / "config.yaml"
    if newest_step(run_dir) and saved.exists() and not config.allow_changes:
        before = plain_settings(load_config(saved, []))
        refuse_changes(run_dir, changed_settings(config, before))


def _range_lines(config: Config, least: int, most: int, ranks_per_node: int) -> list[str]:
    """Describe the division of a step for each number of nodes in a range."""
    lines = []
    # BatchNorm's statistics are the only part of a step that depends on the number of nodes.
    batch_norm_sizes = set()
    for nodes in range(least, most + 1):
        available = nodes * ranks_per_node
        used = usable_ranks(config, available)
        lines.append(_nodes_line(config, nodes, available, used))
        batch_norm_sizes.add(batch_norm_images(config, used))
    if len(batch_norm_sizes) > 1:
        lines.append("BatchNorm differs between these numbers of nodes, and so will the results; the rest is the same")
    return lines


def _nodes_line(config: Config, nodes: int, available: int, used: int) -> str:
    """Describe the division of a step on this number of nodes. available, used: numbers of ranks."""
    images_per_rank = config.data.images_per_step // used
    count = micro_batches(config, images_per_rank)
    idle = ""
    if used < available:
        idle = f" ({available - used} of {available} idle: the global batch cannot be divided evenly among all)"
    return (
        f"{nodes} node(s): {used} ranks{idle}, {images_per_rank} images each in {count} micro-batch(es) of "
        f"{images_per_rank // count}, BatchNorm statistics of {batch_norm_images(config, used)} images"
    )
