"""Group `optimizer`: the updates of every optimizer and of target networks, and the learning rate, equal their formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, get_args, get_type_hints

import torch
from torch import nn

from trainer.config.schema import Config, DataConfig, OptimizerConfig
from trainer.distributed.ranks import Ranks
from trainer.optimizer import build_optimizer, update
from trainer.schedule import build_schedule
from trainer.verify import plain
from trainer.verify.check import EXACT, Item, Measured, Place, largest, relative_error
from trainer.verify.training import TOTAL_STEPS, draw_pixels, tiny_config, train_step

_RATES = (0.5, 2.0, 0.1, 0.0, 1.0)  # they change, so that it matters where the rate is applied
_BASE = OptimizerConfig(weight_decay=1e-2, momentum=0.9, trust_coefficient=1e-2)
_NAMES: tuple[Any, ...] = get_args(get_type_hints(OptimizerConfig)["name"])
_STEPS_PER_EPOCH = 10


def optimizer_items(place: Place) -> Iterator[Item]:
    """Yield the checks of optimizers and of the schedule."""
    device = place.device
    for name in _NAMES:
        yield f"{name}, updates", partial(_updates, device, replace(_BASE, name=name))
        yield f"{name}, a skipped update changes nothing", partial(_skipped, device, replace(_BASE, name=name))
    yield (
        "lars with the rate outside of the momentum, updates",
        partial(_updates, device, replace(_BASE, name="lars", rate_in_momentum=False)),
    )
    for config in (replace(_BASE, name="lars"), replace(_BASE, name="larc")):
        yield f"{config.name}, all tensors together as on a GPU", partial(_updates, device, config, together=True)
    yield "BYOL, the target network follows the updated weights", partial(_target, device)
    yield "MoCo, the queue takes the keys of the step", partial(_queue, device)
    yield "cosine schedule after a warm-up from zero", partial(_cosine, "zero")
    yield "cosine schedule after a warm-up from the first step", partial(_cosine, "first_step")
    yield "schedule with drops", _drops
    yield "rules that scale the learning rate", _rules


def _model(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return matrices, a convolution, biases and a matrix of zeros, which has no ratio of norms."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 4), (4,), (3, 2, 3, 3), (2, 2)]
    weights = [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]
    weights[-1].zero_()
    return nn.ParameterList(weights).to(device)


def _set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator).to(p.device)


def _updates(device: torch.device, config: OptimizerConfig, *, together: bool = False) -> Measured:
    """Compare the weights after several updates with the formula; on a GPU, where learning rates are float32, less exactly."""
    model = _model(device, torch.float64)
    optimizer = build_optimizer(model, config, device)
    if together:
        optimizer.found_inf = torch.zeros((), dtype=torch.float64, device=device)  # type: ignore[attr-defined]
    weights = [p.detach().clone() for p in model.parameters()]
    states: list[dict[str, Any]] = [{} for _ in weights]
    errors = []
    for step, rate in enumerate(_RATES):
        _set_gradients(model, step)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        update(optimizer, rate, torch.tensor(False, device=device))
        for number, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            weights[number] = plain.updated(config, w, g, states[number], rate)
        errors += [relative_error(p, w) for p, w in zip(model.parameters(), weights, strict=True)]
    return Measured(largest(*errors), 1e-12 if device.type == "cpu" else 1e-5)


def _skipped(device: torch.device, config: OptimizerConfig) -> Measured:
    """Skip an update with gradients of NaN: weights and moments must keep every bit."""
    model = _model(device, torch.float32)
    optimizer = build_optimizer(model, config, device)
    found = []
    for skip in (False, True):
        _set_gradients(model, 0)
        if skip:
            for p in model.parameters():
                p.grad = torch.full_like(p, float("nan"))
        update(optimizer, 0.5, torch.tensor(skip, device=device))
        moments = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*model.parameters(), *moments]
        found.append(torch.cat([tensor.detach().flatten().double().cpu() for tensor in tensors]))
    return Measured((found[1] - found[0]).abs().max().item(), EXACT)


def _target(device: torch.device) -> Measured:
    """Make the update in the middle of a run: the momentum is then half-way between 0.99 and 1."""
    config = tiny_config("byol", images=16)
    step = train_step(config, Ranks(), device)
    networks: Any = step.method.networks
    before = [p.clone() for p in networks.target.parameters()]
    step(draw_pixels(config, device), TOTAL_STEPS // 2, 1.0)
    online = [*networks.encoder.parameters(), *networks.projector.parameters()]
    expected = [0.995 * old + 0.005 * new.detach() for old, new in zip(before, online, strict=True)]
    pairs = zip(networks.target.parameters(), expected, strict=True)
    return Measured(largest(*(relative_error(p, value) for p, value in pairs)), 1e-9)


def _queue(device: torch.device) -> Measured:
    """Make one update: the oldest places hold the keys of its images by the key network, of length 1, and others stay."""
    config = tiny_config("moco", images=16)
    step = train_step(config, Ranks(), device)
    networks: Any = step.method.networks
    pixels = draw_pixels(config, device)
    with torch.no_grad():
        keys = networks(pixels).keys
    expected = networks.queue.clone()
    number = 2
    expected[16 * number : 16 * (number + 1)] = keys / keys.norm(dim=1, keepdim=True)
    step(pixels, number, 1.0)
    return Measured(relative_error(networks.queue, expected), 1e-9)


def _config(**options: Any) -> Config:
    optimizer = OptimizerConfig(learning_rate=0.3, learning_rate_rule="fixed", epochs=20, **options)
    return Config(data=DataConfig(images_per_step=512), optimizer=optimizer)


def _compare(config: Config, rates: dict[int, float]) -> Measured:
    """Compare the learning rate with the expected one in each of the given steps."""
    schedule = build_schedule(config, _STEPS_PER_EPOCH)
    errors = [abs(schedule.learning_rate(step) - rate) for step, rate in rates.items()]
    return Measured(max(errors) / 0.3, 1e-12)


def _cosine(warmup_from: str) -> Measured:
    """Check the start, both sides of the end of the warm-up, the middle of the cosine, and the last step."""
    config = _config(warmup_epochs=4.0, warmup_from=warmup_from, start_learning_rate=0.01, final_learning_rate=0.02)
    extra = 1 if warmup_from == "first_step" else 0
    # 40 steps of warm-up, then 160 steps of cosine.
    rates = {step: 0.01 + (0.3 - 0.01) * (step + extra) / 40 for step in (0, 1, 20, 39)}
    for step in (40, 41, 80, 120, 199, 200):
        rates[step] = 0.02 + (0.3 - 0.02) * (1 + math.cos(math.pi * (step - 40) / 160)) / 2
    return _compare(config, rates)


def _drops() -> Measured:
    """Check both sides of each drop; drops are counted in epochs from the end."""
    config = _config(warmup_steps=5, schedule="drops", drop_epochs_before_end=(10, 5), drop_factor=0.2)
    rates = {0: 0.0, 4: 0.3 * 4 / 5, 5: 0.3, 99: 0.3, 100: 0.06, 149: 0.06, 150: 0.012, 199: 0.012}
    return _compare(config, rates)


def _rules() -> Measured:
    """Check the peak by each rule, for 512 images in a step."""
    expected = {"fixed": 0.3, "sqrt": 0.3 * 512**0.5, "linear": 0.3 * 2}
    errors = []
    config = _config()
    for rule, rate in expected.items():
        options: dict[str, Any] = {"learning_rate_rule": rule}
        scaled = replace(config, optimizer=replace(config.optimizer, **options))
        found = build_schedule(scaled, _STEPS_PER_EPOCH).learning_rate(0)
        errors.append(abs(found - rate) / rate)
    return Measured(max(errors), 1e-12)
