"""Group `resume`: a run that stops and resumes ends with the bits of one that does not, on the demo's photographs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.config.schema import CheckpointConfig, Config, DataConfig, OptimizerConfig
from trainer.distributed.ranks import Ranks
from trainer.metrics import MetricSums
from trainer.run.checkpoint import load_checkpoint, map_tensors
from trainer.run.checkpoint_files import list_checkpoints
from trainer.run.resume import resume, save
from trainer.run.saver import Saver
from trainer.setup import build_loader, set_up
from trainer.verify.check import EXACT, Item, Measured, Place, SkipCheck
from trainer.verify.pictures import demo_root
from trainer.verify.training import tiny_config

_STEPS = 5
_STOP = 3
# A method without state of its own, and one with a target network and a queue.
_RUNS = {
    "wmse, adam": ("wmse", "adam"),
    "wmse, lars": ("wmse", "lars"),
    "moco, sgd": ("moco", "sgd"),
}


def resume_items(place: Place) -> Iterator[Item]:
    """Yield the checks of resumed runs."""
    for name, (method, optimizer) in _RUNS.items():
        yield f"{name}, on the CPU", partial(_resumed, place, torch.device("cpu"), method, optimizer)
    # Adam divides gradients near 0 by themselves, so there the last bits of a GPU would grow.
    yield "wmse, lars, on the GPU", partial(_resumed_on_gpu, place)


def _config(method: str, optimizer: str, device: torch.device) -> Config:
    config = tiny_config(method, images=32, views=2, iterations=2)
    return replace(
        config,
        device="cuda" if device.type == "cuda" else "cpu",
        data=DataConfig(root=str(demo_root()), images_per_step=32),
        optimizer=OptimizerConfig(
            name=optimizer,  # type: ignore[arg-type]
            learning_rate=0.1,
            learning_rate_rule="fixed",
            epochs=1,
        ),
        checkpoint=CheckpointConfig(every_minutes=0),
    )


def _resumed(place: Place, device: torch.device, method: str, optimizer: str) -> Measured:
    """Return the largest difference of any weight, moment, statistic or metric between the two checkpoints."""
    config = _config(method, optimizer, device)
    found = []
    # One run makes all steps at once, the other one ends in between and is resumed.
    runs = {"whole": (_STEPS,), "stopped": (_STOP, _STEPS)}
    for name, ends in runs.items():
        folder = place.folder / f"{device.type} {method} {optimizer} {name}"
        for end in ends:
            _run_until(config, device, folder, end)
        step, path = list_checkpoints(folder / "checkpoints")[-1]
        if step != _STEPS:
            raise ValueError(f"the last checkpoint is that of step {step}, not {_STEPS}")
        found.append(_numbers(load_checkpoint(path)))
    whole, stopped = found
    if whole.keys() != stopped.keys():
        only_in_one = sorted(whole.keys() ^ stopped.keys())
        raise ValueError(f"the checkpoints hold different entries: {only_in_one[:3]}")
    differences = []
    for name, value in whole.items():
        # An empty tensor has no largest element.
        if value.numel():
            difference = (stopped[name] - value).abs().max()
            differences.append(difference.item())
    return Measured(max(differences), EXACT)


def _run_until(config: Config, device: torch.device, folder: Any, end: int) -> None:
    """Start the run, or resume it from its checkpoint, and save it after step `end`, with the parts of the training loop."""
    with _quiet():
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        run = set_up(replace(config, run_dir=str(folder), max_steps=end), Ranks(), device, folder)
        sums = MetricSums(run.step.method.metrics, device)
        first = resume(run, sums)
        with closing(Saver(run.checkpoints, 3, ())) as saver:
            for batch in build_loader(run, first):
                rate = run.schedule.learning_rate(batch.step)
                result = run.step(batch.views, batch.step, rate)
                sums.add(result)
            save(run, saver, end, sums)
            saver.wait()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the log lines of the run; warnings and errors are shown."""
    logger = logging.getLogger("trainer")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _numbers(content: dict[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by their places, as float64."""
    found: dict[str, Tensor] = {}

    def take(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        found[".".join(map(str, path))] = tensor.double()
        return tensor

    map_tensors({name: content[name] for name in ("model", "optimizer", "metric_sums")}, take)
    return found


def _resumed_on_gpu(place: Place) -> Measured:
    """Resume on the GPU: its kernels may add in another order, so the bound is that of some roundings."""
    if not place.on_gpu:
        raise SkipCheck("no GPU")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # it could choose other kernels in the resumed run
    try:
        return Measured(_resumed(place, place.device, "wmse", "lars").error, 1e-4)
    finally:
        torch.backends.cudnn.benchmark = before
