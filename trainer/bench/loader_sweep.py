"""The loader's speed over its settings: threads, DALI's queue, steps read ahead, and on a GPU the hardware decoder's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from trainer.bench.loading import WARMUP_STEPS, Loaders, dali_version, endless_loader, in_turns, settings_used
from trainer.config.schema import Config
from trainer.distributed.cores import own_cores
from trainer.distributed.device import choose_device
from trainer.distributed.ranks import Ranks
from trainer.run.machine import provenance

ROUNDS = 3
Setting = dict[str, Any]  # field of config.data -> value


def grid(config: Config, device: torch.device) -> list[Setting]:
    """The settings that are tried, the config's own first: threads with queue depths, then one other at a time."""
    cores, on_gpu = own_cores(), device.type == "cuda"
    own = settings_used(config, device)
    tried = [own]
    for threads in sorted({4, 8, 16} if on_gpu else {max(1, cores // 2), cores, 2 * cores}):
        tried += [{**own, "threads": threads, "prefetch_batches": depth} for depth in (1, 2, 4)]
    tried += [{**own, "read_ahead_steps": steps} for steps in (1, 6)]
    if on_gpu:
        tried += [{**own, "hw_decoder_load": load} for load in (1.0, 0.9, 0.65)]
    return [setting for i, setting in enumerate(tried) if setting not in tried[:i]]


def words(setting: Setting) -> str:
    """As they are typed: --data.threads 2 ..."""
    return " ".join(f"--data.{name} {str(value).replace(' ', '')}" for name, value in setting.items())


def bench_loader_sweep(config: Config, seconds: float) -> dict[str, Any]:
    """Views a second at every setting of `grid`: ROUNDS rounds of windows that take turns, `seconds` in all, starts and warm-up
    on top. "best" has the largest median, as words; "clearly_better" is whether its lower quartile is above the upper one
    of the config's own setting. Prints a table to stderr."""
    device = choose_device(config, Ranks())
    settings = grid(config, device)
    views = config.data.images_per_step * config.views.num_views
    made: Loaders = {words(setting): partial(_start, config, setting) for setting in settings}
    figures = in_turns(made, views, seconds, ROUNDS)
    results = [{"setting": setting, "figures": figures[words(setting)]} for setting in settings]
    best = max(results, key=lambda result: result["figures"]["median"])
    _print_table(results)
    return {
        "bench": "loader_sweep",
        "unit": "views a second",
        "results": results,
        "best": words(best["setting"]),
        "clearly_better": best["figures"]["quartile_1"] > results[0]["figures"]["quartile_3"],
        "images_per_step": config.data.images_per_step,
        "num_views": config.views.num_views,
        "side": config.views.size,
        "interpolation": config.views.interpolation,
        "warm_up_steps": WARMUP_STEPS,
        **provenance(device),
        "dali": dali_version(),
    }


def _start(config: Config, setting: Setting) -> Iterator[Any]:
    data: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in setting.items()}
    return endless_loader(replace(config, data=replace(config.data, **data)))


def _print_table(results: list[dict[str, Any]]) -> None:
    own = results[0]["figures"]["median"]
    table = Table("setting", "views/s", "quartiles", "times the config's own")
    for result in sorted(results, key=lambda result: -result["figures"]["median"]):
        figure = result["figures"]
        quartiles = f"{figure['quartile_1']:,.0f} to {figure['quartile_3']:,.0f}"
        table.add_row(words(result["setting"]), f"{figure['median']:,.0f}", quartiles, f"{figure['median'] / own:.2f}")
    Console(stderr=True, width=130).print(table)
