"""Time the training step alone: python -m tests.gpu.time_step OUT.json VARIANT... [--tiny]

The model is that of the ImageNet recipe on one rank, with BatchNorm statistics of its images: 256 images in 4 views of 224 px.
For each variant this gives the seconds of the first steps, which compile, the views per second and the peak memory, and the
phases and longest kernels of profiled steps.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import DeviceType

from tests.gpu.part import Line, Task, describe, main
from trainer.bench import compute
from trainer.bench.phases import profile_steps
from trainer.config.schema import Config, DataConfig, ModelConfig, ViewsConfig, WMSESettings
from trainer.distributed.ranks import Ranks

RECIPE = Config(data=DataConfig(images_per_step=256))  # the defaults are the recipe's, except for BatchNorm over ranks
TINY = Config(
    data=DataConfig(images_per_step=8, threads=1),
    views=ViewsConfig(num_views=2, size=32, eval_resize=32),
    model=ModelConfig("test_resnet", projector_hidden=(16,), embedding_size=4),
    wmse=WMSESettings(slice_size=8),
    device="cpu",
)
BUDGET = {"activation_memory_budget": 0.9}
KERNELS_OF_BATCH_NORM = {"batch_norm_backend": "triton"}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> settings, and settings of the model
    "compiled_bf16": ({"precision": "bf16", "compile": "true"}, {}),
    "compiled_bf16_budget": ({"precision": "bf16", "compile": "true"}, BUDGET),
    "autotuned_bf16_budget": ({"precision": "bf16", "compile": "true", "autotune": True}, BUDGET),
    "eager_bf16": ({"precision": "bf16", "compile": "false"}, {}),
    "eager_fp16": ({"precision": "fp16", "compile": "false"}, {}),
    "compiled_bf16_kernels": ({"precision": "bf16", "compile": "true"}, KERNELS_OF_BATCH_NORM),
    "eager_bf16_kernels": ({"precision": "bf16", "compile": "false"}, KERNELS_OF_BATCH_NORM),
}
COMPILED_IN_REHEARSALS = "compiled_bf16_budget"  # the only variant that a rehearsal compiles, if it has a compiler
SECONDS = 8.0
KERNELS = 25  # number of the longest kernels that are listed


def time_steps(task: Task) -> Iterator[Line]:
    """Yield the lines of the variants that the command names."""
    for name in task.words:
        try:
            yield from measure(name, task)
        except torch.OutOfMemoryError as error:  # the next variant may need less
            yield {"name": name, "problem": describe(error)}
        torch.cuda.empty_cache()


def measure(name: str, task: Task) -> Iterator[Line]:
    """Yield a line for the first steps, one for the speed, and one for the profile."""
    config = config_of(name, task.tiny)
    steps = compute.fixed_steps(config, Ranks(), task.device)
    if steps.step.grad_scaler is not None:
        steps.step.grad_scaler.scale.fill_(2.0**8)  # a run finds this scale after some skipped updates
    began = time.perf_counter()
    steps.warm_up()
    first = time.perf_counter() - began
    said = f"{first:.1f} s for {compute.WARMUP_STEPS} steps"
    settings = compute.sizes(config, task.device, Ranks())
    yield {"name": f"{name} first", "said": said, "seconds": first, **settings}
    steps.take_skipped()
    figures = compute.step_figures(steps.times(0.1 if task.tiny else SECONDS), steps)
    memory = compute.peak_memory(task.device)
    skipped = steps.take_skipped()
    said = f"{figures['views_per_s']:,.0f} views/s, {figures['step_ms']['median']:.1f} ms"
    said += f", peak {memory['peak_bytes'] / 2**30:.1f} GiB" if memory else ""
    problem = {"problem": f"{skipped} updates were skipped"} if skipped else {}
    yield {"name": name, "said": said, **figures, **memory, **problem}
    # --- profile, after the measurement because it slows the steps down ---
    events = profile_steps(steps, compute.PROFILED_STEPS, task.device)
    phases = compute.phase_figures(events, compute.PROFILED_STEPS, task.device)
    where = DeviceType.CUDA if task.device.type == "cuda" else DeviceType.CPU
    kernels = longest_kernels(events, where)
    yield {"name": f"{name} profile", "phases": phases, "kernels": kernels}


def config_of(name: str, tiny: bool) -> Config:
    """Return the recipe, or the rehearsal's config, with the settings of the variant."""
    settings, model = VARIANTS[name]
    if tiny:
        compiled = name == COMPILED_IN_REHEARSALS and shutil.which("g++") is not None
        settings = {**settings, "compile": "true" if compiled else "false", "autotune": False}
        model = {key: value for key, value in model.items() if key not in KERNELS_OF_BATCH_NORM}
        if compiled:
            settings["precision"] = "fp32"  # has fewer kernels to compile
    config = TINY if tiny else RECIPE
    return replace(config, model=replace(config.model, **model), **settings)


def longest_kernels(events: list[Any], where: DeviceType) -> list[dict[str, Any]]:
    """Return name, calls and milliseconds in a step of the longest kernels (on a CPU: operators, with those that they call)."""
    times: dict[str, list[float]] = {}
    for event in events:
        if event.device_type() == where and not event.is_user_annotation():
            times.setdefault(event.name()[:120], []).append(event.duration_ns() / 1e6)
    steps = compute.PROFILED_STEPS
    kernels = [{"name": name, "calls": len(ms) / steps, "ms": sum(ms) / steps} for name, ms in times.items()]
    kernels.sort(key=lambda kernel: -kernel["ms"])
    return kernels[:KERNELS]


if __name__ == "__main__":
    main(time_steps, __doc__)
