"""Target networks, queues and prototypes change as their papers say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import normalize

from tests.unit.test_methods import CONFIG, CPU, IMAGES, config_of, pixels
from trainer.config.checks import check
from trainer.config.loading import load_config
from trainer.config.schema import METHODS, BYOLSettings, Config, MoCoSettings, OptimizerConfig, SwAVSettings
from trainer.distributed.ranks import Ranks
from trainer.loop import pretrain
from trainer.methods.method import MethodContext
from trainer.methods.moco.method import MoCo
from trainer.models.compile import compile_networks
from trainer.models.networks import EncoderProjector, build_networks
from trainer.models.target import TargetNetwork, cosine_momentum
from trainer.run.checkpoint import load_checkpoint
from trainer.run.signals import StopRequest
from trainer.setup import build_step, set_up
from trainer.step import TrainStep

TARGETED = ("byol", "moco", "align_uniform")


def step_of(config: Config, total_steps: int = 10) -> TrainStep:
    return build_step(config, Ranks(), CPU, total_steps=total_steps)


def test_the_momentum_rises_by_half_a_cosine_from_its_first_value_to_1() -> None:
    assert cosine_momentum(0, 1000, 0.99) == 0.99
    assert cosine_momentum(500, 1000, 0.99) == pytest.approx(0.995, abs=1e-15)
    assert 1 - cosine_momentum(999, 1000, 0.99) == pytest.approx(2.467e-8, rel=1e-3)
    assert cosine_momentum(1000, 1000, 0.99) == 1
    assert cosine_momentum(1001, 1000, 0.99) == 1


def test_the_target_network_is_a_moving_average_with_the_closed_form() -> None:
    """For constant weights s it is s + (t - s) times the product of all momenta. Statistics of BatchNorm do not follow."""
    online = build_networks(EncoderProjector, MethodContext(CONFIG, Ranks(), CPU)).double()
    target = TargetNetwork(online)
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.add_(torch.randn_like(parameter))
    start = [p.clone() for p in target.parameters()]
    statistics = [b.clone() for b in target.buffers()]
    kept = 1.0
    for step in range(20):
        momentum = cosine_momentum(step, 25, 0.9)
        target.follow(online, momentum)
        kept *= momentum
    sources = [*online.encoder.parameters(), *online.projector.parameters()]
    for t, t_0, s in zip(target.parameters(), start, sources, strict=True):
        torch.testing.assert_close(t, s + (t_0 - s) * kept, rtol=0, atol=1e-12)
    assert all(torch.equal(b, b_0) for b, b_0 in zip(target.buffers(), statistics, strict=True))


def test_byol_moves_its_target_towards_the_updated_weights_by_the_momentum_of_the_step() -> None:
    """SGD moves the weights so far that the momentum of another step, or the weights before the update, give another target."""
    for schedule in ("cosine", "constant"):
        settings = BYOLSettings(predictor_hidden=12, momentum=0.9, momentum_schedule=schedule)
        config = replace(config_of("byol"), byol=settings, optimizer=OptimizerConfig(name="sgd", momentum=0.0))
        step = step_of(config, total_steps=7)
        networks = step.method.networks
        online, target = networks.projector.last.weight, networks.target.projector.last.weight
        assert torch.equal(target, online)
        for number in range(4):
            start, before = online.detach().clone(), target.clone()
            step(pixels(number), number, 0.1)
            momentum = cosine_momentum(number, 7, 0.9) if schedule == "cosine" else 0.9
            torch.testing.assert_close(target, momentum * before + (1 - momentum) * online, rtol=0, atol=1e-6)
            assert (online - start).abs().max() > 0.01
            assert ((online - before) * (cosine_momentum(number + 1, 7, 0.9) - momentum)).abs().max() > 1e-4


def test_byol_gives_both_networks_the_same_views_in_the_same_order() -> None:
    """At the start the target network equals encoder and projector, so its embeddings do as well."""
    step = step_of(config_of("byol"))
    outputs = step.networks(pixels(0))
    torch.testing.assert_close(outputs.targets, outputs.embeddings)
    assert not torch.allclose(outputs.targets, outputs.predictions, atol=0.01)


@pytest.mark.parametrize("method", TARGETED[1:])
def test_the_key_network_moves_by_its_momentum_in_every_step(method: str) -> None:
    config = config_of(method)
    config = replace(config, **{method: replace(getattr(config, method), momentum=0.6)})
    step = step_of(replace(config, optimizer=OptimizerConfig(name="sgd", momentum=0.0)))
    networks = step.method.networks
    online, target = networks.projector.last.weight, networks.target.projector.last.weight
    for number in range(2):
        before = target.clone()
        step(pixels(number), number, 0.1)
        torch.testing.assert_close(target, 0.6 * before + 0.4 * online, rtol=0, atol=1e-6)
        assert (online - before).abs().max() > 0.01


@pytest.mark.parametrize("method", TARGETED)
def test_the_target_has_no_gradients_and_is_in_no_optimizer(method: str) -> None:
    step = step_of(config_of(method))
    target = list(step.method.networks.target.parameters())
    updated = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
    assert target
    assert not any(p.requires_grad or id(p) in updated for p in target)
    step.method.loss(step.networks(pixels(0)), 0, step.images).loss.backward()
    assert all(p.grad is None for p in target)


@pytest.mark.parametrize("method", TARGETED)
def test_the_target_starts_as_a_copy_of_a_loaded_encoder(method: str) -> None:
    method_object = step_of(config_of(method)).method
    networks = method_object.networks
    other = step_of(replace(config_of(method), seed=1)).method.networks
    networks.encoder.load_state_dict(other.encoder.state_dict())
    method_object.encoder_loaded()
    for online, target in (
        (networks.encoder, networks.target.encoder),
        (networks.projector, networks.target.projector),
    ):
        state = target.state_dict()
        assert all(torch.equal(state[name], value) for name, value in online.state_dict().items())


def test_a_run_copies_the_loaded_encoder_to_its_target_and_raises_the_momentum_over_all_its_steps(
    tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    settings = ["--data.root", str(tiny_set), "--run_dir", str(tmp_path / "first"), "--max_steps", "1", "--seed", "1"]
    assert pretrain(load_config(tiny_config, settings), StopRequest()) == 0
    loaded = tmp_path / "first" / "checkpoints" / "step_00000001.pt"
    settings = ["--data.root", str(tiny_set), "--method", "byol", "--init_from", str(loaded), "--max_steps", "2"]
    run = set_up(load_config(tiny_config, settings), Ranks(), CPU, tmp_path / "first")
    networks = run.step.method.networks
    weights = load_checkpoint(loaded)["model"]
    for name, value in networks.target.encoder.state_dict().items():
        assert torch.equal(value, weights[f"encoder.{name}"]), name
    # The run has 9 steps, of which this call makes 2.
    online, target = networks.projector.last.weight, networks.target.projector.last.weight
    with torch.no_grad():
        online += 1
    for step in (0, 4, 9):
        before = target.clone()
        run.step.method.after_update(step, torch.tensor(False))
        momentum = cosine_momentum(step, 9, 0.99)
        torch.testing.assert_close(target, momentum * before + (1 - momentum) * online, rtol=0, atol=1e-6)


def test_simsiam_does_not_learn_through_its_targets() -> None:
    """The value would be the same, but not the gradient."""
    step = step_of(config_of("simsiam"))
    outputs = step.networks(pixels(0))
    loss = step.method.loss(outputs, 0, step.images).loss
    (gradient,) = torch.autograd.grad(loss, outputs.embeddings, retain_graph=True)
    p = [normalize(x, dim=1) for x in outputs.predictions.chunk(2)]
    z = [normalize(x, dim=1) for x in outputs.embeddings.chunk(2)]
    through = -((p[0] * z[1]).sum(1).mean() + (p[1] * z[0]).sum(1).mean()) / 2
    stopped = -((p[0] * z[1].detach()).sum(1).mean() + (p[1] * z[0].detach()).sum(1).mean()) / 2
    torch.testing.assert_close(loss, through)
    torch.testing.assert_close(torch.autograd.grad(stopped, outputs.embeddings, retain_graph=True)[0], gradient)
    (other,) = torch.autograd.grad(through, outputs.embeddings)
    assert (other - gradient).abs().max() > 1e-3 * gradient.abs().max()


def keys_of(step: TrainStep, batch: Tensor) -> Tensor:
    """Return the keys of a batch, of length 1, without changing the state."""
    with torch.no_grad():
        state = {name: value.clone() for name, value in step.method.networks.state_dict().items()}
        keys = normalize(step.method.networks(batch).keys, dim=1)
        step.method.networks.load_state_dict(state)
    return keys


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_queue_holds_the_keys_of_the_last_steps_in_order(symmetric: bool) -> None:
    """Queries are compared with the queue before their keys enter it."""
    per_step = IMAGES * (2 if symmetric else 1)
    size = 3 * per_step
    settings = MoCoSettings(queue_size=size, batch_norm_rows=4, shuffle_images=8, symmetric=symmetric)
    step = step_of(replace(config_of("moco"), moco=settings))
    expected = step.method.networks.queue.clone()
    assert torch.allclose(expected.norm(dim=1), torch.ones(size))
    for number, position in enumerate((0, 1, 2, 0)):
        expected[position * per_step : (position + 1) * per_step] = keys_of(step, pixels(number))
        step(pixels(number), number, 0.1)
        torch.testing.assert_close(step.method.networks.queue, expected)


def test_symmetric_moco_is_the_mean_of_both_ways() -> None:
    """Exchanging the views then changes nothing."""
    settings = MoCoSettings(queue_size=64, batch_norm_rows=4, shuffle_images=8, symmetric=True)
    step = step_of(replace(config_of("moco"), moco=settings))
    x = pixels(0)
    swapped = torch.cat(list(reversed(x.chunk(2))))
    losses = [step.method.loss(step.networks(batch), 0, step.images).loss for batch in (x, swapped)]
    torch.testing.assert_close(losses[0], losses[1])
    one_way = replace(config_of("moco"), moco=replace(settings, symmetric=False))
    ways = []
    for batch in (x, swapped):
        step = step_of(one_way)
        ways.append(step.method.loss(step.networks(batch), 0, step.images).loss)
    torch.testing.assert_close((ways[0] + ways[1]) / 2, losses[0])


@pytest.mark.parametrize(("rows", "block"), [(4, 8), (8, 32), (32, 256)])
def test_a_batch_norm_group_of_keys_has_an_equal_part_of_each_group_of_queries(rows: int, block: int) -> None:
    settings = MoCoSettings(queue_size=2 * block, batch_norm_rows=rows, shuffle_images=block)
    config = replace(config_of("moco"), moco=settings, data=replace(CONFIG.data, images_per_step=2 * block))
    method = MoCo(MethodContext(config, Ranks(), CPU))
    order = method.networks.shuffled(2 * block, CPU)
    assert torch.equal(order[order], torch.arange(2 * block))
    for group in order.view(-1, rows):
        of_queries = torch.bincount(group // rows)
        assert of_queries.max() == of_queries[of_queries > 0].min() == rows * rows // block
        assert (group // block).unique().numel() == 1


def test_keys_are_normalised_in_shuffled_groups_and_returned_in_order() -> None:
    """The key of an image is what the target network gives for its shuffled group."""
    step = step_of(config_of("moco"))
    networks = step.method.networks
    x = pixels(0)
    images = networks.normalize(x)[IMAGES:]
    keys = networks(x).keys
    order = networks.shuffled(IMAGES, CPU)
    group = order[:4]
    torch.testing.assert_close(networks.target(images[group]), keys[group])
    assert not torch.allclose(networks.target(images[:4]), keys[:4])


def test_the_prototypes_have_length_1_and_wait_for_the_first_steps() -> None:
    settings = SwAVSettings(prototypes=6, freeze_prototypes_steps=2)
    step = step_of(replace(config_of("swav"), swav=settings))
    weight = step.method.networks.prototypes.weight
    start = weight.detach().clone()
    torch.testing.assert_close(start.norm(dim=1), torch.ones(6))
    for number in range(3):
        step(pixels(number), number, 0.1)
        assert torch.equal(weight, start) == (number < 2)
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(6))


def test_waiting_prototypes_gather_no_momentum_and_do_not_decay() -> None:
    """A gradient of the steps in which they wait must not move them later either."""
    for decay in (0.0, 0.1):
        optimizer = OptimizerConfig(name="sgd", momentum=0.9, weight_decay=decay)
        settings = SwAVSettings(prototypes=6, freeze_prototypes_steps=2)
        step = step_of(replace(config_of("swav"), swav=settings, optimizer=optimizer))
        weight = step.method.networks.prototypes.weight
        start = weight.detach().clone()
        for number in range(2):
            step(pixels(number), number, 0.1)
        assert torch.equal(weight, start)
        assert step.optimizer.state[weight]["momentum_buffer"].any() == (decay > 0)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_compiles_to_one_graph_with_the_values_of_the_eager_one(method: str) -> None:
    config = replace(config_of(method), model=replace(CONFIG.model, encoder_batch_norm="per_view"))
    eager, compiled = step_of(config), step_of(config)
    # The whole compiler takes seconds for each method. BYOL stands for a forward with and without gradients.
    graphs = CompileCounterWithBackend("aot_eager" if method == "byol" else "eager")
    compile_networks(compiled.method.networks, config, CPU, backend=graphs)
    for number in range(2):
        expected = eager(pixels(number), number, 1e-3)
        torch.testing.assert_close(compiled(pixels(number), number, 1e-3).loss, expected.loss, rtol=1e-4, atol=1e-4)
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("moco", {"queue_size": 40}, "moco.queue_size is 40, not a multiple of the 16 keys of a step: set it to 32"),
        ("moco", {"shuffle_images": 6}, "moco.shuffle_images is 6 with moco.batch_norm_rows 4"),
        ("moco", {"shuffle_images": 4}, "set it to 2, 4 or 8 times the rows"),
        (
            "align_uniform",
            {"batch_norm_rows": 16, "shuffle_images": 32},
            "not a multiple of align_uniform.shuffle_images 32",
        ),
        ("views", {"num_views": 4}, "views.num_views is 4, but moco has a query and a key: set it to 2"),
        ("model", {"batch_norm_ranks": "all"}, "model.batch_norm_ranks is all, but moco takes statistics of"),
    ],
)
def test_settings_that_do_not_fit_are_refused(section: str, changes: dict, message: str) -> None:
    config = config_of("align_uniform" if section == "align_uniform" else "moco")
    config = replace(config, optimizer=OptimizerConfig(), **{section: replace(getattr(config, section), **changes)})
    assert any(message in problem for problem in check(config))


def test_the_predictor_of_simsiam_keeps_the_peak_learning_rate() -> None:
    config = replace(
        config_of("simsiam"), optimizer=OptimizerConfig(name="sgd", learning_rate=0.3, learning_rate_rule="sqrt")
    )
    for constant in (True, False):
        settings = replace(config.simsiam, constant_predictor_rate=constant)
        step = step_of(replace(config, simsiam=settings))
        step(pixels(0), 0, 0.1)
        predictor = {id(p) for p in step.method.networks.predictor.parameters()}
        rates = {id(p) in predictor: group["lr"] for group in step.optimizer.param_groups for p in group["params"]}
        assert rates == {True: pytest.approx(0.3 * 4 if constant else 0.1), False: 0.1}
