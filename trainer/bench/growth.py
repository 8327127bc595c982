"""How the cost of a step, and of starting, grows: with views, images, embedding size, ranks, and images in the set."""

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

import torch

from trainer.bench.compute import MIN_CALLS, FixedSteps, peak_memory, sizes, take_agreed_turns, warm_up
from trainer.bench.synthetic import synthetic_run, synthetic_views, write_index_only
from trainer.bench.timing import Window, spread, timed
from trainer.config.loading import save_config
from trainer.config.schema import Config
from trainer.distributed.device import choose_device
from trainer.distributed.geometry import indivisible_images
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.run.machine import provenance

VIEWS = (1, 2, 4, 8)  # 1: W-MSE has no pairs then, so encoder and projector alone
BATCHES = (1, 2, 4)  # times the images that are whitened together
EMBEDDINGS = (8, 16, 32, 64, 128, 256)
RANKS = (1, 2)
SETS = (10_000, 100_000, 1_281_167)
START_UPS = 3  # processes for each size of the set
CHILD_SECONDS = 120.0  # after which a process that measures is given up

LINES = {  # what grows -> what is measured, and a title
    "num_views": {"unit": "ms a step", "title": "views d"},
    "images_per_rank": {"unit": "ms a step", "title": "batch"},
    "embedding_size": {"unit": "ms a step", "title": "embedding"},
    "ranks": {"unit": "ms a step", "title": "ranks"},
    "images_of_set": {"unit": "seconds to the first plan, imports left out", "title": "set"},
}

Point = dict[str, Any]


def bench_growth(config: Config, seconds: float, names: Iterable[str] = LINES) -> dict[str, Any]:
    """Measure the lines of these names, on synthetic batches and sets, the points of those in this process in turns, for about
    `seconds` with the line of the ranks.

    -> "lines": each with "line" (what grows), "unit", and "points": {line: value, "figure": median and quartiles}; a point that
    could not be measured has "not_run" in its place.
    Other settings stay the config's: images a rank on the line of the views, M = 2k on that of the embedding size, images a
    rank on that of the ranks (one thread each). The set's line measures fresh processes, see `start_up`.
    """
    device, names = choose_device(config, Ranks()), list(names)
    planned = [step for name in names for step in _PLANS.get(name, lambda _: [])(config)]
    share = seconds / (len(planned) + 2 * len(RANKS) * ("ranks" in names) or 1)
    points: dict[str, list[Point]] = {name: [] for name in names}
    for step, figures in zip(planned, _in_turns(planned, device, share * len(planned)), strict=True):
        points[step.line].append({step.line: step.value, **figures})
    if "ranks" in names:
        points["ranks"] = [_ranks_point(config, device, 2 * share, ranks) for ranks in RANKS]
    if "images_of_set" in names:
        points["images_of_set"] = [_set_point(count) for count in SETS]
    lines = [{"line": name, **LINES[name], "points": points[name]} for name in names]
    return {"bench": "growth", "lines": lines, **sizes(config, device, Ranks()), **provenance(device)}


class Step(NamedTuple):
    """A point of a line that is measured in this process."""

    line: str
    value: int
    config: Config
    without_loss: bool = False
    """Forward and backward of one view of each image."""


def _views(config: Config) -> list[Step]:
    return [
        Step("num_views", d, replace(config, views=replace(config.views, num_views=max(2, d))), without_loss=d == 1)
        for d in VIEWS
    ]


def _batches(config: Config) -> list[Step]:
    sizes_of = [times * indivisible_images(config) for times in BATCHES]
    return [
        Step("images_per_rank", images, replace(config, data=replace(config.data, images_per_step=images)))
        for images in sizes_of
    ]


def _embeddings(config: Config) -> list[Step]:
    """Sizes whose slices of 2k rows divide the images."""
    images, block = config.data.images_per_step, config.wmse.permutation_block
    fitting = [k for k in EMBEDDINGS if images % (2 * k) == 0 and block % (2 * k) == 0]
    return [Step("embedding_size", k, _with_embedding(config, k)) for k in fitting]


_PLANS = {"num_views": _views, "images_per_rank": _batches, "embedding_size": _embeddings}


def _with_embedding(config: Config, size: int) -> Config:
    model, loss = replace(config.model, embedding_size=size), replace(config.wmse, slice_size=2 * size)
    return replace(config, model=model, wmse=loss)


def _in_turns(steps: Sequence[Step], device: torch.device, seconds: float) -> list[Point]:
    """A step's milliseconds at every point, in windows that take turns: a machine that slows down is no growth then."""
    found: list[Point] = [{} for _ in steps]
    windows: dict[str, Window] = {}
    with tempfile.TemporaryDirectory(prefix="bench_growth_") as folder:
        for number, step in enumerate(steps):
            place = Path(folder) / str(number)
            place.mkdir()
            try:
                run = synthetic_run(step.config, Ranks(), device, place)
            except InputError as error:  # this point does not fit the others' settings
                found[number] = {"not_run": str(error)}
                continue
            whole = FixedSteps(run)
            warm_up(whole)
            call: Callable[[], Any] = _encoder_alone(run) if step.without_loss else whole
            call()  # encoder alone: its own first call
            found[number] = peak_memory(device)
            windows[str(number)] = timed(call, device)
        times = take_agreed_turns(windows, seconds, Ranks(), MIN_CALLS[device.type]) if windows else {}
    for name, samples in times.items():
        found[int(name)]["figure"] = spread([us / 1e3 for us in samples])
    return found


def _encoder_alone(run: Any) -> Callable[[], None]:
    pixels = synthetic_views(run)[: run.planner.images.count]

    def forward_backward() -> None:
        with torch.autocast(run.device.type, run.step.autocast_dtype, enabled=run.step.autocast_dtype is not None):
            embeddings = run.step.method.networks(pixels)
        embeddings.backward(torch.ones_like(embeddings))
        run.step.optimizer.zero_grad(set_to_none=True)

    return forward_backward


def _ranks_point(config: Config, device: torch.device, seconds: float, ranks: int) -> Point:
    """`wmse bench compute` of so many processes of this machine, each with the config's images."""
    point: Point = {"ranks": ranks}
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        return point | {"not_run": f"this machine has {torch.cuda.device_count()} GPU(s)"}
    data = replace(config.data, images_per_step=ranks * config.data.images_per_step)
    with tempfile.TemporaryDirectory(prefix="bench_growth_") as folder:
        path = Path(folder) / "config.yaml"
        save_config(replace(config, data=data), path)
        words = ["trainer", "bench", "compute", "--config", str(path), "--seconds", str(seconds)]
        if ranks > 1:
            words = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", *words]
        found = _child(words)
    if "not_run" in found:
        return point | found
    return point | {"figure": found["step_ms"], "views_per_s": found["views_per_s"]}


def _set_point(num_images: int) -> Point:
    """Fresh processes that open an index of so many images; figure: index_seconds."""
    with tempfile.TemporaryDirectory(prefix="bench_growth_") as folder:
        path = write_index_only(Path(folder), "train", num_images)
        size = path.stat().st_size
        found = []
        for _ in range(START_UPS):
            images_per_step = str(min(4096, num_images))
            one = _child(["trainer.bench.start_up", folder, "train", images_per_step, str(time.time())])
            if "not_run" in one:
                return {"images_of_set": num_images, **one}
            found.append(one)
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


def _child(words: list[str]) -> dict[str, Any]:
    """`python -m WORDS` with one thread -> the JSON on its last line, or {"not_run": why}."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words], env=env, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"not_run": f"no result within {CHILD_SECONDS:.0f} s"}
    if done.returncode != 0:
        return {"not_run": f"exit code {done.returncode}: {' '.join(done.stderr.split()[-40:])}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
