"""Encoder and projector have the layers, layouts and precision of the recipes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config.schema import Config, ModelConfig, ViewsConfig
from trainer.distributed.ranks import Ranks
from trainer.errors import InputError
from trainer.methods.method import MethodContext
from trainer.models.batch_norm import ViewBatchNorm
from trainer.models.encoder import Normalize, build_encoder, count_features
from trainer.models.networks import EncoderProjector, build_networks
from trainer.models.projector import Projector

TINY = ModelConfig(backbone="test_resnet", projector="mlp", projector_hidden=(16,), embedding_size=8)


def test_pixels_are_scaled_by_mean_and_std_and_keep_their_layout() -> None:
    views = ViewsConfig(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (views.mean, views.std))
    normalize = Normalize(views)
    scaled = normalize(pixels)
    torch.testing.assert_close(scaled, (pixels / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    assert scaled.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(normalize(pixels.float()), scaled)
    # A kernel may have normalised the views of a run.
    assert Normalize(views, passes_floats=True)(scaled) is scaled
    assert torch.equal(normalize.undo(scaled), pixels)


def test_the_simclr_projector_has_two_hidden_layers_and_a_norm_without_bias() -> None:
    p = Projector("simclr", 24, (32, 16), 8)
    linears = [m for m in p.modules() if isinstance(m, nn.Linear)]
    assert [tuple(m.weight.shape) for m in linears] == [(32, 24), (16, 32), (8, 16)]
    assert all(m.bias is None for m in linears)
    assert [type(m).__name__ for m in p.hidden] == ["Linear", "BatchNorm1d", "ReLU"] * 2
    assert p.norm.bias is None
    assert p.norm.weight is not None
    assert p(torch.randn(10, 24)).mean(0).abs().max() < 1e-5


def test_the_mlp_projector_has_one_hidden_layer_and_no_norm() -> None:
    p = Projector("mlp", 24, (16,), 8)
    assert isinstance(p.norm, nn.Identity)
    assert p.last.bias is not None
    assert [type(m).__name__ for m in p.hidden] == ["Linear", "BatchNorm1d", "ReLU"]


def test_the_last_layer_is_float32_under_autocast() -> None:
    model = EncoderProjector(Config(model=TINY, views=ViewsConfig()))
    pixels = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.projector.hidden(model.encoder(model.normalize(pixels)))
        v = model(pixels)
    assert hidden.dtype == torch.bfloat16
    assert v.dtype == torch.float32
    assert not torch.equal(v, v.bfloat16().float())


@pytest.mark.parametrize("backbone", ["test_resnet", "mobilenetv3_small_050"])
def test_pooling_gives_one_row_of_features_for_each_image(backbone: str) -> None:
    """MobileNetV3 has a layer between its pooling and its flattening."""
    encoder = build_encoder(ModelConfig(backbone=backbone, zero_init_last=False))
    assert encoder(torch.zeros(2, 3, 32, 32)).shape == (2, count_features(encoder))


def test_a_vision_transformer_is_built_for_the_size_of_the_views() -> None:
    """Its features are timm's: the class token. Every other size is refused, since its position embeddings do not fit."""
    model = ModelConfig(backbone="vit_tiny_patch16_224", encoder_batch_norm="per_view")
    encoder = build_encoder(model, ViewsConfig(size=48))
    features = encoder(torch.zeros(2, 3, 48, 48))
    assert features.shape == (2, count_features(encoder))
    assert torch.equal(features, encoder.fc_norm(encoder.forward_features(torch.zeros(2, 3, 48, 48))[:, 0]))
    features.square().sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())
    with pytest.raises(
        InputError, match=r"views\.early_sizes is \[32\], but vit_tiny_patch16_224 only takes images of one size"
    ):
        build_encoder(model, ViewsConfig(size=48, early_sizes=(32,), early_size_epochs=(1,)))
    build_encoder(TINY, ViewsConfig(early_sizes=(32,), early_size_epochs=(1,)))  # a ResNet takes any size


@pytest.mark.parametrize(("over", "size"), [("local", 1), ("all", 8), (4, 4)])
def test_batch_norm_knows_the_number_of_ranks_of_its_statistics(over: Any, size: int) -> None:
    config = replace(TINY, batch_norm_ranks=over, encoder_batch_norm="per_view", projector_batch_norm="per_view")
    group = "mine" if size > 1 else None
    context = MethodContext(Config(model=config), Ranks(0, 8), torch.device("cpu"), batch_norm_group=group)
    networks = build_networks(EncoderProjector, context)
    norms = [m for m in networks.modules() if isinstance(m, ViewBatchNorm)]
    assert {(m.group_name, m.world_size) for m in norms} == {(group, size)}


@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_convolution_weights_are_channels_last(stem: str) -> None:
    """Otherwise each convolution copies its input, and DDP warns of strides that do not match."""
    model = EncoderProjector(Config(model=replace(TINY, stem=stem)))
    kernels = [p for p in model.parameters() if p.ndim == 4]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)


def test_every_parameter_gets_a_gradient() -> None:
    """DDP waits forever for a parameter without one, such as an unused classifier."""
    model = EncoderProjector(Config(model=replace(TINY, zero_init_last=False)))
    model(torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_activation_checkpointing_gives_the_same_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = EncoderProjector(
            Config(
                model=replace(TINY, zero_init_last=False, activation_checkpointing=checkpointing), views=ViewsConfig()
            )
        )
        model.double()
        assert model.encoder.grad_checkpointing is checkpointing
        torch.manual_seed(1)
        model(torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)).square().sum().backward()
        gradients.append(model.encoder.layer1[0].conv1.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_an_unknown_backbone_is_refused_with_similar_names() -> None:
    with pytest.raises(InputError, match=r"resnet51.*similar: .*resnet"):
        build_encoder(replace(TINY, backbone="resnet51"))


@pytest.mark.parametrize("stem", ["small", "small_pool"])
def test_small_stems_are_initialized_like_the_authors_code(stem: str) -> None:
    """The weights are uniform between -1 / sqrt(27) and 1 / sqrt(27), torch's default for 3x3x3 inputs."""
    torch.manual_seed(0)
    weight = build_encoder(replace(TINY, backbone="resnet18", stem=stem)).conv1.weight
    assert weight.std().item() == pytest.approx(1 / 9, rel=0.05)
    assert 0.98 / 27**0.5 < weight.abs().max().item() <= 1 / 27**0.5


def test_a_small_stem_is_refused_for_a_backbone_without_a_stem() -> None:
    with pytest.raises(InputError, match=r"set model\.stem to imagenet"):
        build_encoder(replace(TINY, backbone="test_vit", stem="small"))


@pytest.mark.slow
def test_a_compiled_model_is_one_graph_and_keeps_its_parameter_names() -> None:
    model = EncoderProjector(
        Config(model=replace(TINY, zero_init_last=False, encoder_batch_norm="per_view"), views=ViewsConfig(num_views=2))
    )
    names = set(model.state_dict())
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    expected = model(pixels)
    model.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(pixels), expected, rtol=1e-4, atol=1e-4)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("norm", ["joint", "per_view"])
@pytest.mark.parametrize("ranks", ["local", "all"])
def test_activations_stay_channels_last_up_to_the_pool(norm: str, ranks: str, group_of_one: str) -> None:
    """A layer that changes the layout copies its whole input on a GPU, in forward and backward."""
    config = replace(TINY, encoder_batch_norm=norm, batch_norm_ranks=ranks)
    model = EncoderProjector(
        Config(model=config, views=ViewsConfig(num_views=2)), group_of_one, 2 if ranks == "all" else 1
    )
    changed = []

    def look(name: str, tensor: torch.Tensor) -> None:
        if (
            tensor.dim() == 4
            and min(tensor.shape[1:3]) > 1
            and not tensor.is_contiguous(memory_format=torch.channels_last)
        ):
            changed.append(name)

    def watch(name: str, output: torch.Tensor) -> None:
        look(name, output)
        output.register_hook(lambda gradient: look(f"gradient of {name}", gradient))

    watched = [n for n, m in model.encoder.named_modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | ViewBatchNorm)]
    for name in watched:
        model.encoder.get_submodule(name).register_forward_hook(
            lambda m, inputs, output, name=name: watch(name, output)
        )
    assert len(watched) > 20
    pixels = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8).to(memory_format=torch.channels_last)
    model(pixels).square().sum().backward()
    assert changed == []
