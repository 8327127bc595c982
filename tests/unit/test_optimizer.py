"""Every optimizer equals its formula, and a skipped update changes nothing."""

import copy
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from trainer.config.schema import Config, OptimizerConfig
from trainer.optimizer import Lars, build_optimizer, update
from trainer.run.checkpoint_check import first_difference, wanted_moments
from trainer.schedule import build_schedule, peak_learning_rate
from trainer.verify.plain import updated

CPU = torch.device("cpu")
LARS = OptimizerConfig(name="lars", weight_decay=1e-2, momentum=0.9, trust_coefficient=1e-3)
OUTSIDE = replace(LARS, rate_in_momentum=False)
LARC = replace(LARS, name="larc")
NAMES = get_args(get_type_hints(OptimizerConfig)["name"])
RATES = (0.5, 2.0, 0.1)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False)).double()


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


@pytest.mark.parametrize(
    ("config", "together"),
    [
        *((replace(LARS, name=name), False) for name in NAMES),
        (OUTSIDE, False),
        (LARS, True),
        (LARC, True),
        (OUTSIDE, True),
    ],
)
def test_updates_equal_the_formula_while_the_learning_rate_changes(config: OptimizerConfig, together: bool) -> None:
    """together: LARS and LARC update all tensors of a group together, as on a GPU."""
    model = small_model()
    with torch.no_grad():
        model[2].weight.zero_()  # a weight with norm 0 has no adaptation
    optimizer = build_optimizer(model, config, CPU)
    if together:
        optimizer.found_inf = torch.tensor(0.0, dtype=torch.float64)  # type: ignore[attr-defined]
    weights = [p.detach().clone() for p in model.parameters()]
    states: list[dict[str, Any]] = [{} for _ in weights]
    for step, rate in enumerate(RATES):
        set_gradients(model, step)
        if step == 1:
            model[0].bias.grad.zero_()  # a gradient with norm 0 has none either
        gradients = [p.grad.clone() for p in model.parameters()]
        update(optimizer, rate, torch.tensor(False))
        weights = [updated(config, *of, rate) for of in zip(weights, gradients, states, strict=True)]
    for p, w in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-14)


def test_the_rate_inside_and_outside_of_the_momentum_differ_by_its_changes() -> None:
    """With a constant rate both are the same; a later rate of 0 stops only the weights of which it is outside."""
    after = []
    for inside in (True, False):
        model = small_model()
        optimizer = build_optimizer(model, replace(LARS, rate_in_momentum=inside), CPU)
        moved = []
        for step, rate in enumerate((0.5, 0.5, 0.0)):
            before = model[0].weight.detach().clone()
            set_gradients(model, step)
            update(optimizer, rate, torch.tensor(False))
            moved.append(model[0].weight.detach() - before)
        after.append(moved)
    torch.testing.assert_close(after[0][:2], after[1][:2], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after[0][2], 0.9 * after[0][1], rtol=1e-12, atol=1e-14)
    assert not after[1][2].any()


def test_a_zero_gradient_without_weight_decay_changes_nothing() -> None:
    model = nn.Linear(3, 2, bias=False).double()
    before = model.weight.detach().clone()
    optimizer = Lars([{"params": [model.weight], "weight_decay": 0.0, "adapt": True}])
    model.weight.grad = torch.zeros_like(model.weight)
    update(optimizer, 1.0, torch.tensor(False))
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", ["lars", "larc"])
@pytest.mark.parametrize("failed", [0.0, 1.0])
def test_lars_skips_the_update_by_a_flag_on_the_device(failed: float, name: str) -> None:
    """On a GPU the flag is a tensor, because the host does not wait for it."""
    model = small_model().float()
    plain, gated = small_model().float(), model
    buffers = []
    for m, bit in ((plain, None), (gated, torch.tensor(failed))):
        optimizer = build_optimizer(m, replace(LARS, name=name), CPU)
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


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "third"])
def test_the_fused_kernels_skip_an_update_by_a_flag_on_the_device(
    name: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run on a CPU as well. Without a buffer of zeros, SGD's first update after a skipped one would add to memory that
    nobody has written."""
    results = []
    for skips in (False, True):
        model = small_model().float()
        optimizer = build_optimizer(model, replace(LARS, name=name), CPU)
        for group in optimizer.param_groups:
            group |= {"fused": True, "foreach": False, "lr": 0.5}
        monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, 7.0))
        for step in range(3):
            if skips and step == (0 if first else 2):
                before = [x.clone() for x in tensors_of(optimizer)]
                set_gradients(model, 9)
                for p in model.parameters():
                    p.grad = p.grad.float().fill_(float("nan"))
                optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
                optimizer.step()
                if not first:
                    assert all(torch.equal(a, b) for a, b in zip(tensors_of(optimizer), before, strict=True))
            set_gradients(model, step)
            optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
            optimizer.step()
        results.append(tensors_of(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return weights and moments."""
    weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return [*weights, *(value for state in optimizer.state.values() for value in state.values())]


@pytest.mark.parametrize("config", [LARS, OUTSIDE, LARC])
def test_lars_reads_no_value_from_the_device(config: OptimizerConfig) -> None:
    """Tensors on the meta device have no values, so that reading one on the host raises."""
    nowhere = torch.device("meta")
    model = small_model().to(nowhere)
    optimizer = build_optimizer(model, config, nowhere)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    update(optimizer, 0.5, torch.zeros((), dtype=torch.bool, device=nowhere))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_with_a_constant_rate_keep_the_peak_over_the_whole_run(name: str) -> None:
    """They move as if the schedule were constant, and the others as if there were no such parameters."""
    settings = replace(
        LARS,
        name=name,
        learning_rate=0.1,
        learning_rate_rule="linear",
        epochs=10,
        warmup_epochs=2.0,
        trust_coefficient=0.1,
    )
    config = replace(Config(), optimizer=settings)
    schedule = build_schedule(config, steps_per_epoch=1)
    peak = peak_learning_rate(config)
    moved, scheduled, constant = small_model(), small_model(), small_model()
    moved[2] = nn.Sequential(moved[2], nn.BatchNorm1d(3).double())
    held = list(moved[2].parameters())
    optimizers = [
        build_optimizer(moved, settings, CPU, held, peak),
        build_optimizer(scheduled, settings, CPU),
        build_optimizer(constant, settings, CPU),
    ]
    used = set()
    for step in range(schedule.total_steps):
        rate = schedule.learning_rate(step)
        for model, optimizer, rate_of_step in zip(
            (moved, scheduled, constant), optimizers, (rate, rate, peak), strict=True
        ):
            set_gradients(model, step)
            update(optimizer, rate_of_step, torch.tensor(False))
        used |= {group["lr"] for group in optimizers[0].param_groups if group["params"][0] is held[0]}
    assert used == {peak}
    assert torch.equal(moved[2][0].weight, constant[2].weight)
    assert torch.equal(moved[0].weight, scheduled[0].weight)
    assert not torch.equal(moved[2][0].weight, scheduled[2].weight)
    with pytest.raises(ValueError, match="pass peak"):
        build_optimizer(moved, settings, CPU, held)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_with_constant_rates_is_loaded_again(name: str) -> None:
    """A checkpoint holds it by numbers, which follow the groups. Without such parameters the groups are as before."""
    config = replace(LARS, name=name)
    made = []
    for _ in range(2):
        model = small_model()
        made.append((model, build_optimizer(model, config, CPU, list(model[2].parameters()), 0.3)))
    (model, optimizer), (other, resumed) = made
    set_gradients(model, 0)
    update(optimizer, 0.1, torch.tensor(False))
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    assert first_difference(saved, wanted_moments(resumed, config), "optimizer.state") is None
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict({"state": saved, "param_groups": resumed.state_dict()["param_groups"]})
    for m, o in made:
        set_gradients(m, 1)
        update(o, 0.1, torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(optimizer), tensors_of(resumed), strict=True))
    assert {group["lr"] for group in resumed.param_groups if "constant_rate" in group} == {0.3}
    plain = small_model()
    order = [p for group in build_optimizer(plain, config, CPU).param_groups for p in group["params"]]
    expected = (
        sorted(plain.parameters(), key=lambda p: p.ndim <= 1) if name in ("lars", "adamw") else plain.parameters()
    )
    assert [id(p) for p in order] == [id(p) for p in expected]


@pytest.mark.parametrize("name", ["lars", "larc", "sgd"])
def test_a_parameter_without_a_gradient_has_a_buffer_for_the_checkpoint(name: str) -> None:
    """A method may leave out the gradient of a parameter in some steps."""
    model = small_model()
    optimizer = build_optimizer(model, replace(LARS, name=name), CPU)
    set_gradients(model, 0)
    model[2].weight.grad = None
    before = model[2].weight.detach().clone()
    update(optimizer, 0.1, torch.tensor(False))
    assert torch.equal(model[2].weight, before)
    wanted = wanted_moments(optimizer, replace(LARS, name=name))
    assert first_difference(optimizer.state_dict()["state"], wanted, "optimizer.state") is None


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_without_momentum_has_the_state_that_a_resumed_run_expects(name: str) -> None:
    model = small_model()
    config = replace(LARS, name=name, momentum=0.0)
    optimizer = build_optimizer(model, config, CPU)
    set_gradients(model, 0)
    update(optimizer, 0.1, torch.tensor(False))
    state = optimizer.state_dict()["state"]
    assert state == {} or first_difference(state, wanted_moments(optimizer, config), "optimizer.state") is None
