"""Measure how a step grows with views, batch size, embedding size and ranks, and how a start grows with the data set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.bench.ceilings import sum_of_outputs
from trainer.bench.compute import FixedSteps, fixed_steps, peak_memory, sizes, synthetic_views
from trainer.bench.timing import MIN_CALLS, Window, interleave, spread, timed
from trainer.config.loading import save_config
from trainer.config.schema import Config
from trainer.data.index_file import IndexContent, write_index
from trainer.data.tar_shards import describe_shards
from trainer.distributed.device import choose_device
from trainer.distributed.geometry import indivisible_images
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.run.machine import provenance

VIEWS = (1, 2, 4, 8)  # 1: the networks without the loss, because W-MSE then has no pairs
BATCHES = (1, 2, 4)  # multiples of the images that the loss needs together
EMBEDDINGS = (8, 16, 32, 64, 128, 256)
RANKS = (1, 2)
SETS = (10_000, 100_000, 1_281_167)
START_UPS = 3  # processes for each size of the set
CHILD_SECONDS = 120.0  # stop a measuring process after this time
CLASSES = 1000
# About the medians of ImageNet.
IMAGE_BYTES = 110_000
IMAGE_HEIGHT = 375
IMAGE_WIDTH = 500

LINES = {  # what grows -> title and unit
    "num_views": ("views d", "ms a step"),
    "images_per_rank": ("batch", "ms a step"),
    "embedding_size": ("embedding", "ms a step"),
    "ranks": ("ranks", "ms a step"),
    "images_of_set": ("set", "seconds to the first plan, without imports"),
}

Point = dict[str, Any]


def bench_growth(config: Config, seconds: float, names: Iterable[str] = LINES) -> dict[str, Any]:
    """Measure the lines of these names on synthetic images in about `seconds`.

    Each of "lines" in the result has "line" (what grows), "title", "unit" and "points". A point is {line: value, "figure":
    median and quartiles}; one that could not be measured has "not_run" instead of the figure.

    All other settings stay those of the config, except that the slice size is twice the embedding size, and that the global
    batch size grows with the ranks. Points of the first three lines are measured in alternating windows in this process. Ranks,
    and the starts of the last line (`start_up`), are processes with one thread each.
    """
    names = list(names)
    device = choose_device(config, Ranks())
    planned = [step for name in names for step in _steps_of_line(name, config)]
    # Each point takes one share of the time; a point of the ranks takes two, because processes have to start.
    num_shares = len(planned)
    if "ranks" in names:
        num_shares += 2 * len(RANKS)
    share = seconds / max(num_shares, 1)
    points: dict[str, list[Point]] = {name: [] for name in names}
    measured = _alternating(planned, device, share * len(planned))
    for step, figures in zip(planned, measured, strict=True):
        points[step.line].append({step.line: step.value, **figures})
    if "ranks" in names:
        points["ranks"] = [_ranks_point(config, device, 2 * share, ranks) for ranks in RANKS]
    if "images_of_set" in names:
        points["images_of_set"] = [_set_point(count) for count in SETS]
    lines = []
    for name in names:
        title, unit = LINES[name]
        lines.append({"line": name, "title": title, "unit": unit, "points": points[name]})
    return {"bench": "growth", "lines": lines, **sizes(config, device, Ranks()), **provenance(device)}


class Step(NamedTuple):
    """A point of a line that is measured in this process."""

    line: str
    value: int
    config: Config
    without_loss: bool = False
    """Measure only forward and backward of the networks, with one view of each image."""


def _steps_of_line(line: str, config: Config) -> list[Step]:
    """Return the points of a line that are measured in this process; none for the ranks and the set."""
    steps = []
    if line == "num_views":
        for num_views in VIEWS:
            views = replace(config.views, num_views=max(2, num_views))
            steps.append(Step(line, num_views, replace(config, views=views), without_loss=num_views == 1))
    if line == "images_per_rank":
        for multiple in BATCHES:
            images = multiple * indivisible_images(config)
            data = replace(config.data, images_per_step=images)
            steps.append(Step(line, images, replace(config, data=data)))
    if line == "embedding_size":
        # Slices of 2k rows must divide the batch, and the block in which images are permuted.
        for size in EMBEDDINGS:
            rows = 2 * size
            if config.data.images_per_step % rows == 0 and config.wmse.permutation_block % rows == 0:
                steps.append(Step(line, size, _with_embedding(config, size)))
    return steps


def _with_embedding(config: Config, size: int) -> Config:
    model = replace(config.model, embedding_size=size)
    wmse = replace(config.wmse, slice_size=2 * size)
    return replace(config, model=model, wmse=wmse)


def _alternating(steps: Sequence[Step], device: torch.device, seconds: float) -> list[Point]:
    """Measure the milliseconds of a step at every point.

    The windows of the points alternate, so that a machine that slows down does not look like growth."""
    found: list[Point] = [{} for _ in steps]
    windows: dict[int, Window] = {}
    for number, step in enumerate(steps):
        try:
            whole = fixed_steps(step.config, Ranks(), device)
        except InputError as error:
            # The other settings do not allow this point.
            found[number] = {"not_run": str(error)}
            continue
        whole.warm_up()
        call: Callable[[], Any] = _networks_alone(whole) if step.without_loss else whole
        call()
        found[number] = peak_memory(device)
        windows[number] = timed(call, device)
    min_calls = MIN_CALLS[device.type]
    for number, samples in interleave(windows, seconds, min_calls=min_calls).items():
        found[number]["figure"] = spread(samples, 1e3)
    return found


def _networks_alone(steps: FixedSteps) -> Callable[[], None]:
    """Return a function that makes forward and backward of the networks on one view of each image, without a loss."""
    step = steps.step
    images = step.images.count
    pixels = synthetic_views(steps.config, images, steps.device)[:images]

    def forward_backward() -> None:
        dtype = step.autocast_dtype
        with torch.autocast(steps.device.type, dtype, enabled=dtype is not None):
            outputs = step.method.networks(pixels)
        sum_of_outputs(outputs).backward()
        step.optimizer.zero_grad(set_to_none=True)

    return forward_backward


def _ranks_point(config: Config, device: torch.device, seconds: float, ranks: int) -> Point:
    """Run `wmse bench compute` with `ranks` processes on this machine, each with the config's number of images."""
    point: Point = {"ranks": ranks}
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        return point | {"not_run": f"this machine has {torch.cuda.device_count()} GPU(s)"}
    # The processes read the config from a file, because they share no memory with this one.
    data = replace(config.data, images_per_step=ranks * config.data.images_per_step)
    with tempfile.TemporaryDirectory(prefix="bench_growth_") as folder:
        path = Path(folder) / "config.yaml"
        save_config(replace(config, data=data), path)
        argv = ["trainer", "bench", "compute", "--config", str(path), "--seconds", str(seconds)]
        if ranks > 1:
            argv = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", *argv]
        found = _child(argv)
    if "not_run" in found:
        return point | found
    return point | {"figure": found["step_ms"], "views_per_s": found["views_per_s"]}


def _set_point(num_images: int) -> Point:
    """Start fresh processes that open an index of `num_images` images. The figure is index_seconds."""
    with tempfile.TemporaryDirectory(prefix="bench_growth_") as folder:
        path = write_index_only(Path(folder), "train", num_images)
        size = path.stat().st_size
        images_per_step = str(min(4096, num_images))
        found = []
        for _ in range(START_UPS):
            # The process gets the time of its start, so that it can time its imports.
            one = _child(["trainer.bench.start_up", folder, "train", images_per_step, str(time.time())])
            if "not_run" in one:
                return {"images_of_set": num_images, **one}
            found.append(one)
    # All other keys are figures, with a value from each process.
    names = [name for name in found[0] if name not in ("process", "images")]
    figures = {name: spread([one[name] for one in found]) for name in names}
    processes = [one["process"] for one in found]
    return {
        "images_of_set": found[0]["images"],
        "index_file_bytes": size,
        "processes": processes,
        "figure": figures.pop("index_seconds"),
        **figures,
    }


def _child(argv: list[str]) -> dict[str, Any]:
    """Run `python -m ARGV` with one thread. Returns the JSON on its last line, or {"not_run": reason}."""
    command = [sys.executable, "-m", *argv]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"not_run": f"no result within {CHILD_SECONDS:.0f} s"}
    if done.returncode != 0:
        # The end of stderr names the error.
        last_words = " ".join(done.stderr.split()[-40:])
        return {"not_run": f"exit code {done.returncode}: {last_words}"}
    last_line = done.stdout.splitlines()[-1]
    result: dict[str, Any] = json.loads(last_line)
    return result


def write_index_only(root: Path, split: str, num_images: int) -> Path:
    """Write ROOT/SPLIT.index of images with names like ImageNet's, and the empty shard that it points to. Returns its path.

    The set can be opened, but its images cannot be read."""
    shard = root / f"{split}-000000.tar"
    shard.touch()
    # Image number times classes over images: the classes are equally large.
    labels = np.arange(num_images, dtype=np.int32) * CLASSES // num_images
    columns = {
        "label": labels.astype("<i4"),
        "height": np.full(num_images, IMAGE_HEIGHT, "<i4"),
        "width": np.full(num_images, IMAGE_WIDTH, "<i4"),
        "nbytes": np.full(num_images, IMAGE_BYTES, "<u4"),
        "kind": np.zeros(num_images, np.uint8),
        "shard": np.zeros(num_images, "<u2"),
        "block": np.arange(num_images, dtype="<u4"),
    }
    names = [f"n{label:08d}_{number}.JPEG" for number, label in enumerate(labels.tolist())]
    metadata = {
        "split": split,
        "class_names": [f"n{label:08d}" for label in range(CLASSES)],
        "shards": describe_shards([shard]),
    }
    path = root / f"{split}.index"
    write_index(path, IndexContent(columns, names, metadata))
    return path
