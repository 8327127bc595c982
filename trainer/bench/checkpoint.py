"""Measure a checkpoint: how long the loop stands still, how long the file takes, and what the loop loses meanwhile."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.bench.timing import spread, synchronize
from trainer.config.schema import Config
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.optimizer import build_optimizer, update
from trainer.run.checkpoint import load_checkpoint, plain_names
from trainer.run.checkpoint_files import checkpoint_path
from trainer.run.machine import provenance
from trainer.run.saver import Saver

MIN_SAVES = 3
INTERVAL_SECONDS = 300.0  # the shares are of a run that saves this often
WORK_OPERATIONS = 300  # in a piece of work: small ones, which ask for Python's lock often, as a step does
WORK_SECONDS = 0.3  # of it before each save, to compare with


def bench_checkpoint(config: Config, seconds: float, folder: Path | None = None) -> dict[str, Any]:
    """Measure saves and loads of the config's model and optimizer for about `seconds`, without the first of each.

    folder: where files are written and deleted afterwards, which decides what is measured; None: the system's temporary folder.
    Returns a dict for JSON:
    stall_ms: how long save() holds the loop, on a GPU with the copies that it queues; first_stall_ms: when it allocates memory.
    write_s: from the call until the file is on the disk. load_s: reading and checking, from a warm page cache.
    slowdown: time of small operations while a file is written, over that before it (Python's lock, and busy cores); null if the
    writing is too short to tell.
    percent_of_loop: what a run that saves every five minutes loses by standing still, and with the slowdown.
    """
    device = choose_device(config, Ranks())
    model = config.method_settings.build(config, Ranks(), device).networks
    optimizer = build_optimizer(model, config.optimizer, device)
    _fill_state(model, optimizer, device)
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench_checkpoint_") as name:
        found = _measure(model, optimizer, device, Path(name), seconds)
        size = checkpoint_path(Path(name), 1).stat().st_size
        file_system = _file_system(Path(name))
    return {
        "bench": "checkpoint",
        **_summary(found),
        "bytes": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "interval_seconds": INTERVAL_SECONDS,
        "file_system": file_system,
        "page_cache": "load: warm",
        **provenance(device),
    }


def _fill_state(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Make an update with zero gradients at rate 0, for the moments that a running optimizer has."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    update(optimizer, 0.0, torch.tensor(False, device=device))
    optimizer.zero_grad(set_to_none=True)


def _measure(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, folder: Path, seconds: float
) -> dict[str, list[float]]:
    """Return seconds, and ratios for the slowdown, one for each save but the first."""
    found: dict[str, list[float]] = {"first_stall": [], "stall": [], "write": [], "load": [], "slowdown": []}
    saver = Saver(folder, keep_last=1)
    end = time.perf_counter() + seconds
    while len(found["stall"]) < MIN_SAVES or time.perf_counter() < end:
        alone = _work_while(_for_seconds(WORK_SECONDS), device)
        synchronize(device)
        began = time.perf_counter()
        saver.save({"step": 1, "model": plain_names(model.state_dict()), "optimizer": optimizer.state_dict()})
        synchronize(device)
        stall = time.perf_counter() - began
        beside = _work_while(saver.under_way, device)
        saver.wait()
        write = time.perf_counter() - began
        load_began = time.perf_counter()
        load_checkpoint(checkpoint_path(folder, 1))
        load = time.perf_counter() - load_began
        if not found["first_stall"]:
            found["first_stall"].append(stall)
            continue
        for name, value in (("stall", stall), ("write", write), ("load", load)):
            found[name].append(value)
        if beside:
            found["slowdown"].append(statistics.fmean(beside) / statistics.fmean(alone))
    saver.close()
    return found


def _work_while(goes_on: Callable[[], bool], device: torch.device) -> list[float]:
    """Return the seconds of each piece of work that ended while goes_on() held."""
    x = torch.ones(64, device=device)
    pieces: list[float] = []
    while True:
        began = time.perf_counter()
        for _ in range(WORK_OPERATIONS):
            x.mul_(1.0)
        elapsed = time.perf_counter() - began
        if not goes_on():
            return pieces
        pieces.append(elapsed)


def _for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def _summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians with their quartiles, and what they mean for a run."""
    stall, write = spread(found["stall"]), spread(found["write"])
    slowdown = spread(found["slowdown"]) if len(found["slowdown"]) >= MIN_SAVES else None
    percent = {"standing_still": 100 * stall["median"] / INTERVAL_SECONDS}
    if slowdown is not None:
        lost = stall["median"] + (slowdown["median"] - 1) * write["median"]
        percent["with_slowdown"] = 100 * lost / INTERVAL_SECONDS
    return {
        "stall_ms": spread(found["stall"], 1e3),
        "first_stall_ms": 1000 * found["first_stall"][0],
        "write_s": write,
        "load_s": spread(found["load"]),
        "slowdown": slowdown,
        "percent_of_loop": percent,
    }


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`: that of the longest mount point above it."""
    mounts = Path("/proc/self/mounts")
    found = [line.split()[1:3] for line in mounts.read_text().splitlines()] if mounts.exists() else []
    above = [(len(point), kind) for point, kind in found if path.resolve().is_relative_to(point)]
    return max(above)[1] if above else "unknown"
