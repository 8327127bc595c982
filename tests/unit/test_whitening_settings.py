"""SimCLR on whitened embeddings, and W-MSE with another whitening: values, gradients, failed slices and settings."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics.test_contrastive import V, definition
from tests.numerics.test_wmse_loss import whiten_slice
from tests.unit.test_methods import CONFIG, IMAGES, pixels, same, state_of
from trainer.config.checks import check
from trainer.config.schema import Config, SimCLRSettings, WMSESettings
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.methods.method import LossOutput, MethodContext
from trainer.methods.simclr.method import SimCLR
from trainer.methods.wmse.method import WMSE
from trainer.run.faults import describe_fault
from trainer.setup import build_step
from trainer.tools.dry_run import setting_warnings

CPU = torch.device("cpu")
EMBEDDINGS = V[:32]


def config_of(**settings: Any) -> Config:
    return replace(CONFIG, method="simclr", simclr=SimCLRSettings(**{"whiten": True, "slice_size": 8, **settings}))


def loss_of(config: Config, outputs: Tensor) -> LossOutput:
    return SimCLR(MethodContext(config, Ranks(), CPU)).loss(outputs, 0, ImageRange(0, IMAGES))


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"normalize": False, "temperature": 1.0}, 4.048112188415),
        ({"normalize": True, "temperature": 0.5}, 3.568737910221),
    ],
)
def test_value_and_gradient_equal_the_definition(settings: dict, value: float) -> None:
    v = EMBEDDINGS.clone().requires_grad_()
    output = loss_of(config_of(**settings), v)
    assert output.loss.item() == pytest.approx(value, abs=1e-12)
    z = torch.cat([whiten_slice(rows, "cholesky") for rows in v.split(8)])
    expected = definition(z, 2, **settings)
    gradients = [torch.autograd.grad(loss, v)[0] for loss in (output.loss, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


def test_the_loss_ignores_shift_and_positive_scale_of_a_dimension() -> None:
    config = config_of()
    moved = (EMBEDDINGS + 3) * torch.logspace(-3, 3, 4, dtype=torch.float64)
    assert loss_of(config, moved).loss.item() == pytest.approx(loss_of(config, EMBEDDINGS).loss.item(), rel=1e-10)


def test_without_whitening_nothing_is_declared() -> None:
    method = SimCLR(MethodContext(config_of(whiten=False), Ranks(), CPU))
    assert (method.checks, dict(method.metrics)) == ((), {})


@pytest.mark.parametrize("normalize", [True, False])
def test_a_slice_that_cannot_be_whitened_skips_the_update(normalize: bool) -> None:
    step = build_step(config_of(normalize=normalize), Ranks(), CPU)
    result = step(pixels(0), 0, 0.1)
    assert not result.skipped
    assert 0 < result.metrics["min_pivot"] <= 1
    before = state_of(step)
    bad = pixels(1)
    bad[IMAGES + 8 : IMAGES + 16] = bad[-1:]  # the second slice of view 1
    result = step(bad, 1, 0.1)
    assert result.skipped
    assert result.loss.isfinite()
    fault = describe_fault(int(result.flags.fault), step.method.checks, 1, 1)
    assert fault == "rank 0: a slice of view 1 cannot be whitened"
    assert all(same(state_of(step), before))


def test_settings_that_do_not_fit_are_refused() -> None:
    (problem,) = check(config_of(slice_size=4))
    assert problem.startswith(
        "simclr.slice_size is 4 with model.embedding_size 4: a slice needs more rows than columns"
    )
    (problem,) = check(config_of(slice_size=7))
    assert problem.startswith("data.images_per_step is 16, not a multiple of simclr.slice_size 7: set it to 14 or 21, ")
    assert check(config_of(whiten=False, slice_size=7)) == []


def test_a_slice_size_without_whitening_logs_a_warning() -> None:
    warning = "simclr.slice_size 8 has no effect: simclr.whiten is false"
    assert warning in setting_warnings(config_of(whiten=False), 1, CPU)
    assert warning not in setting_warnings(config_of(), 1, CPU)


@pytest.mark.parametrize(("slice_size", "value"), [(8, 1.796059794461), (16, 1.838033672897)])
def test_the_whitening_of_wmse_reaches_the_loss(slice_size: int, value: float) -> None:
    settings = WMSESettings(whitening="standardise", slice_size=slice_size)
    method = WMSE(MethodContext(replace(CONFIG, wmse=settings), Ranks(), CPU))
    output = method.loss(EMBEDDINGS, 0, ImageRange(0, IMAGES))
    assert output.loss.item() == pytest.approx(value, abs=1e-12)
    assert output.ok.all()


def test_a_dimension_of_low_variance_is_no_warning_when_dimensions_are_standardised() -> None:
    for whitening, warnings in (("standardise", 0), ("zca", 1)):
        config = replace(CONFIG, wmse=replace(CONFIG.wmse, whitening=whitening))
        assert len(WMSE(MethodContext(config, Ranks(), CPU)).health_warnings({"min_pivot": 1e-5})) == warnings


def test_settings_of_the_other_whitenings_are_checked() -> None:
    def problems(**settings: Any) -> list[str]:
        return check(replace(CONFIG, wmse=replace(CONFIG.wmse, **settings)))

    assert problems(whitening="standardise", slice_size=4) == []
    assert problems(whitening="zca") == []
    for settings, message in (
        ({"whitening": "zca", "slice_size": 4}, "a slice needs more rows than columns"),
        ({"whitening": "zca", "cholesky_float64": True}, "wmse.cholesky_float64 is true with wmse.whitening zca"),
        ({"whitening": "standardise", "backend": "triton"}, "set the backend to auto"),
    ):
        (problem,) = problems(**settings)
        assert message in problem
