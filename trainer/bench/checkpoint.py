"""Measure a checkpoint: how long a save stops the loop, how long the file takes, and how much the loop slows down meanwhile."""

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
INTERVAL_SECONDS = 300.0  # shares of the time are for a run that saves this often
WORK_OPERATIONS = 300  # small operations in a piece of work; like a step, they take Python's lock often
WORK_SECONDS = 0.3  # duration of the work before each save, as the baseline


def bench_checkpoint(config: Config, seconds: float, folder: Path | None = None) -> dict[str, Any]:
    """Measure saves and loads of the config's model and optimizer for about `seconds`. The first of each does not count.

    folder: directory on the file system to measure; the files are deleted afterwards. None: the system's temporary folder.
    Returns a dict for JSON:
    stall_ms: how long save() stops the loop; on a GPU this includes the copies that it queues.
    first_stall_ms: the same for the first save, which allocates memory.
    write_s: from the call until the file is on the disk. load_s: reading and checking, from a warm page cache.
    slowdown: time of small operations while a file is written, over their time before it (Python's lock, and busy cores); null
    if the writing is too short to measure.
    percent_of_loop: share of the time that a run loses if it saves every five minutes, without and with the slowdown.
    """
    device = choose_device(config, Ranks())
    method = config.method_settings.build(config, Ranks(), device)
    model = method.networks
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
    """Make an update with zero gradients and learning rate 0, so that the optimizer has its moments, as in a run."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    update(optimizer, 0.0, torch.tensor(False, device=device))
    optimizer.zero_grad(set_to_none=True)


def _measure(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, folder: Path, seconds: float
) -> dict[str, list[float]]:
    """Return the seconds of each save but the first, by figure; for the slowdown the ratios."""
    found: dict[str, list[float]] = {"first_stall": [], "stall": [], "write": [], "load": [], "slowdown": []}
    saver = Saver(folder, keep_last=1)
    end = time.perf_counter() + seconds
    while len(found["stall"]) < MIN_SAVES or time.perf_counter() < end:
        # The same work before the save and beside it shows what writing costs the loop.
        alone = _work_while(_for_seconds(WORK_SECONDS), device)
        synchronize(device)
        # Time the save itself, then the work beside the writing thread, then the load.
        began = time.perf_counter()
        content = {"step": 1, "model": plain_names(model.state_dict()), "optimizer": optimizer.state_dict()}
        saver.save(content)
        synchronize(device)
        stall = time.perf_counter() - began
        beside = _work_while(saver.under_way, device)
        saver.wait()
        write = time.perf_counter() - began
        load_began = time.perf_counter()
        load_checkpoint(checkpoint_path(folder, 1))
        load = time.perf_counter() - load_began
        # The first save allocates memory, so it is kept apart.
        if not found["first_stall"]:
            found["first_stall"].append(stall)
            continue
        found["stall"].append(stall)
        found["write"].append(write)
        found["load"].append(load)
        if beside:
            found["slowdown"].append(statistics.fmean(beside) / statistics.fmean(alone))
    saver.close()
    return found


def _work_while(condition: Callable[[], bool], device: torch.device) -> list[float]:
    """Return the seconds of each piece of work that ended while `condition()` was still true."""
    x = torch.ones(64, device=device)
    pieces: list[float] = []
    while True:
        began = time.perf_counter()
        for _ in range(WORK_OPERATIONS):
            x.mul_(1.0)
        elapsed = time.perf_counter() - began
        # The last piece may have ended after the write, so it does not count.
        if not condition():
            return pieces
        pieces.append(elapsed)


def _for_seconds(seconds: float) -> Callable[[], bool]:
    """Return a condition that is true for `seconds` from now on."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


def _summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians with their quartiles, and the share of a run's time that they cost."""
    # While a file is written, the loop loses the share by which it is slower than alone.
    stall = spread(found["stall"])
    write = spread(found["write"])
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
    """Return the type of the file system that holds `path`, or "unknown"."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    # Of all mount points above the path the longest one is the innermost.
    longest, kind = 0, "unknown"
    for line in mounts.read_text().splitlines():
        _, point, kind_there, *_ = line.split()
        if path.resolve().is_relative_to(point) and len(point) >= longest:
            longest, kind = len(point), kind_there
    return kind
