"""The training step on a GPU: python -m tests.gpu.check_step OUT.json [--tiny]

In every precision, eager, compiled and as CUDA graphs: it waits for nothing, its loss follows the float32 one, a failed step
changes nothing. What the optimizers take for the recipe's ResNet-50. Prints a line for each check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.gpu.part import Part, begin, end, in_words, table
from trainer.bench.timing import spread, take_turns, timed
from trainer.cluster.ranks import Ranks
from trainer.config import Config, LossConfig, ModelConfig, OptimizerConfig, ViewsConfig
from trainer.device import autocast_dtype
from trainer.model import build_model
from trainer.optimizer import build_optimizer, update
from trainer.setup import compile_model
from trainer.step import StepResult, TrainStep

IMAGES, VIEWS = 64, 2  # of which a slice takes 32
SMALL = Config(
    views=ViewsConfig(num_views=VIEWS, side=64),
    model=ModelConfig("resnet18", projector_hidden=(64,), embedding_size=16, zero_init_last=False),
    loss=LossConfig(slice_size=32),
    precision="fp32",
)
TINY = replace(SMALL, model=replace(SMALL.model, backbone="test_resnet"))
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 0.15, "fp16": 0.05}  # of the first step's loss, near 2
LARS_AIM_MS = 1.0


class Variant(NamedTuple):
    """One way to make a step."""

    precision: str
    compiled: bool = False
    cuda_graphs: bool = False
    optimizer: str = "lars"
    parts: int = 1


VARIANTS = (
    Variant("fp32"),
    Variant("bf16"),
    Variant("fp16"),
    Variant("bf16", optimizer="adam"),
    Variant("bf16", parts=2),
    Variant("fp16", parts=2, compiled=True),
    Variant("bf16", compiled=True),
    Variant("bf16", compiled=True, cuda_graphs=True),
    Variant("bf16", compiled=True, cuda_graphs=True, parts=2),
)


def build_step(config: Config, variant: Variant, device: torch.device) -> TrainStep:
    """A step of the seed's weights."""
    config = replace(config, precision=variant.precision)
    model = build_model(config, Ranks()).to(device)
    if variant.compiled:
        compile_model(model, replace(config, cuda_graphs=variant.cuda_graphs), device)
    return TrainStep(
        model,
        build_optimizer(model, replace(config.optimizer, name=variant.optimizer), device),
        config.loss,
        num_views=VIEWS,
        autocast_dtype=autocast_dtype(config, device),
        ranks=Ranks(),
        accumulation_steps=variant.parts,
    )


def pixels_of(seed: int, side: int, device: torch.device) -> Tensor:
    """(R, 3, S, S) uint8, channels_last: smooth, so that the views of an image have something in common."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(IMAGES, 3, 5, 5, generator=generator).repeat(VIEWS, 1, 1, 1)
    noise = torch.rand(VIEWS * IMAGES, 3, side, side, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bilinear")
    pixels = (255 * (0.8 * smooth + 0.2 * noise)).to(torch.uint8)
    return pixels.to(device).contiguous(memory_format=torch.channels_last)


def check(config: Config, variant: Variant, device: torch.device, expected_loss: float) -> tuple[str, str]:
    """-> (what was seen, the problem or nothing)."""
    step, orders = build_step(config, variant, device), torch.arange(IMAGES, device=device)[None]
    rows = [pixels_of(seed, config.views.side, device) for seed in range(4)]
    if step.loss_scale is not None:
        step.loss_scale.scale.fill_(2.0**8)
    loss = step(rows[0], orders, 0.1).loss.item()
    step(rows[1], orders, 0.1)  # compiles what the first one did not, records graphs
    failed = _without_waiting(lambda: step(rows[2], orders, 0.1), device).failed
    seen = f"loss {loss:.4f}, float32 {expected_loss:.4f}"
    if failed:
        return seen, "the third step failed"
    if not abs(loss - expected_loss) < LOSS_TOLERANCE[variant.precision]:
        return seen, "another loss than in float32"
    weights = [p.detach().clone() for p in step.model.parameters()]
    same = rows[3].clone()
    same[:IMAGES] = same[:1]
    if not step(same, orders, 0.1).failed:
        return seen, "a view of one picture was not noticed"
    if not all(torch.equal(a, b) for a, b in zip(weights, step.model.parameters(), strict=True)):
        return seen, "a failed step changed the weights"
    return seen, ""


def _without_waiting(step: Callable[[], StepResult], device: torch.device) -> StepResult:
    """torch raises where something waits for the device."""
    if device.type != "cuda":
        return step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_all(config: Config, device: torch.device, tiny: bool) -> Iterator[tuple[Variant, str, str]]:
    """A line for each variant; an error is a problem of this one alone."""
    orders = torch.arange(IMAGES, device=device)[None]
    first = build_step(config, Variant("fp32"), device)(pixels_of(0, config.views.side, device), orders, 0.1)
    expected = first.loss.item()
    for variant in VARIANTS:
        if tiny and variant.compiled:  # minutes on a CPU; tests/unit/test_step.py has it
            continue
        try:
            yield variant, *check(config, variant, device, expected)
        except Exception as error:  # whatever it is, it is reported, and the others are still checked
            yield variant, "", in_words(error)
        torch._dynamo.reset()


def time_optimizers(config: Config, device: torch.device, seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds of one update of all parameters: ours, and torch's SGD for comparison."""
    model = build_model(config, Ranks()).to(device)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    sound = torch.tensor(False, device=device)
    optimizers = {name: build_optimizer(model, OptimizerConfig(name=name), device) for name in ("lars", "adam")}
    steps: dict[str, Callable[[], Any]] = {
        name: (lambda optimizer=optimizer: update(optimizer, 1e-9, sound)) for name, optimizer in optimizers.items()
    }
    sgd = torch.optim.SGD(model.parameters(), 1e-9, momentum=0.9, foreach=True)
    steps["torch_sgd"] = sgd.step
    samples = take_turns({name: timed(step, device) for name, step in steps.items()}, seconds)
    return {
        name: {key: value / 1e3 for key, value in spread(us).items() if key != "windows"}
        for name, us in samples.items()
    }


def run(part: Part) -> int:
    """Check, time, write; the exit code of the part."""
    config = TINY if part.tiny else SMALL
    lines = list(check_all(config, part.device, part.tiny))
    rows = [("variant", "seen", "problem")]
    for variant, seen, problem in lines:
        rows.append((", ".join(f"{k} {v}" for k, v in variant._asdict().items()), seen, problem))
    print(table(rows))
    problems = [f"{tuple(variant)}: {problem}" for variant, _, problem in lines if problem]
    timed_config = config if part.tiny else Config()  # whose model is the recipe's ResNet-50
    milliseconds = time_optimizers(timed_config, part.device, 0.2 if part.tiny else 5.0)
    print(table([("optimizer", "ms an update"), *((n, f"{f['median']:.3f}") for n, f in milliseconds.items())]))
    lars = milliseconds["lars"]["median"]
    if part.device.type == "cuda" and lars > LARS_AIM_MS:
        problems.append(f"lars takes {lars:.2f} ms, the aim is {LARS_AIM_MS}")
    result = {
        "steps": [{**v._asdict(), "seen": seen, "problem": p} for v, seen, p in lines],
        "optimizer_ms": milliseconds,
    }
    return end(part, result, problems, f"{len(lines)} kinds of step, lars {lars:.3f} ms")


if __name__ == "__main__":
    sys.exit(run(begin(__doc__)))
