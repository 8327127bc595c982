"""Tiny training steps, built by the program's own `trainer.setup`, for the checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.config.schema import (
    AlignUniformSettings,
    Config,
    DataConfig,
    MoCoSettings,
    ModelConfig,
    OptimizerConfig,
    SimCLRSettings,
    SwAVSettings,
    ViewsConfig,
    WMSESettings,
)
from trainer.distributed.ranks import Ranks
from trainer.setup import build_step
from trainer.step import TrainStep

TOTAL_STEPS = 10  # of the run that a step belongs to
_K = 4
_SIZE = 16  # pixels


def tiny_config(
    method: str,
    images: int,
    views: int = 2,
    *,
    iterations: int = 1,
    slice_size: int = 8,
    per_view: bool = False,
    whiten: bool = False,
) -> Config:
    """Return the settings of a step that takes milliseconds, with plain SGD. images: global batch size.

    per_view: whether each view has its own BatchNorm statistics, else all views together; always of all ranks, except where a
    method fixes them. whiten: SimCLR on whitened embeddings."""
    statistics: Literal["per_view", "joint"] = "per_view" if per_view else "joint"
    has_queue = method in ("moco", "align_uniform")
    # Both methods with a queue shuffle the images among groups of rows for BatchNorm.
    queue: dict[str, Any] = {
        "queue_size": 6 * images,
        "batch_norm_rows": 4,
        "shuffle_images": 8,
    }
    return Config(
        method=method,
        precision="fp32",
        compile="false",
        timeout_minutes=1.0,
        data=DataConfig(images_per_step=images),
        views=ViewsConfig(num_views=views, size=_SIZE),
        model=ModelConfig(
            "test_resnet",
            stem="half",
            # A block whose last weights are 0 would hide errors in the others.
            zero_init_last=False,
            projector="mlp",
            projector_hidden=(12,),
            embedding_size=_K,
            encoder_batch_norm=statistics,
            projector_batch_norm=statistics,
            batch_norm_ranks="local" if has_queue else "all",
        ),
        wmse=WMSESettings(slice_size=slice_size, iterations=iterations, permutation_block=max(16, slice_size)),
        simclr=SimCLRSettings(temperature=0.5, whiten=whiten, slice_size=slice_size),
        moco=MoCoSettings(**queue),
        align_uniform=AlignUniformSettings(**queue),
        swav=SwAVSettings(prototypes=6, freeze_prototypes_steps=0),
        # With these settings an update subtracts the gradient.
        optimizer=OptimizerConfig(
            name="sgd",
            learning_rate=1.0,
            learning_rate_rule="fixed",
            momentum=0.0,
            weight_decay=0.0,
        ),
    )


def train_step(config: Config, ranks: Ranks, device: torch.device, *, dtype: torch.dtype = torch.float64) -> TrainStep:
    """Build the step as a run does, with weights of the given type. Every rank calls this."""
    before = torch.get_default_dtype()
    # The networks are built in the default type.
    torch.set_default_dtype(dtype)
    try:
        return build_step(config, ranks, device, total_steps=TOTAL_STEPS)
    finally:
        torch.set_default_dtype(before)


def draw_pixels(config: Config, device: torch.device) -> Tensor:
    """Draw the views of all images of a step, (d*N, 3, S, S) uint8, channels_last, view-major."""
    num_rows = config.views.num_views * config.data.images_per_step
    shape = (num_rows, 3, config.views.size, config.views.size)
    # Drawn on the CPU, so that every rank and every device gets the same pixels.
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return pixels.to(device).contiguous(memory_format=torch.channels_last)


@contextmanager
def precision_flags(device: torch.device, *, fast: bool) -> Iterator[None]:
    """Compute float32 matrix products in TF32 (GPU) or bf16 (CPU) while the block runs; not fast: in full float32."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    flags = backend.matmul
    before = flags.fp32_precision
    fastest = "tf32" if device.type == "cuda" else "bf16"
    flags.fp32_precision = fastest if fast else "ieee"
    try:
        yield
    finally:
        flags.fp32_precision = before
