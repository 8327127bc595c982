"""Rules that every method keeps: skipped updates, resuming, no synchronization, and a loadable encoder."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from trainer.config.loading import load_config
from trainer.config.schema import (
    METHODS,
    AlignUniformSettings,
    BYOLSettings,
    Config,
    DataConfig,
    MoCoSettings,
    ModelConfig,
    OptimizerConfig,
    SimSiamSettings,
    SwAVSettings,
    ViewsConfig,
    WMSESettings,
)
from trainer.distributed.ranks import ImageRange, Ranks
from trainer.errors import InputError
from trainer.loop import pretrain
from trainer.methods.method import LossOutput, Method, MethodContext
from trainer.metrics import MetricSums
from trainer.models.networks import EncoderProjector, build_encoder_network, build_networks
from trainer.run.checkpoint import load_checkpoint, put_encoder
from trainer.run.signals import StopRequest
from trainer.setup import build_step
from trainer.step import TrainStep
from trainer.tools.dry_run import setting_warnings

CPU = torch.device("cpu")
IMAGES, VIEWS = 16, 2
CONFIG = Config(
    precision="fp32",
    compile="false",
    data=DataConfig(images_per_step=IMAGES),
    views=ViewsConfig(num_views=VIEWS, size=16),
    model=ModelConfig("test_resnet", stem="half", projector="mlp", projector_hidden=(12,), embedding_size=4),
    wmse=WMSESettings(slice_size=8),
    byol=BYOLSettings(predictor_hidden=12),
    simsiam=SimSiamSettings(predictor_hidden=12),
    moco=MoCoSettings(queue_size=64, batch_norm_rows=4, shuffle_images=8),
    align_uniform=AlignUniformSettings(queue_size=64, batch_norm_rows=4, shuffle_images=8),
    swav=SwAVSettings(prototypes=6, freeze_prototypes_steps=0),
)


# Sections for the runs of the tiny config, whose steps have 16 images.
SECTIONS = {
    "wmse": "wmse: {slice_size: 16}\n",
    "moco": "moco: {queue_size: 64, batch_norm_rows: 4, shuffle_images: 8}\n",
    "align_uniform": "align_uniform: {queue_size: 64, batch_norm_rows: 4, shuffle_images: 8}\n",
}


def config_of(method: str) -> Config:
    return replace(CONFIG, method=method)


def pixels(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (VIEWS * IMAGES, 3, 16, 16)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(memory_format=torch.channels_last)


def state_of(step: TrainStep) -> dict[str, Tensor]:
    """Return the weights, buffers and optimizer state of a step."""
    moments = {
        f"{number}.{name}": value
        for number, state in step.optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    return {name: value.clone() for name, value in (step.method.networks.state_dict() | moments).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[bool]:
    assert a.keys() == b.keys()
    return [torch.equal(value, b[name]) for name, value in a.items()]


def spoil_gradients(step: TrainStep) -> None:
    """Make the next gradient not finite, so that the update of any method is skipped."""
    first = next(step.method.networks.parameters())
    handle = first.register_hook(lambda gradient: (handle.remove(), gradient * float("nan"))[1])


@pytest.mark.parametrize("method", METHODS)
def test_a_skipped_update_changes_no_state(method: str) -> None:
    step = build_step(config_of(method), Ranks(), CPU, total_steps=100)
    assert not step(pixels(0), 0, 0.1).skipped
    before = state_of(step)
    spoil_gradients(step)
    assert step(pixels(1), 1, 0.1).skipped
    assert all(same(state_of(step), before))
    assert not step(pixels(2), 2, 0.1).skipped
    assert sum(same(state_of(step), before)) < 0.2 * len(before)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_an_unbroken_one(method: str, tiny_set: Path, tiny_config: Path, tmp_path: Path) -> None:
    text = tiny_config.read_text().replace("wmse: {slice_size: 16}\n", SECTIONS.get(method, ""))
    tiny_config.write_text(text)
    contents = []
    for name, ends in (("unbroken", [5]), ("resumed", [2, 5])):
        for end in ends:
            settings = ["--method", method, "--data.root", str(tiny_set), "--run_dir", str(tmp_path / name)]
            assert pretrain(load_config(tiny_config, [*settings, "--max_steps", str(end)]), StopRequest()) == 0
        contents.append(load_checkpoint(tmp_path / name / "checkpoints" / "step_00000005.pt"))
    assert all(same(contents[0]["model"], contents[1]["model"]))


@pytest.mark.parametrize("method", METHODS)
def test_a_step_reads_no_value_from_the_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the meta device have no values, so that reading one on the host raises."""
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **keywords: nullcontext())  # does not support meta
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *arguments: False)
    nowhere = torch.device("meta")
    step = build_step(config_of(method), Ranks(), nowhere)
    sums = MetricSums(step.method.metrics, nowhere)
    for number in range(2):
        result = step(pixels(number).to(nowhere), number, 0.1)
        sums.add(result)
    assert {value.device for value in sums.take(result.embeddings, Ranks()).values()} == {nowhere}
    with pytest.raises(RuntimeError):
        result.loss.item()


@pytest.mark.parametrize("method", METHODS)
def test_the_encoder_is_loaded_without_the_method(method: str) -> None:
    config = config_of(method)
    networks = build_step(config, Ranks(), CPU).method.networks
    encoder = build_encoder_network(replace(config, seed=1))
    put_encoder(encoder, networks.state_dict(), Path("a checkpoint"))
    x = pixels(0)
    features = networks.encoder.eval()(networks.normalize(x))
    assert torch.equal(encoder.eval()(x), features)


def test_a_method_that_does_not_exist_is_refused(tiny_config: Path) -> None:
    with pytest.raises(InputError, match=r"method is 'simclrr', which does not exist: did you mean simclr\?"):
        load_config(tiny_config, ["--method", "simclrr"])


def test_settings_of_another_method_log_a_warning(tiny_config: Path) -> None:
    config = load_config(tiny_config, ["--method", "simclr"])
    assert "wmse.slice_size 16 has no effect: method is simclr" in setting_warnings(config, 1, torch.device("cpu"))


def test_the_earlier_name_of_the_slice_size_is_accepted(tiny_config: Path) -> None:
    assert load_config(tiny_config, ["--loss.slice_size", "32", "--data.images_per_step", "32"]).wmse.slice_size == 32
    tiny_config.write_text(tiny_config.read_text().replace("wmse: {slice_size: 16}", "loss: {slice_size: 16}"))
    assert load_config(tiny_config, []).wmse.slice_size == 16


class Averaged(Method):
    """Method with all kinds of state that an update may change: a target network, a queue and a counter."""

    checks = ("the embeddings are too large",)

    def __init__(self) -> None:
        self.networks = build_networks(EncoderProjector, MethodContext(CONFIG, Ranks(), torch.device("cpu")))
        self.networks.target = nn.Linear(4, 4).requires_grad_(False)
        self.networks.register_buffer("queue", torch.zeros(3, 4))
        self.networks.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.limit = torch.inf

    def loss(self, outputs: Tensor, step: int, images: ImageRange) -> LossOutput:
        self.networks.queue.copy_(outputs.detach()[:3])
        loss = (outputs - self.networks.target(outputs)).square().mean()
        return LossOutput(loss, (outputs.abs().max() < self.limit)[None], {}, outputs)

    def after_update(self, step: int, skipped: Tensor) -> None:
        with torch.no_grad():
            self.networks.target.weight.lerp_(self.networks.projector.last.weight[:, :4], 0.5)
        self.networks.updates += 1


def test_target_networks_queues_and_counters_are_restored_when_an_update_is_skipped() -> None:
    method = Averaged()
    optimizer = torch.optim.SGD([p for p in method.networks.parameters() if p.requires_grad], lr=0.1)
    step = TrainStep(method, optimizer, num_views=VIEWS, images=ImageRange(0, IMAGES), ranks=Ranks())
    step(pixels(0), 0, 0.1)
    before = state_of(step)
    assert before["updates"] == 1
    method.limit = 0.0
    result = step(pixels(1), 1, 0.1)
    assert result.skipped
    assert result.flags.fault == step.fault_codes[0]
    assert all(same(state_of(step), before))
    method.limit = torch.inf
    step(pixels(2), 2, 0.1)
    after = state_of(step)
    assert after["updates"] == 2
    for name in ("target.weight", "queue"):
        assert not torch.equal(after[name], before[name])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            {"metrics": {"spread": torch.tensor(0.0)}},
            r"returned the metrics \['spread'\], but Other.metrics declares \[\]",
        ),
        ({"ok": torch.ones(2, dtype=torch.bool)}, r"returned ok of shape \(2,\), but Other.checks declares 1 check"),
    ],
)
def test_metrics_and_checks_that_are_not_declared_are_refused(output: dict, message: str) -> None:
    class Other(Averaged):
        def loss(self, outputs: Tensor, step: int, images: ImageRange) -> LossOutput:
            return super().loss(outputs, step, images)._replace(**output)

    method = Other()
    step = TrainStep(
        method,
        torch.optim.SGD(method.networks.parameters(), lr=0.1),
        num_views=VIEWS,
        images=ImageRange(0, IMAGES),
        ranks=Ranks(),
    )
    with pytest.raises(ValueError, match=message):
        step(pixels(0), 0, 0.1)


def test_the_optimizer_has_no_parameters_without_gradients() -> None:
    from trainer.optimizer import build_optimizer

    networks = Averaged().networks
    for name in get_args(get_type_hints(OptimizerConfig)["name"]):
        optimizer = build_optimizer(networks, OptimizerConfig(name=name), CPU)
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert id(networks.target.weight) not in updated
        assert id(networks.projector.last.weight) in updated
