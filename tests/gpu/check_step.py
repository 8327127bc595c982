"""Check the training step: python -m tests.gpu.check_step OUT.json [--tiny]

In every precision, eager, compiled and with CUDA graphs, the step must never wait for the device, its loss must be close to
that in float32, and a skipped update must not change anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tests.gpu.part import Line, Task, attempt, main, without_waiting
from trainer import setup
from trainer.config.schema import (
    METHODS,
    AlignUniformSettings,
    Config,
    DataConfig,
    MoCoSettings,
    ModelConfig,
    ViewsConfig,
    WMSESettings,
)
from trainer.distributed.ranks import Ranks
from trainer.step import TrainStep

IMAGES = 64  # two slices
VIEWS = 2
SMALL = Config(
    data=DataConfig(images_per_step=IMAGES),
    views=ViewsConfig(num_views=VIEWS, size=64),
    model=ModelConfig("resnet18", projector_hidden=(64,), embedding_size=16, zero_init_last=False),
    wmse=WMSESettings(slice_size=32),
    moco=MoCoSettings(queue_size=256, batch_norm_rows=16, shuffle_images=32),
    align_uniform=AlignUniformSettings(queue_size=256, batch_norm_rows=16, shuffle_images=32),
    precision="fp32",
)
TINY = replace(SMALL, model=replace(SMALL.model, backbone="test_resnet"), views=replace(SMALL.views, size=32))
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 0.15, "fp16": 0.05}  # for the loss of the first step, which is about 2


class Variant(NamedTuple):
    """A precision and other settings of the step to check."""

    precision: str
    compiled: bool = False
    cuda_graphs: bool = False
    optimizer: str = "lars"
    micro_batches: int = 1
    backend: str = "auto"
    budget: float = 1.0
    method: str = "wmse"
    batch_norm: str = "torch"


VARIANTS = (
    Variant("fp32"),
    Variant("bf16", compiled=True),
    Variant("bf16", compiled=True, cuda_graphs=True),
    Variant("bf16", backend="triton"),
    Variant("bf16", batch_norm="triton"),
    Variant("bf16", compiled=True, batch_norm="triton"),
    Variant("fp16"),
    Variant("bf16", micro_batches=2),
    Variant("bf16", optimizer="adam"),
    Variant("fp16", compiled=True, budget=0.9),
    Variant("fp16", compiled=True, micro_batches=2),
    *(Variant("bf16", compiled=True, method=name) for name in METHODS if name != "wmse"),
)


def build_step(config: Config, variant: Variant, device: torch.device) -> TrainStep:
    """Build the step of a variant, with the weights of the seed."""
    model = replace(config.model, activation_memory_budget=variant.budget, batch_norm_backend=variant.batch_norm)
    loss = replace(config.wmse, backend=variant.backend)
    optimizer = replace(
        config.optimizer,
        name=variant.optimizer,
        backend=variant.backend,
        accumulation_steps=variant.micro_batches,
    )
    changed = replace(
        config,
        method=variant.method,
        precision=variant.precision,
        compile="true" if variant.compiled else "false",
        cuda_graphs=variant.cuda_graphs,
        model=model,
        wmse=loss,
        optimizer=optimizer,
    )
    return setup.build_step(changed, Ranks(), device)


def draw_pixels(seed: int, size: int, device: torch.device) -> Tensor:
    """Draw (R, 3, S, S) uint8, channels_last. The views of an image have the same smooth colours and different noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(IMAGES, 3, 5, 5, generator=generator).repeat(VIEWS, 1, 1, 1)
    noise = torch.rand(VIEWS * IMAGES, 3, size, size, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    mixed = 0.8 * smooth + 0.2 * noise
    pixels = (255 * mixed).to(torch.uint8)
    return pixels.to(device).contiguous(memory_format=torch.channels_last)


def float32_loss(config: Config, micro_batches: int, method: str, device: torch.device) -> float:
    """Return the loss of the first step in eager float32. BatchNorm sees one micro-batch, so their number changes the loss."""
    step = build_step(config, Variant("fp32", micro_batches=micro_batches, method=method), device)
    pixels = draw_pixels(0, config.views.size, device)
    return step(pixels, 0, 0.1).loss.item()


def check(config: Config, variant: Variant, device: torch.device, expected_loss: float) -> Line:
    """Make four steps: compare the loss of the first one, forbid the third to wait, and make the fourth fail."""
    step = build_step(config, variant, device)
    batches = [draw_pixels(seed, config.views.size, device) for seed in range(4)]
    if step.grad_scaler is not None:
        step.grad_scaler.scale.fill_(2.0**8)
    # --- the first three steps ---
    loss = step(batches[0], 0, 0.1).loss.item()
    step(batches[1], 0, 0.1)  # compiles the rest and records the graphs
    failed = without_waiting(lambda: step(batches[2], 0, 0.1), device).skipped
    line: Line = {"said": f"loss {loss:.4f}, float32 {expected_loss:.4f}", "loss": loss, "expected": expected_loss}
    if failed:
        return {**line, "problem": "the third update was skipped"}
    if not abs(loss - expected_loss) < LOSS_TOLERANCE[variant.precision] * max(1, abs(expected_loss) / 2):
        return {**line, "problem": "the loss differs too much from that in float32"}
    # --- a step that must be skipped: the rows of its first view are all equal, or a gradient is not finite ---
    networks = step.method.networks
    before = [p.detach().clone() for p in networks.parameters()]
    constant = batches[3].clone()
    constant[:IMAGES] = constant[:1]
    if not step.method.checks:
        next(networks.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    if not step(constant, 0, 0.1).skipped:
        return {**line, "problem": "a fault did not skip the update"}
    unchanged = [torch.equal(old, new) for old, new in zip(before, networks.parameters(), strict=True)]
    if not all(unchanged):
        return {**line, "problem": "a skipped update changed the weights"}
    return line


def check_all(task: Task) -> Iterator[Line]:
    """Yield a line for each variant."""
    config = TINY if task.tiny else SMALL
    expected: dict[tuple[int, str], float] = {}
    for variant in VARIANTS:
        # These are slow on a CPU, and other parts rehearse them.
        if task.tiny and variant.method != "wmse":
            variant = variant._replace(compiled=False)
        if task.tiny and (variant.compiled or "triton" in (variant.backend, variant.batch_norm)):
            continue
        key = (variant.micro_batches, variant.method)
        if key not in expected:
            expected[key] = float32_loss(config, *key, task.device)
        check_variant = partial(check, config, variant, task.device, expected[key])
        yield attempt(_name(variant), check_variant)
        torch._dynamo.reset()


def _name(variant: Variant) -> str:
    """Return the precision, and all settings that differ from their defaults."""
    default = Variant(variant.precision)._asdict()
    other = [f"{name} {value}" for name, value in variant._asdict().items() if value != default[name]]
    return ", ".join([variant.precision, *other])


if __name__ == "__main__":
    main(check_all, __doc__)
