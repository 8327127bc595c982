"""One update on one rank. tests/integration/test_two_ranks.py tests updates over ranks."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.config.schema import Config, DataConfig, ModelConfig, OptimizerConfig, ViewsConfig, WMSESettings
from trainer.data.plan import slice_permutations
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.losses.wmse import wmse_loss_with_status
from trainer.methods.wmse.method import WMSE
from trainer.metrics import MetricSums
from trainer.models.compile import compile_networks
from trainer.models.projector import Projector
from trainer.optimizer import build_optimizer
from trainer.run.faults import GRADIENT_FAULT
from trainer.setup import build_step
from trainer.step import TrainStep, split_images

CPU = torch.device("cpu")
IMAGES, VIEWS = 16, 3
LOSS = WMSESettings(slice_size=8)
MODEL = ModelConfig("test_resnet", stem="half", zero_init_last=False, projector="mlp", projector_hidden=(12,),
                    embedding_size=4)  # fmt: skip
CONFIG = Config(
    precision="fp32",
    compile="false",
    data=DataConfig(images_per_step=IMAGES),
    views=ViewsConfig(num_views=VIEWS),
    model=MODEL,
    wmse=LOSS,
)
PRECISION = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def build(
    loss: WMSESettings = LOSS,
    autocast_dtype: torch.dtype | None = None,
    accumulation_steps: int = 1,
    device: torch.device = CPU,
    images: int = IMAGES,
    **model_options: Any,
) -> TrainStep:
    """Return the step of a small W-MSE model."""
    config = replace(
        CONFIG,
        precision=PRECISION[autocast_dtype],
        data=DataConfig(images_per_step=images),
        model=replace(MODEL, **model_options),
        wmse=loss,
        optimizer=OptimizerConfig(accumulation_steps=accumulation_steps),
    )
    return build_step(config, Ranks(), device)


def pixels(seed: int, images: int = IMAGES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (VIEWS * images, 3, 16, 16)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(memory_format=torch.channels_last)


def learnt(step: TrainStep) -> list[Tensor]:
    """Return copies of weights, running statistics and moments, which a skipped update does not change."""
    statistics = [b for name, b in step.method.networks.named_buffers() if "running" in name]
    moments = [state["momentum_buffer"] for state in step.optimizer.state.values()]
    return [value.detach().clone() for value in (*step.method.networks.parameters(), *statistics, *moments)]


def test_a_skipped_update_changes_no_weight_statistic_or_moment() -> None:
    step = build()
    assert not step(pixels(1), 0, 0.1).skipped
    before = learnt(step)
    same = pixels(2)
    same[IMAGES - 8 : IMAGES] = same[:1]  # the last slice of the first view holds one image eight times
    result = step(same, 0, 0.1)
    assert result.skipped
    assert result.metrics["min_pivot"] == 0
    assert all(torch.equal(a, b) for a, b in zip(learnt(step), before, strict=True))
    assert not step(pixels(3), 0, 0.1).skipped
    unchanged = [a.shape for a, b in zip(learnt(step), before, strict=True) if torch.equal(a, b)]
    assert unchanged in ([], [(MODEL.embedding_size,)])  # the last bias has no gradient: whitening removes the mean


def test_embeddings_that_are_not_finite_skip_the_update() -> None:
    step = build()
    with torch.no_grad():
        step.method.networks.projector.last.weight.fill_(float("nan"))
    before = learnt(step)
    assert step(pixels(1), 0, 0.1).skipped
    after = learnt(step)
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"normalize": False},
        {"eps": 0.3},
        {"iterations": 2, "permutation_block": 8},
        {"slice_size": 16},
        {"backend": "reference"},
    ],
)
def test_the_loss_follows_its_settings(changed: dict[str, object]) -> None:
    loss = replace(LOSS, **changed)
    step = build(loss)
    result = step(pixels(1), 7, 0.1)
    expected, status = wmse_loss_with_status(
        result.embeddings,
        num_views=VIEWS,
        slice_size=loss.slice_size,
        iterations=loss.iterations,
        normalize=loss.normalize,
        permutations=torch.from_numpy(slice_permutations(0, 7, IMAGES, loss.iterations, loss.permutation_block)),
        eps=loss.eps,
        backend="reference",
    )
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.metrics["min_pivot"], status.min_pivot.min(), rtol=1e-3, atol=1e-6)


def test_cholesky_in_float64_is_exact_for_ill_conditioned_embeddings() -> None:
    """The columns of the rows are nearly equal, so that the covariance has a condition of about 1e7."""
    torch.manual_seed(0)
    rows = torch.randn(VIEWS * IMAGES, 4) @ (torch.ones(4, 4) + 1e-3 * torch.eye(4))
    exact = wmse_loss_with_status(
        rows.double(), num_views=VIEWS, slice_size=8, permutations=torch.arange(IMAGES)[None]
    )[0]
    errors = []
    for flag in (False, True):
        method = build(replace(LOSS, cholesky_float64=flag)).method
        errors.append(abs(method.loss(rows, 0, ImageRange(0, IMAGES)).loss.double() - exact))
    assert errors[1] < errors[0] / 10


def test_a_named_backend_is_used() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        build(replace(LOSS, backend="nowhere"))(pixels(1), 0, 0.1)


def test_gradients_are_cleared_after_the_update() -> None:
    step = build()
    step(pixels(1), 0, 0.1)
    assert all(p.grad is None for p in step.method.networks.parameters())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_encoder_computes_in_the_autocast_dtype(dtype: torch.dtype | None) -> None:
    step, seen = build(autocast_dtype=dtype), []
    step.method.networks.encoder.layer1.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    step(pixels(1), 0, 0.1)
    assert seen == [dtype or torch.float32]


def gradients_of(step: TrainStep, rows: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the gradients that the optimizer gets."""
    seen: list[Tensor] = []
    monkeypatch.setattr(
        "trainer.step.update",
        lambda optimizer, *_: seen.extend(p.grad.clone() for p in step.method.networks.parameters()),
    )
    step(rows, 0, 0.1)
    return seen


def test_the_gradient_is_the_mean_over_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches of 16 images have the same iterations as on two ranks."""
    loss = WMSESettings(slice_size=8, iterations=2, permutation_block=16)
    rows = pixels(1, images=32)
    by_view = rows.unflatten(0, (VIEWS, 32))
    expected = []
    for part in range(2):
        images = by_view[:, 16 * part : 16 * part + 16].flatten(0, 1).contiguous(memory_format=torch.channels_last)
        step = build(loss, images=32)
        step.images = ImageRange(16 * part, 16)
        expected.append(gradients_of(step, images, monkeypatch))
    found = gradients_of(build(loss, accumulation_steps=2, images=32), rows, monkeypatch)
    for gradient, first, second in zip(found, *expected, strict=True):
        torch.testing.assert_close(gradient, (first + second) / 2, rtol=1e-4, atol=1e-6)


def test_a_step_joins_the_results_of_its_micro_batches() -> None:
    """It returns the embeddings in the order of the rows, the mean loss, and the failure of one micro-batch."""
    step = build(accumulation_steps=2)
    order = []
    step.method.networks.register_forward_hook(lambda module, inputs, output: order.append(output.detach().clone()))
    result = step(pixels(1), 0, 0.0)
    both = [part.unflatten(0, (VIEWS, -1)) for part in order]
    assert torch.equal(result.embeddings, torch.cat(both, dim=1).flatten(0, 1))
    losses = [
        wmse_loss_with_status(part.flatten(0, 1), num_views=VIEWS, slice_size=8, backend="reference") for part in both
    ]
    torch.testing.assert_close(result.loss, sum(loss for loss, _ in losses) / 2, rtol=1e-4, atol=1e-5)
    smallest = min(status.min_pivot.min() for _, status in losses)
    torch.testing.assert_close(result.metrics["min_pivot"], smallest, rtol=1e-3, atol=1e-6)
    before = learnt(step)
    same = pixels(2)
    same[2 * IMAGES - 8 : 2 * IMAGES] = same[:1]  # the second micro-batch of the second view
    result = step(same, 0, 0.1)
    assert result.flags.fault == step.fault_codes[1]
    assert all(torch.equal(a, b) for a, b in zip(learnt(step), before, strict=True))


def test_micro_batches_are_channels_last() -> None:
    rows = pixels(1)
    parts = split_images(rows, VIEWS, 2)
    for part, images in zip(parts, (slice(0, 8), slice(8, 16)), strict=True):
        assert part.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(part, rows.unflatten(0, (VIEWS, IMAGES))[:, images].flatten(0, 1))


def test_fp16_scales_the_loss_and_not_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fp16 gradient equals the float32 one up to rounding. Without a scale most of it would be lost."""
    exact = gradients_of(build(), pixels(1), monkeypatch)
    step = build(autocast_dtype=torch.float16)
    assert step.grad_scaler is not None
    step.grad_scaler.scale.fill_(2.0**6)  # the gradients of this small model reach 60
    found = gradients_of(step, pixels(1), monkeypatch)
    error = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True)).sqrt()
    assert error < 0.3 * sum(b.square().sum() for b in exact).sqrt()


def test_an_fp16_overflow_halves_the_scale_and_changes_nothing_else() -> None:
    step = build(autocast_dtype=torch.float16)
    step.grad_scaler.scale.fill_(2.0**60)
    before = learnt(step)[: len(list(step.method.networks.parameters()))]
    result = step(pixels(1), 0, 0.1)
    assert result.flags.fault == GRADIENT_FAULT
    assert step.grad_scaler.scale == 2.0**59
    assert all(torch.equal(a, b) for a, b in zip(learnt(step), before, strict=False))
    assert result.loss < 5  # the returned loss is not scaled
    step.grad_scaler.scale.fill_(2.0**10)
    assert not step(pixels(1), 0, 0.1).skipped
    assert step.grad_scaler.scale == 2.0**10


def test_micro_batches_and_loss_scaling_read_no_value_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the meta device have no values, so that reading one on the host raises.

    tests/unit/test_methods.py tests the same for a step of every method without these options.
    """
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **keywords: nullcontext())  # does not support meta
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *arguments: False)
    nowhere = torch.device("meta")
    step = build(autocast_dtype=torch.float16, accumulation_steps=2, device=nowhere)
    sums = MetricSums(WMSE.metrics, nowhere)
    for _ in range(2):
        result = step(pixels(1).to(nowhere), 0, 0.1, stop=True)
        sums.add(result)
    assert {value.device for value in sums.take(result.embeddings, Ranks()).values()} == {nowhere}
    with pytest.raises(RuntimeError):
        result.loss.item()


@pytest.mark.parametrize("batch_norm", ["joint", "per_view"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_activation_checkpointing_changes_no_statistics(accumulation_steps: int, batch_norm: str) -> None:
    """Backward runs the encoder's forward pass again, which must not update the running statistics a second time."""
    plain, checkpointed = (
        build(
            accumulation_steps=accumulation_steps,
            activation_checkpointing=checkpointing,
            encoder_batch_norm=batch_norm,
            projector_batch_norm=batch_norm,
        )
        for checkpointing in (False, True)
    )
    for seed in range(3):
        losses = [step(pixels(seed), 0, 0.1).loss for step in (plain, checkpointed)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    ours, theirs = checkpointed.method.networks.state_dict(), plain.method.networks.state_dict()
    tracked = [name for name in theirs if "running" in name or "num_batches" in name]
    assert tracked
    for name in tracked:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        embeddings = [step.method.networks.eval()(pixels(9)) for step in (plain, checkpointed)]
    torch.testing.assert_close(*embeddings, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_a_compiled_step_equals_the_eager_one() -> None:
    """The real compiler takes half a second for each kernel on a CPU, so the encoder has only its first stage.

    The second loss depends on the first update. The memory budget makes backward recompute BatchNorm and ReLU.
    """
    eager, compiled = build(), build()
    for step in (eager, compiled):
        networks = step.method.networks
        networks.encoder.layer2 = networks.encoder.layer3 = networks.encoder.layer4 = nn.Identity()
        networks.projector = Projector(
            "mlp", networks.encoder.layer1[-1].bn2.num_features, MODEL.projector_hidden, MODEL.embedding_size
        )
        torch.manual_seed(0)
        nn.init.normal_(networks.projector.last.weight)
        step.optimizer = build_optimizer(networks, OptimizerConfig(), CPU)
    compiled.method.networks.load_state_dict(eager.method.networks.state_dict())
    names = set(compiled.method.networks.state_dict())
    config = Config(model=replace(Config().model, activation_memory_budget=0.9))
    compile_networks(compiled.method.networks, config, CPU)
    for seed in (1, 2):
        one, other = (step(pixels(seed), 0, 0.1) for step in (eager, compiled))
        torch.testing.assert_close(other.loss, one.loss, rtol=1e-4 if seed == 1 else 1e-2, atol=0)
    assert not one.skipped
    assert set(compiled.method.networks.state_dict()) == names
