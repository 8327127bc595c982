"""What must hold before `wmse launch` starts or submits a run, and what it tells the user about it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.cluster.jobs import NO_ANSWER, find_job
from trainer.cluster.runs import LOST_SECONDS, read_run
from trainer.cluster.site import Site
from trainer.cluster.snapshot import PACKAGES
from trainer.config.changes import changed_settings, plain_settings, refuse_changes
from trainer.config.loading import KEYS, load_config
from trainer.config.schema import Config
from trainer.data.index import open_images
from trainer.distributed.geometry import batch_norm_images, indivisible_images, micro_batches, usable_ranks
from trainer.errors import InputError
from trainer.run.checkpoint_files import newest_step
from trainer.run.folder import check_run_dir_is_set
from trainer.tools.run_plan import plan_lines, plan_warnings


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    config: Sequence[Path]
    settings: Sequence[str]
    """Words such as --seed 1, over the config."""
    array: str
    """KEY=V1,V2,...: a run for each value; empty for a single run."""
    nodes: str
    """A number of nodes, or a range such as 4-8."""
    ranks_per_node: int
    site: Site
    with_evaluator: bool
    data_on_nodes: bool
    """The data set is not visible from this machine."""


def read_configs(request: Request) -> list[Config]:
    """The settings of every run, with absolute paths. An array has a folder per value below the run_dir given."""
    if not request.array:
        return [_absolute(load_config(request.config, request.settings))]
    key, equals, listed = request.array.partition("=")
    values = [value for value in listed.split(",") if value]
    if not equals or not values or (key != "config" and key not in KEYS) or (key == "run_dir"):
        raise InputError(
            f"--array is {request.array!r}: give a setting and its values, as seed=0,1,2, or config=a.yaml,b.yaml"
        )
    if len(set(values)) < len(values):
        raise InputError(f"--array is {request.array!r}: a value is listed twice")
    configs = []
    for value in values:
        config = (
            load_config(Path(value), request.settings)
            if key == "config"
            else load_config(request.config, [*request.settings, f"--{key}={value}"])
        )
        name = Path(value).stem if key == "config" else value.replace("/", "_")
        configs.append(_absolute(config, f"{key.rpartition('.')[2]}-{name}"))
    if len({config.run_dir for config in configs}) < len(configs):
        raise InputError(
            f"--array is {request.array!r}: two values would share a run folder, give the files other names"
        )
    return configs


def _absolute(config: Config, name: str = "") -> Config:
    """Make the paths absolute: the job starts in another working directory. name: of a folder below the run_dir."""
    check_run_dir_is_set(config.run_dir)

    def full(path: str) -> str:
        return os.path.abspath(os.path.expanduser(path)) if path else path

    data = replace(config.data, root=full(config.data.root))
    return replace(
        config, run_dir=full(os.path.join(config.run_dir, name)), init_from=full(config.init_from), data=data
    )


def fit_to_nodes(config: Config, nodes: tuple[int, int], ranks_per_node: int) -> Config:
    """Adapt the settings so that the run trains on any number of nodes in the range: the global batch stays, and a rank puts as
    many images through the model at once as on the largest number of nodes, so that the memory suffices."""
    least, most = nodes
    if least == most:
        return config
    config = replace(config, allow_idle_ranks=True)
    if config.optimizer.images_per_micro_batch == 0:
        per_rank = config.data.images_per_step // usable_ranks(config, most * ranks_per_node)
        # on many nodes a rank may hold a part of a slice; a micro-batch, which fewer nodes need, holds whole slices
        largest = max(per_rank // micro_batches(config, per_rank), indivisible_images(config))
        optimizer = replace(config.optimizer, images_per_micro_batch=largest, accumulation_steps=1)
        config = replace(config, optimizer=optimizer)
    return config


def check_run(config: Config, nodes: tuple[int, int], request: Request) -> None:
    """Print what the run will do. Raises InputError if it can't train."""
    run_dir = Path(config.run_dir)
    if not config.run_dir.isprintable() or "%" in config.run_dir:
        raise InputError(f"run_dir is {config.run_dir!r}: batch scripts take no % and no control characters in names")
    if any(run_dir.is_relative_to(package) for package in PACKAGES):
        raise InputError(f"run_dir {run_dir} is inside the program itself: take a folder elsewhere")
    if os.path.isdir(run_dir):
        _check_folder(config, run_dir)
    if not request.data_on_nodes:
        num_images = len(open_images(config.data, config.data.train_split, progress=True))
        if request.with_evaluator:
            open_images(config.data, config.data.test_split, progress=True)
    elif config.data.expected_images:
        num_images = config.data.expected_images
    else:
        raise InputError("--data_on_nodes: set data.expected_images, since the data set can't be counted here")
    print(f"run {run_dir}")
    least, most = nodes
    if least == most:
        lines = plan_lines(config, num_images, most * request.ranks_per_node)
    else:
        used = {count: usable_ranks(config, count * request.ranks_per_node) for count in range(least, most + 1)}
        lines = [_nodes_line(config, count, count * request.ranks_per_node, ranks) for count, ranks in used.items()]
        if len({batch_norm_images(config, ranks) for ranks in used.values()}) > 1:
            lines.append(
                "BatchNorm differs between these numbers of nodes, and so will the results; the rest is the same"
            )
        lines.append(f"on {most} node(s):")
        lines += plan_lines(config, num_images, used[most])
    lines += [f"warning: {line}" for line in plan_warnings(config, num_images)]
    print("\n".join(f"  {line}" for line in lines))


def _check_folder(config: Config, run_dir: Path) -> None:
    """Raises InputError if something runs there already, or if the run there has other settings."""
    run = read_run(run_dir)
    job = find_job(run.job_id)
    if job and job.is_active and not (job.state == NO_ANSWER and run.is_over(None)):
        who = f"SLURM job {run.job_id} ({job.state})"
    elif run.status in ("starting", "running") and run.silent_seconds < LOST_SECONDS and not run.process_is_gone:
        who = f"process {run.state.get('pid')} on {run.state.get('host')}"
    else:
        who = ""
    if who:
        raise InputError(
            f"{who} has this run, {run_dir}: `wmse stop {run_dir}` ends it. A folder takes one run at a time"
        )
    if newest_step(run_dir) and (run_dir / "config.yaml").exists() and not config.allow_changes:
        then = plain_settings(load_config(run_dir / "config.yaml", []))
        refuse_changes(run_dir, changed_settings(config, then))


def _nodes_line(config: Config, nodes: int, available: int, used: int) -> str:
    """How a step is spread over this number of nodes. available, used: ranks."""
    per_rank = config.data.images_per_step // used
    parts = micro_batches(config, per_rank)
    idle = (
        f" ({available - used} of {available} idle: the global batch can't be divided evenly among all)"
        if used < available
        else ""
    )
    return (
        f"{nodes} node(s): {used} ranks{idle}, {per_rank} images each in {parts} micro-batch(es) of {per_rank // parts}, "
        f"BatchNorm statistics of {batch_norm_images(config, used)} images"
    )
