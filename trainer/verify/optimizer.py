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
from trainer.verify.check import EXACT, Item, Measured, Place, largest, largest_relative, relative_error
from trainer.verify.training import TOTAL_STEPS, draw_pixels, tiny_config, train_step

_RATES = (0.5, 2.0, 0.1, 0.0, 1.0)  # they change, so that it matters where the rate is applied
_BASE = OptimizerConfig(weight_decay=1e-2, momentum=0.9, trust_coefficient=1e-2)
_NAMES: tuple[Any, ...] = get_args(get_type_hints(OptimizerConfig)["name"])
_PEAK = 0.3  # learning rate after the warm-up
_STEPS_PER_EPOCH = 10


def optimizer_items(place: Place) -> Iterator[Item]:
    """Yield the checks of optimizers and of the schedule."""
    device = place.device
    for name in _NAMES:
        config = replace(_BASE, name=name)
        yield f"{name}, updates", partial(_updates, device, config)
        yield f"{name}, a skipped update changes nothing", partial(_skipped, device, config)
    outside = replace(_BASE, name="lars", rate_in_momentum=False)
    yield "lars with the rate outside of the momentum, updates", partial(_updates, device, outside)
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
    # A matrix of zeros would divide the ratio by 0.
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
        # An optimizer with this attribute updates all tensors at once, as it does on a GPU.
        optimizer.found_inf = torch.zeros((), dtype=torch.float64, device=device)  # type: ignore[attr-defined]
    weights = [p.detach().clone() for p in model.parameters()]
    states: list[dict[str, Any]] = [{} for _ in weights]
    not_skipped = torch.tensor(False, device=device)
    errors = []
    for step, rate in enumerate(_RATES):
        _set_gradients(model, step)
        # The update may change the gradients in place, so the formula gets copies.
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        update(optimizer, rate, not_skipped)
        for number, g in enumerate(gradients):
            weights[number] = plain.updated(config, weights[number], g, states[number], rate)
        pairs = zip(model.parameters(), weights, strict=True)
        errors.append(largest_relative(pairs))
    bound = 1e-12 if device.type == "cpu" else 1e-5
    return Measured(largest(*errors), bound)


def _skipped(device: torch.device, config: OptimizerConfig) -> Measured:
    """Skip an update with gradients of NaN: weights and moments must keep every bit."""
    model = _model(device, torch.float32)
    optimizer = build_optimizer(model, config, device)
    found = []
    # The first update creates the moments, the second one is skipped.
    for skip in (False, True):
        _set_gradients(model, 0)
        if skip:
            for p in model.parameters():
                p.grad = torch.full_like(p, float("nan"))
        update(optimizer, 0.5, torch.tensor(skip, device=device))
        moments = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [tensor.detach().flatten().double().cpu() for tensor in (*model.parameters(), *moments)]
        found.append(torch.cat(tensors))
    before, after = found
    return Measured((after - before).abs().max().item(), EXACT)


def _target(device: torch.device) -> Measured:
    """Make the update in the middle of a run: the momentum is then half-way between 0.99 and 1."""
    config = tiny_config("byol", images=16)
    step = train_step(config, Ranks(), device)
    networks: Any = step.method.networks
    before = [p.clone() for p in networks.target.parameters()]
    step(draw_pixels(config, device), TOTAL_STEPS // 2, 1.0)
    # The target follows the weights after the update.
    online = [*networks.encoder.parameters(), *networks.projector.parameters()]
    pairs = []
    for p, old, new in zip(networks.target.parameters(), before, online, strict=True):
        expected = 0.995 * old + 0.005 * new.detach()
        pairs.append((p, expected))
    return Measured(largest_relative(pairs), 1e-9)


def _queue(device: torch.device) -> Measured:
    """Make one update: the oldest places hold the keys of its images by the key network, of length 1, and others stay."""
    num_images = 16
    config = tiny_config("moco", images=num_images)
    step = train_step(config, Ranks(), device)
    networks: Any = step.method.networks
    pixels = draw_pixels(config, device)
    # The keys must be computed before the step, which moves the key network.
    with torch.no_grad():
        keys = networks(pixels).keys
    expected = networks.queue.clone()
    # Each step fills the places after those of the step before it, so step 2 fills the third part of the queue.
    number = 2
    first = number * num_images
    expected[first : first + num_images] = keys / keys.norm(dim=1, keepdim=True)
    step(pixels, number, 1.0)
    return Measured(relative_error(networks.queue, expected), 1e-9)


def _config(**options: Any) -> Config:
    optimizer = OptimizerConfig(
        learning_rate=_PEAK,
        learning_rate_rule="fixed",
        epochs=20,
        **options,
    )
    data = DataConfig(images_per_step=512)
    return Config(data=data, optimizer=optimizer)


def _compare(config: Config, rates: dict[int, float]) -> Measured:
    """Compare the learning rate with the expected one in each of the given steps."""
    schedule = build_schedule(config, _STEPS_PER_EPOCH)
    errors = [abs(schedule.learning_rate(step) - rate) for step, rate in rates.items()]
    return Measured(max(errors) / _PEAK, 1e-12)


def _cosine(warmup_from: str) -> Measured:
    """Check the start, both sides of the end of the warm-up, the middle of the cosine, and the last step."""
    start = 0.01
    final = 0.02
    config = _config(
        warmup_epochs=4.0,
        warmup_from=warmup_from,
        start_learning_rate=start,
        final_learning_rate=final,
    )
    extra = 1 if warmup_from == "first_step" else 0
    # 40 steps of warm-up, then 160 steps of cosine.
    rates = {}
    for step in (0, 1, 20, 39):
        rates[step] = start + (_PEAK - start) * (step + extra) / 40
    for step in (40, 41, 80, 120, 199, 200):
        share = (1 + math.cos(math.pi * (step - 40) / 160)) / 2
        rates[step] = final + (_PEAK - final) * share
    return _compare(config, rates)


def _drops() -> Measured:
    """Check both sides of each drop; drops are counted in epochs from the end."""
    config = _config(
        warmup_steps=5,
        schedule="drops",
        drop_epochs_before_end=(10, 5),
        drop_factor=0.2,
    )
    # Last step before each change, and the first one after it.
    rates = {
        0: 0.0,
        4: _PEAK * 4 / 5,
        5: _PEAK,
        99: _PEAK,
        100: 0.06,
        149: 0.06,
        150: 0.012,
        199: 0.012,
    }
    return _compare(config, rates)


def _rules() -> Measured:
    """Check the peak by each rule, for 512 images in a step."""
    config = _config()
    # The square root takes the number of images, the linear rule its ratio to 256.
    expected = {
        "fixed": _PEAK,
        "sqrt": _PEAK * 512**0.5,
        "linear": _PEAK * 512 / 256,
    }
    errors = []
    for rule, rate in expected.items():
        options: dict[str, Any] = {"learning_rate_rule": rule}
        optimizer = replace(config.optimizer, **options)
        schedule = build_schedule(replace(config, optimizer=optimizer), _STEPS_PER_EPOCH)
        errors.append(abs(schedule.learning_rate(0) - rate) / rate)
    return Measured(max(errors), 1e-12)
