"""One update. (Over ranks: tests/integration/test_two_ranks.py.)"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trainer.config import LossConfig, ModelConfig, OptimizerConfig, ViewsConfig
from trainer.distributed import Ranks
from trainer.losses.wmse import wmse_loss_with_status
from trainer.model import Model
from trainer.optimizer import build_optimizer
from trainer.step import TrainStep

IMAGES, VIEWS = 16, 3
LOSS = LossConfig(slice_size=8)
MODEL = ModelConfig("test_resnet", stem="half", zero_init_last=False, projector="mlp", projector_hidden=(12,),
                    embedding_size=4)  # fmt: skip
IDENTITY = torch.arange(IMAGES)[None]


def build(loss: LossConfig = LOSS, autocast_dtype: torch.dtype | None = None) -> TrainStep:
    torch.manual_seed(0)
    model = Model(MODEL, ViewsConfig(num_views=VIEWS))
    optimizer = build_optimizer(model, OptimizerConfig(), torch.device("cpu"))
    return TrainStep(model, optimizer, loss, num_views=VIEWS, autocast_dtype=autocast_dtype, ranks=Ranks())


def pixels(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (VIEWS * IMAGES, 3, 16, 16)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(memory_format=torch.channels_last)


def learnt(step: TrainStep) -> list[Tensor]:
    """Everything that a failed step leaves alone."""
    statistics = [b for name, b in step.model.named_buffers() if "running" in name]
    moments = [state["momentum_buffer"] for state in step.optimizer.state.values()]
    return [value.detach().clone() for value in (*step.model.parameters(), *statistics, *moments)]


def test_a_failed_step_leaves_all_as_the_last_good_one_did() -> None:
    step = build()
    assert not step(pixels(1), IDENTITY, 0.1).failed
    before = learnt(step)
    same = pixels(2)
    same[IMAGES - 8 : IMAGES] = same[:1]  # the first view's last slice holds one picture eight times
    result = step(same, IDENTITY, 0.1)
    assert result.failed
    assert result.min_pivot == 0
    assert all(torch.equal(a, b) for a, b in zip(learnt(step), before, strict=True))
    assert not step(pixels(3), IDENTITY, 0.1).failed
    assert all(not torch.equal(a, b) for a, b in zip(learnt(step), before, strict=True))


def test_embeddings_that_are_not_finite_are_a_failure() -> None:
    step = build()
    with torch.no_grad():
        step.model.projector.last.weight.fill_(float("nan"))
    before = learnt(step)
    assert step(pixels(1), IDENTITY, 0.1).failed
    after = learnt(step)
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    "changed", [{}, {"normalize": False}, {"eps": 0.3}, {"iterations": 2}, {"slice_size": 16}, {"backend": "reference"}]
)
def test_the_loss_is_the_one_configured(changed: dict[str, object]) -> None:
    loss = replace(LOSS, **changed)
    step = build(loss)
    orders = torch.cat([IDENTITY, torch.randperm(IMAGES, generator=torch.Generator().manual_seed(3))[None]])
    result = step(pixels(1), orders[: loss.iterations], 0.1)
    expected, status = wmse_loss_with_status(
        result.embeddings,
        num_views=VIEWS,
        slice_size=loss.slice_size,
        iterations=loss.iterations,
        normalize=loss.normalize,
        permutations=orders[: loss.iterations],
        eps=loss.eps,
        backend="reference",
    )
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.min_pivot, status.min_pivot.min(), rtol=1e-3, atol=1e-6)


def test_the_precision_of_the_factor_is_the_one_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(*arguments: object, **keywords: object) -> object:
        asked.append(keywords["float64_factor"])
        return wmse_loss_with_status(*arguments, **keywords)

    monkeypatch.setattr("trainer.step.wmse_loss_with_status", spy)
    for wanted in (True, False):
        build(replace(LOSS, float64_factor=wanted))(pixels(1), IDENTITY, 0.1)
    assert asked == [True, False]


def test_a_backend_that_is_named_is_used() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        build(replace(LOSS, backend="nowhere"))(pixels(1), IDENTITY, 0.1)


def test_gradients_do_not_pile_up() -> None:
    step = build()
    step(pixels(1), IDENTITY, 0.1)
    assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_encoder_works_in_the_precision_asked_for(dtype: torch.dtype | None) -> None:
    step, seen = build(autocast_dtype=dtype), []
    step.model.encoder.layer1.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    step(pixels(1), IDENTITY, 0.1)
    assert seen == [dtype or torch.float32]
