"""The settings of a method reach its loss and its networks, and settings that make no sense are refused or warned about."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from tests.unit.test_methods import CONFIG, CPU, pixels
from trainer.config.checks import check
from trainer.config.schema import METHODS, Config
from trainer.distributed.ranks import Ranks
from trainer.losses.align_uniform import alignment, uniformity
from trainer.losses.barlow_twins import barlow_twins_loss
from trainer.losses.contrastive import contrastive_loss
from trainer.losses.queue_contrast import queue_contrast_loss
from trainer.losses.regression import regression_loss
from trainer.losses.swapped import swapped_prediction_loss
from trainer.losses.vicreg import vicreg_terms
from trainer.models.projector import Projector
from trainer.setup import build_step
from trainer.tools.run_plan import plan_warnings


def config_of(method: str, **settings: Any) -> Config:
    return replace(CONFIG, method=method, **{method: replace(getattr(CONFIG, method), **settings)})


def align_uniform(outputs: Any, networks: Any) -> Tensor:
    queries, keys = normalize(outputs.queries, dim=1), normalize(outputs.keys, dim=1)
    return 2 * alignment(queries, keys) + 0.5 * uniformity(queries, networks.queue, t=4.0)


def swav(outputs: Any, networks: Any) -> Tensor:
    scores = normalize(outputs.embeddings, dim=1) @ networks.prototypes.weight.T
    return swapped_prediction_loss(scores, num_views=2, temperature=0.3, epsilon=0.2, iterations=1)


def vicreg(outputs: Tensor, networks: Any) -> Tensor:
    terms = vicreg_terms(outputs, num_views=2, num_images=16)
    return 2 * terms.invariance + 3 * terms.variance + 4 * terms.covariance


# Settings that differ from the defaults and from each other, and the loss that they give.
LOSSES: dict[str, tuple[dict[str, Any], Callable[[Any, Any], Tensor]]] = {
    "simclr": (
        {"temperature": 0.3, "normalize": False, "scale": 2.0},
        lambda o, _: 2 * contrastive_loss(o, num_views=2, temperature=0.3, normalize=False),
    ),
    "byol": (
        {"normalize": False},
        lambda o, _: regression_loss(o.predictions, o.targets, num_views=2, normalize=False),
    ),
    "simsiam": ({}, lambda o, _: regression_loss(o.predictions, o.embeddings, num_views=2) / 4 - 1),
    "moco": (
        {"temperature": 0.3},
        lambda o, networks: queue_contrast_loss(
            normalize(o.queries, dim=1), normalize(o.keys, dim=1), networks.queue, temperature=0.3
        ),
    ),
    "align_uniform": ({"align_weight": 2.0, "uniform_weight": 0.5, "uniform_t": 4.0}, align_uniform),
    "swav": ({"temperature": 0.3, "epsilon": 0.2, "sinkhorn_iterations": 1}, swav),
    "barlow_twins": (
        {"off_diagonal_weight": 0.1, "scale": 3.0},
        lambda o, _: 3 * barlow_twins_loss(o, num_views=2, num_images=16, off_diagonal_weight=0.1),
    ),
    "vicreg": ({"invariance_weight": 2.0, "variance_weight": 3.0, "covariance_weight": 4.0}, vicreg),
}


@pytest.mark.parametrize("method", LOSSES)
def test_the_loss_has_the_settings_of_the_method(method: str) -> None:
    settings, expected = LOSSES[method]
    step = build_step(config_of(method, **settings), Ranks(), CPU)
    outputs = step.networks(pixels(0))
    loss = step.method.loss(outputs, 0, step.images).loss
    torch.testing.assert_close(loss, expected(outputs, step.method.networks))


@pytest.mark.parametrize("method", METHODS)
def test_losses_get_float32_under_autocast(method: str) -> None:
    """Whitening, exponentials of scores, and small differences would lose too much in bf16."""
    step = build_step(replace(CONFIG, method=method), Ranks(), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = step.networks(pixels(0))
    found = (outputs,) if isinstance(outputs, Tensor) else outputs
    assert {x.dtype for x in found} == {torch.float32}


# Parameters of a projector with one hidden layer: of Linear 0, the BatchNorm after it, the last Linear, and the last BatchNorm.
FORMS = {
    "mlp": "0.weight 0.bias 1.weight 1.bias last.weight last.bias",
    "mlp_norm": "0.weight 0.bias 1.weight 1.bias last.weight last.bias norm.weight norm.bias",
    "simclr": "0.weight 1.weight 1.bias last.weight norm.weight",
    "byol": "0.weight 0.bias 1.weight 1.bias last.weight",
    "simsiam": "0.weight 1.weight 1.bias last.weight",
    "simsiam_predictor": "0.weight 1.weight 1.bias last.weight last.bias",
    "moco": "0.weight 0.bias last.weight last.bias",
    "barlow_twins": "0.weight 1.weight 1.bias last.weight",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_projector_has_the_layers_of_its_form(form: str) -> None:
    projector = Projector(form, 5, [3], 2)
    names = [name.removeprefix("hidden.") for name, _ in projector.named_parameters()]
    assert names == FORMS[form].split()
    norms = [module for module in projector.modules() if isinstance(module, nn.BatchNorm1d)]
    assert [norm.num_features for norm in norms] == {"moco": [], "mlp_norm": [3, 2]}.get(
        form, [3, 2] if form in ("simclr", "simsiam") else [3]
    )


def test_a_predictor_has_its_form_and_its_hidden_size() -> None:
    """BYOL's has the form of the projector, SimSiam's its own."""
    for method, form in (("byol", "byol"), ("simsiam", "simsiam_predictor")):
        config = config_of(method, predictor_hidden=7)
        config = replace(config, model=replace(config.model, projector="byol" if method == "byol" else "simsiam"))
        predictor = build_step(config, Ranks(), CPU).method.networks.predictor
        expected = Projector(form, 4, [7], 4)
        shapes = [{name: tuple(p.shape) for name, p in network.named_parameters()} for network in (predictor, expected)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("method", ["simclr", "swav", "barlow_twins", "vicreg"])
def test_a_step_of_one_image_is_refused_by_methods_that_compare_images(method: str) -> None:
    config = replace(CONFIG, method=method, data=replace(CONFIG.data, images_per_step=1))
    (problem,) = check(config)
    assert problem.startswith("data.images_per_step is 1, but ")
    assert problem.endswith("set it to 2 or more")


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("moco", {"queue_size": 4096}, "moco.queue_size is 4096, more than the 1600 keys of the whole run"),
        ("align_uniform", {"queue_size": 1616}, "set it to 1600 or less"),
        ("swav", {"prototypes": 17}, "swav.prototypes is 17, more than the 16 images of a step"),
        ("swav", {"freeze_prototypes_steps": 100}, "but the run has 100 steps: the prototypes never learn"),
    ],
)
def test_settings_that_are_probably_unintended_log_a_warning(method: str, settings: dict, message: str) -> None:
    config = replace(config_of(method), optimizer=replace(CONFIG.optimizer, epochs=10, warmup_epochs=1.0))
    assert plan_warnings(config, 160) == []
    (warning,) = plan_warnings(replace(config, **{method: replace(getattr(config, method), **settings)}), 160)
    assert message in warning
