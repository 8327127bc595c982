"""Check the training step: python -m tests.gpu.check_step OUT.json [--tiny]

In every precision, eager, compiled and as CUDA graphs, it must wait for nothing, its loss must follow the float32 one, and a
skipped update must change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.gpu.part import Line, Task, attempt, main, without_waiting
from trainer import setup
from trainer.config.schema import Config, DataConfig, ModelConfig, ViewsConfig, WMSESettings
from trainer.distributed.ranks import Ranks
from trainer.step import TrainStep

IMAGES, VIEWS = 64, 2  # of which a slice takes 32
SMALL = Config(
    data=DataConfig(images_per_step=IMAGES),
    views=ViewsConfig(num_views=VIEWS, size=64),
    model=ModelConfig("resnet18", projector_hidden=(64,), embedding_size=16, zero_init_last=False),
    wmse=WMSESettings(slice_size=32),
    precision="fp32",
)
TINY = replace(SMALL, model=replace(SMALL.model, backbone="test_resnet"), views=replace(SMALL.views, size=32))
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 0.15, "fp16": 0.05}  # of the first step's loss, near 2


class Variant(NamedTuple):
    """A way to make a step."""

    precision: str
    compiled: bool = False
    cuda_graphs: bool = False
    optimizer: str = "lars"
    parts: int = 1
    backend: str = "auto"
    budget: float = 1.0


VARIANTS = (
    Variant("fp32"),
    Variant("bf16", compiled=True),
    Variant("bf16", compiled=True, cuda_graphs=True),
    Variant("bf16", backend="triton"),
    Variant("fp16"),
    Variant("bf16", parts=2),
    Variant("bf16", optimizer="adam"),
    Variant("fp16", compiled=True, budget=0.9),
    Variant("fp16", compiled=True, parts=2),
)


def build_step(config: Config, variant: Variant, device: torch.device) -> TrainStep:
    """Build a step with the seed's weights. backend: of whitening and optimizer."""
    model = replace(config.model, activation_memory_budget=variant.budget)
    loss = replace(config.wmse, backend=variant.backend)
    optimizer = replace(config.optimizer, name=variant.optimizer, backend=variant.backend)
    return setup.build_step(
        replace(
            config,
            precision=variant.precision,
            compile="true" if variant.compiled else "false",
            model=model,
            cuda_graphs=variant.cuda_graphs,
            wmse=loss,
            optimizer=replace(optimizer, accumulation_steps=variant.parts),
        ),
        Ranks(),
        device,
    )


def pixels_of(seed: int, side: int, device: torch.device) -> Tensor:
    """Draw (R, 3, S, S) uint8, channels_last: smooth, so that the views of an image have something in common."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(IMAGES, 3, 5, 5, generator=generator).repeat(VIEWS, 1, 1, 1)
    noise = torch.rand(VIEWS * IMAGES, 3, side, side, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear")
    pixels = (255 * (0.8 * smooth + 0.2 * noise)).to(torch.uint8)
    return pixels.to(device).contiguous(memory_format=torch.channels_last)


def float32_loss(config: Config, parts: int, device: torch.device) -> float:
    """Return the loss of the first step, eager. It depends on the number of parts, since BatchNorm sees one at a time."""
    step = build_step(config, Variant("fp32", parts=parts), device)
    return step(pixels_of(0, config.views.size, device), 0, 0.1).loss.item()


def check(config: Config, variant: Variant, device: torch.device, expected_loss: float) -> Line:
    """Make four steps: compare the loss of the first, forbid the third to wait, make the fourth fail."""
    step = build_step(config, variant, device)
    rows = [pixels_of(seed, config.views.size, device) for seed in range(4)]
    if step.grad_scaler is not None:
        step.grad_scaler.scale.fill_(2.0**8)
    loss = step(rows[0], 0, 0.1).loss.item()
    step(rows[1], 0, 0.1)  # compiles what the first one did not, records graphs
    failed = without_waiting(lambda: step(rows[2], 0, 0.1), device).skipped
    line: Line = {"said": f"loss {loss:.4f}, float32 {expected_loss:.4f}", "loss": loss, "expected": expected_loss}
    if failed:
        return {**line, "problem": "the third update was skipped"}
    if not abs(loss - expected_loss) < LOSS_TOLERANCE[variant.precision]:
        return {**line, "problem": "another loss than in float32"}
    weights = [p.detach().clone() for p in step.method.networks.parameters()]
    same = rows[3].clone()
    same[:IMAGES] = same[:1]
    if not step(same, 0, 0.1).skipped:
        return {**line, "problem": "a view of one image was not noticed"}
    if not all(torch.equal(a, b) for a, b in zip(weights, step.method.networks.parameters(), strict=True)):
        return {**line, "problem": "a skipped update changed the weights"}
    return line


def check_all(task: Task) -> Iterator[Line]:
    """Yield a line for each variant."""
    config = TINY if task.tiny else SMALL
    expected: dict[int, float] = {}
    for variant in VARIANTS:
        if task.tiny and (variant.compiled or variant.backend == "triton"):  # slow on a CPU, and rehearsed elsewhere
            continue
        if variant.parts not in expected:
            expected[variant.parts] = float32_loss(config, variant.parts, task.device)
        default = Variant(variant.precision)._asdict()
        other = [f"{name} {value}" for name, value in variant._asdict().items() if value != default[name]]
        name = ", ".join([variant.precision, *other])
        yield attempt(name, lambda variant=variant: check(config, variant, task.device, expected[variant.parts]))
        torch._dynamo.reset()


if __name__ == "__main__":
    main(check_all, __doc__)
