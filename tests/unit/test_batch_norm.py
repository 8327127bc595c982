"""BatchNorm per view, and the running statistics after a skipped update.

tests/integration/test_two_ranks.py tests BatchNorm over ranks.
"""

import copy
from typing import Any

import pytest
import torch
import torch._functorch.config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from timm.layers import BatchNormAct2d
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from trainer.config.schema import Config, ModelConfig, ViewsConfig
from trainer.models.batch_norm import (
    ViewBatchNorm,
    convert_batch_norm,
    encode_one_view_at_a_time,
    stop_counting_batches,
)
from trainer.models.networks import EncoderProjector
from trainer.models.target import TargetNetwork
from trainer.models.untrained_state import UntrainedState


@pytest.mark.parametrize(("num_views", "rows"), [(3, 0), (2, 4)])
def test_batch_norm_per_view_equals_batch_norm_of_each_view_in_turn(num_views: int, rows: int) -> None:
    """The same holds for groups of rows: 12 rows are 3 groups of 4, whatever the number of views."""
    torch.manual_seed(0)
    x = torch.randn(3 * 4, 5, 2, 2).double().contiguous(memory_format=torch.channels_last)
    plain, ours = nn.BatchNorm2d(5).double(), nn.Sequential(nn.BatchNorm2d(5).double())
    convert_batch_norm(ours, num_views, None, 1, rows)
    expected = torch.cat([plain(view) for view in x.chunk(3)])
    y = ours(x)
    torch.testing.assert_close(y, expected)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours[0].running_mean, plain.running_mean)
    torch.testing.assert_close(ours[0].running_var, plain.running_var)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


def test_conversion_keeps_parameter_names_and_the_activation() -> None:
    norm = BatchNormAct2d(4)
    names = set(norm.state_dict()) - {"num_batches_tracked"}
    module = nn.Sequential(norm)
    x = torch.randn(6, 4, 3, 3)
    before = module.eval()(x)
    convert_batch_norm(module, 2, None, 1)
    assert isinstance(module[0], ViewBatchNorm)
    assert set(module[0].state_dict()) == names
    torch.testing.assert_close(module(x), before)
    assert (module.train()(x) >= 0).all()  # the ReLU is kept


def test_conversion_keeps_a_batch_norm_without_bias() -> None:
    norm = nn.BatchNorm1d(3)
    norm.register_parameter("bias", None)
    module = convert_batch_norm(nn.Sequential(norm), 2, None, 1)
    assert module(torch.randn(8, 3)).mean(0).abs().max() < 1e-6


@pytest.mark.parametrize("with_shift", [True, False])
def test_batch_norm_over_ranks_equals_plain_batch_norm(with_shift: bool, group_of_one: str) -> None:
    """The ImageNet recipe's last BatchNorm has no bias; a wrong mean in it would not change the loss."""
    torch.manual_seed(0)
    plain, copied = nn.BatchNorm1d(5).double(), nn.BatchNorm1d(5).double()
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
        plain.bias.uniform_(0.5, 2) if with_shift else plain.bias.zero_()
    copied.load_state_dict(plain.state_dict())
    if not with_shift:
        copied.register_parameter("bias", None)
    ours = convert_batch_norm(nn.Sequential(copied), 1, group_of_one, 1)
    x = 3 + 2 * torch.randn(8, 5, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(i) for module, i in zip((plain, ours), inputs, strict=True)]
    for y in outputs:
        y.pow(3).sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(ours[0].running_var, plain.running_var)


def test_encoding_one_view_at_a_time_changes_no_value() -> None:
    config = Config(
        model=ModelConfig("test_resnet", projector_hidden=(8,), encoder_batch_norm="per_view"),
        views=ViewsConfig(num_views=3, size=32),
    )
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8)
    together = EncoderProjector(config).double()
    with_target = nn.ModuleList([copy.deepcopy(together), TargetNetwork(together)])
    encode_one_view_at_a_time(with_target)
    apart: Any = with_target[0]
    sizes: list[int] = []
    apart.encoder.register_forward_hook(lambda _, inputs, output: sizes.append(len(inputs[0])))
    outputs = [network(pixels) for network in (together, apart)]
    assert sizes == [4, 4, 4]
    torch.testing.assert_close(outputs[1], outputs[0])
    images = together.normalize(pixels)
    torch.testing.assert_close(with_target[1](images.double()), outputs[0].detach(), rtol=1e-5, atol=1e-6)
    # Gradients and running statistics.
    for output in outputs:
        output.square().sum().backward()
    for p, q in zip(apart.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    torch.testing.assert_close(apart.state_dict(), together.state_dict())
    # An evaluation passes any number of images.
    torch.testing.assert_close(apart.eval()(pixels[:5]), together.eval()(pixels[:5]))


def test_joint_batch_norm_on_one_rank_is_not_converted() -> None:
    module = nn.Sequential(nn.BatchNorm2d(3))
    assert type(convert_batch_norm(module, 1, None, 1)[0]) is nn.BatchNorm2d


def test_running_statistics_are_restored_only_if_the_update_is_skipped() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    statistics = UntrainedState(model)
    before = {name: value.clone() for name, value in model.state_dict().items() if "running" in name}
    statistics.remember()
    model(torch.full((5, 3), float("nan")))
    statistics.restore_if(torch.tensor(True))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    statistics.remember()
    model(torch.randn(5, 3))
    statistics.restore_if(torch.tensor(False))
    assert all(not torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_batches_are_counted_only_without_a_fixed_momentum() -> None:
    model = EncoderProjector(Config(model=ModelConfig("test_resnet", projector_hidden=(8,)), views=ViewsConfig()))
    assert not any("num_batches_tracked" in name for name in model.state_dict())
    averages_all = nn.BatchNorm1d(2, momentum=None)
    stop_counting_batches(averages_all)
    assert averages_all.num_batches_tracked is not None


def test_a_memory_budget_adds_no_all_reduce_of_statistics(group_of_one: str) -> None:
    """The compiler recomputes operations in backward to save memory, but not an all-reduce."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    model = convert_batch_norm(nn.Sequential(*layers), 1, group_of_one, 1)
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(sum("all_reduce" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        torch.compile(model, fullgraph=True, backend=backend)(torch.randn(4, 8, 6, 6)).sum().backward()
    assert graphs == [3, 3]  # forward, backward
