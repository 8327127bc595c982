"""LARS equals its formula, and a skipped update changes nothing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from trainer.config.schema import OptimizerConfig
from trainer.optimizer import Lars, build_optimizer, update

CPU = torch.device("cpu")
LARS = OptimizerConfig(name="lars", weight_decay=1e-2, momentum=0.9, trust_coefficient=1e-3)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False)).double()


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def lars_by_formula(w: Tensor, g: Tensor, v: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Return weight and momentum after one update of a tensor by SimCLR's rule."""
    trust = 1.0
    if w.ndim > 1:
        g = g + LARS.weight_decay * w
        if w.norm() > 0 and g.norm() > 0:
            trust = LARS.trust_coefficient * w.norm() / g.norm()
    v = LARS.momentum * v + rate * trust * g
    return w - v, v


def test_lars_equals_the_formula_while_the_learning_rate_changes() -> None:
    model = small_model()
    with torch.no_grad():
        model[2].weight.zero_()  # a weight with norm 0 has no adaptation
    optimizer = build_optimizer(model, LARS, CPU)
    weights = [p.detach().clone() for p in model.parameters()]
    buffers = [torch.zeros_like(w) for w in weights]
    for step, rate in enumerate((0.5, 2.0, 0.1)):
        set_gradients(model, step)
        gradients = [p.grad.clone() for p in model.parameters()]
        update(optimizer, rate, torch.tensor(False))
        for i, (g, v) in enumerate(zip(gradients, buffers, strict=True)):
            weights[i], buffers[i] = lars_by_formula(weights[i], g, v, rate)
    for p, w in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-14)


def test_a_zero_gradient_without_weight_decay_changes_nothing() -> None:
    model = nn.Linear(3, 2, bias=False).double()
    before = model.weight.detach().clone()
    optimizer = Lars([{"params": [model.weight], "weight_decay": 0.0, "adapt": True}], 0.9, 1e-3)
    model.weight.grad = torch.zeros_like(model.weight)
    update(optimizer, 1.0, torch.tensor(False))
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["lars", "adam"])
def test_a_skipped_update_changes_nothing(name: str) -> None:
    model = small_model()
    optimizer = build_optimizer(model, replace(LARS, name=name), CPU)
    set_gradients(model, 0)
    update(optimizer, 0.5, torch.tensor(False))
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
    set_gradients(model, 1)
    for p in model.parameters():
        p.grad.fill_(float("nan"))
    update(optimizer, 0.5, torch.tensor(True))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    after = [v for s in optimizer.state.values() for v in s.values()]
    assert all(torch.equal(a, m) for a, m in zip(after, moments, strict=True))


@pytest.mark.parametrize("failed", [0.0, 1.0])
def test_lars_skips_the_update_by_a_flag_on_the_device(failed: float) -> None:
    """On a GPU the flag is a tensor, because the host does not wait for it."""
    model = small_model().float()
    plain, gated = small_model().float(), model
    buffers = []
    for m, bit in ((plain, None), (gated, torch.tensor(failed))):
        optimizer = build_optimizer(m, LARS, CPU)
        for step in range(2):
            set_gradients(m, step)
            if step == 1 and bit is not None:
                optimizer.found_inf = bit  # type: ignore[attr-defined]
                if failed:
                    for p in m.parameters():
                        p.grad.fill_(float("nan"))
            if not (step == 1 and bit is None and failed):
                for group in optimizer.param_groups:
                    group["lr"] = 0.5
                optimizer.step()
        buffers.append([state["momentum_buffer"] for state in optimizer.state.values()])
    for a, b in zip((*gated.parameters(), *buffers[1]), (*plain.parameters(), *buffers[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_vectors_have_no_weight_decay_and_no_adaptation() -> None:
    groups = build_optimizer(small_model(), LARS, CPU).param_groups
    assert [(g["weight_decay"], g["adapt"], {p.ndim for p in g["params"]}) for g in groups] == [
        (1e-2, True, {2}),
        (0.0, False, {1}),
    ]


def test_adam_has_coupled_weight_decay() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    optimizer = build_optimizer(model, OptimizerConfig(name="adam", weight_decay=0.5), CPU)
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros_like(model.weight)
    update(optimizer, 0.1, torch.tensor(False))
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * before.sign(), rtol=1e-5, atol=1e-6)
