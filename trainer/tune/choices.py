"""The choices of `wmse tune`: settings that change the speed of a run, and not its mathematics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from kernels.backends import why_no_kernels, why_not
from trainer.config.schema import Config
from trainer.distributed.device import autocast_dtype, compiles, memory_gib
from trainer.tools.memory import estimate_memory
from trainer.tune.measure import exact

COMPILE_MINUTES = 3.0  # a budget that has room for one more compilation
AUTOTUNE_MINUTES = 15.0


@dataclass(frozen=True)
class Choice:
    """Settings to try together, against those of the recipe and of the choices that were taken before."""

    settings: Mapping[str, str]
    """Values by dotted name, as on the command line."""
    part: str
    """What is checked and timed, a key of `measure.PARTS`."""
    refused: str = ""
    """Why it is not tried here; empty: it is."""

    @property
    def name(self) -> str:
        """The settings as words."""
        return ", ".join(f"{key} {value}" for key, value in self.settings.items())


MEMORY_SHARE = 0.6  # of the memory of a machine without a GPU, for a step and its check


def all_choices(config: Config, device: torch.device, minutes: float) -> list[Choice]:
    """Return the choices in the order in which they are tried. minutes: the budget."""
    return [
        *_of_loss(config, device),
        *_of_optimizer(config, device),
        *_of_step(config, device, minutes),
        *_of_loader(config, device),
    ]


def _of_loss(config: Config, device: torch.device) -> Iterator[Choice]:
    if config.method != "wmse":
        return
    for backend in ("triton", "triton_4_warps"):
        reason = why_not(backend, device.type, config.model.embedding_size, config.wmse.cholesky_float64)
        if config.wmse.whitening != "cholesky":
            reason = f"whitens by cholesky only, not by {config.wmse.whitening}"
        yield Choice({"wmse.backend": backend}, "loss", reason or "")


def _of_optimizer(config: Config, device: torch.device) -> Iterator[Choice]:
    reason = _needs_kernels(device)
    if config.optimizer.name in ("adam", "adamw"):
        reason = f"has no kernels for {config.optimizer.name}"
    yield Choice({"optimizer.backend": "triton"}, "optimizer", reason)


def _of_step(config: Config, device: torch.device, minutes: float) -> Iterator[Choice]:
    on_gpu = device.type == "cuda"
    too_large = "" if on_gpu else _too_large(config, device)
    # Only a recipe that leaves the precision open allows another one.
    if config.precision == "auto":
        other = "fp32" if autocast_dtype(config, device) else "bf16"
        yield Choice({"precision": other}, "step", too_large)
    yield Choice({"model.batch_norm_backend": "triton"}, "step", _needs_kernels(device) or too_large)
    # With a smaller budget the compiler would compute the 1x1 convolutions again.
    convolutions = {"model.batch_norm_backend": "triton_conv", "model.activation_memory_budget": "1"}
    yield Choice(convolutions, "step", _needs_kernels(device) or too_large)
    if config.compile == "auto":
        reason = too_large
        if not on_gpu and minutes < COMPILE_MINUTES:
            reason = f"takes minutes to compile: give --minutes {COMPILE_MINUTES:g} or more"
        yield Choice({"compile": "false" if compiles(config, device) else "true"}, "step", reason)
    needs_gpu = "" if on_gpu else "needs an NVIDIA GPU"
    yield Choice({"cuda_graphs": "true"}, "step", needs_gpu)
    # It costs time, unless the memory is too small without it.
    yield Choice({"model.activation_memory_budget": "0.9"}, "step", needs_gpu)
    too_short = f"takes 5 to 10 minutes: give --minutes {AUTOTUNE_MINUTES:g} or more"
    yield Choice({"autotune": "true"}, "step", needs_gpu or (too_short if minutes < AUTOTUNE_MINUTES else ""))


def _too_large(config: Config, device: torch.device) -> str:
    """Return why a step in float32, as its check makes it, does not fit the memory of this machine; empty: it does."""
    needed = estimate_memory(exact(config), config.data.images_per_step * config.views.num_views, device).total
    _, limit_gib = memory_gib(device)
    needed_gib = needed / 2**30
    if needed_gib <= MEMORY_SHARE * limit_gib:
        return ""
    gibibytes = f"{needed_gib:.0f} of {limit_gib:.0f} GiB"
    return f"a step needs about {gibibytes} of memory: give a smaller --data.images_per_step"


def _of_loader(config: Config, device: torch.device) -> Iterator[Choice]:
    data = config.data
    no_images = "" if data.root else "needs images: give --data.root"
    yield Choice({"data.augment_backend": "triton"}, "loader", _needs_kernels(device) or no_images)
    for name, value in (
        ("data.threads", "1"),
        ("data.threads", "4"),
        ("data.threads", "16"),
        ("data.prefetch_batches", str(data.prefetch_batches + 1)),
        ("data.read_ahead_steps", str(2 * data.read_ahead_steps + 1)),
        ("data.decoder", "torchcodec"),
    ):
        yield Choice({name: value}, "loader", no_images)
    needs_gpu = "" if device.type == "cuda" else "needs an NVIDIA GPU"
    yield Choice({"data.hw_decoder_load": "0.8"}, "loader", needs_gpu or no_images)


def _needs_kernels(device: torch.device) -> str:
    return why_no_kernels(device.type) or ""
