"""Each peer computes the right result, at tiny sizes; otherwise its speed would mean nothing."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from trainer.bench.peers import loaders
from trainer.bench.peers.__main__ import main
from trainer.bench.peers.authors import SeparateViews, compare_training
from trainer.bench.peers.loader_dali import dali_batches
from trainer.bench.peers.loader_torchvision import torchvision_batches
from trainer.bench.peers.optimizers import optimizers
from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.errors import InputError
from trainer.models.networks import EncoderProjector

PEERS = ["torchvision", "dali_decode_once", "dali_decode_per_view"]


@pytest.fixture
def config(tiny_config: Path, tiny_set: Path) -> Config:
    """Return the tiny config for `tiny_set`."""
    return load_config(tiny_config, ["--data.root", str(tiny_set)])


def views_of(config: Config, name: str) -> list[torch.Tensor]:
    """Return the d views of the first batch, each (N, 3, S, S)."""
    if name == "torchvision":
        return next(torchvision_batches(config, 0))
    batch = next(dali_batches(config, decode_once=name == "dali_decode_once"))
    return [batch[f"view{view}"].permute(0, 3, 1, 2) for view in range(config.views.num_views)]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_makes_different_views_of_the_right_size(config: Config, name: str) -> None:
    first, second, *_ = views_of(config, name)
    for view in (first, second):
        assert view.shape == (config.data.images_per_step, 3, config.views.size, config.views.size)
        assert view.dtype == torch.uint8
    assert (first != second).flatten(1).any(1).all()
    assert len(torch.unique(first, dim=0)) > 1


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_shows_the_same_image_in_all_views(config: Config, name: str) -> None:
    """Without random choices all views are the whole image and equal. With grey alone, their channels are equal."""
    plain = replace(config.views, crop_area=(1.0, 1.0), crop_ratio=(0.9, 1.2), flip_probability=0.0,
                    color_probability=0.0, gray_probability=0.0, blur_probability=0.0)  # fmt: skip
    first, second, *_ = views_of(replace(config, views=plain), name)
    assert (first.float() - second.float()).abs().mean() < 6
    assert (first[:1].float() - second[1:2].float()).abs().mean() > 20
    gray = views_of(replace(config, views=replace(plain, gray_probability=1.0)), name)[0].float()
    assert (gray[:, 0] - gray[:, 1]).abs().max() <= 2
    blurred = replace(plain, blur_probability=1.0, blur_sigma=(1.9, 2.0), blur_window=13)
    soft = views_of(replace(config, views=blurred), name)[0].float()
    assert soft.diff(n=2, dim=-1).abs().mean() < 0.75 * first.float().diff(n=2, dim=-1).abs().mean()


def test_every_loader_continues_after_an_epoch(config: Config) -> None:
    """An epoch of the set has three steps."""
    for start in loaders.peer_loaders(config, 0).values():
        assert sum(1 for _ in islice(start(), 8)) == 8


def test_every_optimizer_updates_all_its_parameters(config: Config) -> None:
    for model, step in optimizers(config, torch.device("cpu")).values():
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e3)
        step()
        assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_options_of_our_loader_have_the_effect_of_their_names(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches show it: smaller views, the same pixels from the cache, and other files."""
    made = {}

    def take_one(started, views, seconds):
        made.update({name: next(start()).views.clone() for name, start in started.items()})
        return {name: {"median": 1.0} for name in started}

    monkeypatch.setattr(loaders, "compare_loaders", take_one)
    monkeypatch.setattr(loaders, "SIZES", (16,))
    monkeypatch.setattr(loaders, "MAX_SIDE", 20)
    result = loaders.compare_options(config, 1.0)
    assert [views.shape[-1] for views in made.values()] == [32, 16, 32, 32, 32]
    recipe, _, cached, by_torchcodec, shrunk = made.values()
    assert torch.equal(cached, recipe)
    assert torch.equal(by_torchcodec, recipe)
    assert not torch.equal(shrunk, recipe)
    assert result["decoded_bytes"] == 48 * 40 * 36 * 3


def test_the_authors_structure_computes_the_same_embeddings_from_normalised_views(config: Config) -> None:
    recipe = replace(config.views, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    per_view = replace(config, model=replace(config.model, encoder_batch_norm="per_view"), views=recipe)
    views = next(torchvision_batches(per_view, 0))
    torch.manual_seed(per_view.seed)
    ours = EncoderProjector(per_view)(torch.cat(views))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (per_view.views.mean, per_view.views.std))
    theirs = SeparateViews(per_view)([(view / 255 - mean) / std for view in views])
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    normalised = next(torchvision_batches(per_view, 0, normalize=True))
    assert normalised[0].dtype == torch.float32
    assert normalised[0].mean().abs() < 1
    assert normalised[0].min() < 0


def test_whole_steps_are_compared_only_for_what_the_authors_train(config: Config) -> None:
    fits = replace(config, optimizer=replace(config.optimizer, name="adam"))
    result = compare_training(fits, 0.1, 0)
    ratio = result["figures"]["ours"]["median"] / result["figures"]["authors"]["median"]
    assert result["times"]["authors"] == ratio
    with pytest.raises(InputError, match="Adam"):
        compare_training(replace(config, method="byol"), 0.1, 0)


@pytest.mark.slow
def test_the_command_prints_ratios_and_refuses_unknown_parts(
    tiny_config: Path, tiny_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", str(tiny_config), "--data.root", str(tiny_set), "--seconds", "0.2", "--workers", "0"]
    assert main([*argv, "--out", str(tmp_path / "peers.json")]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result == json.loads((tmp_path / "peers.json").read_text())
    assert "timm_lars_foreach" in printed.err
    assert result["loss"]["times"].keys() == {"loop", "reference"}
    assert result["optimizer"]["times"].keys() == {"timm_lars_foreach", "timm_lars", "sgd_foreach"}
    figures = result["loader"]["figures"]
    ratio = figures["ours"]["median"] / figures["torchvision"]["median"]
    assert result["loader"]["times"]["torchvision"] == pytest.approx(ratio)
    assert main([*argv, "--only", "loader,lots"]) == 2
    assert "'lots'" in capsys.readouterr().err
