"""Online probe: what it learns, and that it leaves the encoder alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.conftest import TINY
from tests.processes import start_ranks
from trainer.config.loading import load_config
from trainer.distributed.ranks import Ranks, find_ranks
from trainer.errors import InputError
from trainer.loop import pretrain
from trainer.methods.method import MethodContext
from trainer.models.compile import compile_networks
from trainer.models.networks import EncoderProjector, build_networks
from trainer.models.online_probe import OnlineProbe
from trainer.run.checkpoint import load_checkpoint
from trainer.run.signals import StopRequest

CPU = torch.device("cpu")
PROBE = ("--online_probe.enabled", "true")


def train(folder: Path, root: Path, *settings: str) -> dict[str, Any]:
    """Train for three steps, and return the last checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(TINY)
    words = ["--data.root", str(root), "--run_dir", str(folder / "run"), "--max_steps", "3", *settings]
    assert pretrain(load_config(folder / "tiny.yaml", words), StopRequest()) == 0
    return load_checkpoint(folder / "run" / "checkpoints" / "step_00000003.pt")


def probe_of(num_classes: int = 3) -> OnlineProbe:
    return OnlineProbe(8, num_classes, views_per_step=24, learning_rate=0.01, ranks=Ranks(), device=CPU)


@pytest.mark.parametrize("micro_batches", ["1", "2"])
def test_the_encoder_is_bit_identical_with_and_without_it(micro_batches: str, tiny_set: Path, tmp_path: Path) -> None:
    settings = ("--wmse.slice_size", "16", "--optimizer.accumulation_steps", micro_batches)
    settings = (*settings, "--data.images_per_step", "32", "--optimizer.epochs", "6", "--optimizer.warmup_steps", "1")
    without = train(tmp_path / "without", tiny_set, *settings)
    with_probe = train(tmp_path / "with", tiny_set, *settings, *PROBE)
    assert without["model"].keys() == with_probe["model"].keys()
    for name, value in without["model"].items():
        assert torch.equal(value, with_probe["model"][name]), name
    assert without["online_probe"] is None
    assert with_probe["online_probe"]["weight"].abs().max() > 0
    lines = [json.loads(line) for line in (tmp_path / "with" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["probe_top1"] <= 100 for line in lines)


def test_a_resumed_run_has_the_same_probe(tiny_set: Path, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", tiny_set, *PROBE)["online_probe"]
    train(tmp_path / "parts", tiny_set, *PROBE, "--max_steps", "3", "--checkpoint.every_steps", "1")
    run = tmp_path / "parts" / "run" / "checkpoints"
    for step in (2, 3):
        (run / f"step_0000000{step}.pt").unlink()
    again = train(tmp_path / "parts", tiny_set, *PROBE)["online_probe"]
    assert torch.equal(whole["weight"], again["weight"])
    assert torch.equal(whole["optimizer"][0]["exp_avg"], again["optimizer"][0]["exp_avg"])


def test_it_can_be_enabled_when_a_run_is_resumed(
    tiny_set: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, tiny_set, "--checkpoint.every_steps", "1")
    (tmp_path / "run" / "checkpoints" / "step_00000003.pt").unlink()
    content = train(tmp_path, tiny_set, *PROBE)
    assert content["online_probe"]["weight"].abs().max() > 0
    assert "has no online probe of these classes: it starts at zero" in (tmp_path / "run" / "log.txt").read_text()


def test_it_learns_and_counts_labelled_views_only() -> None:
    """Three of four images have labels, in two views. Zero weights guess the first class."""
    probe = probe_of()
    labels = torch.tensor([0, 1, -1, 2])
    x = torch.eye(8)[[0, 1, 2, 3]].repeat(2, 1) * 3
    probe.add(x, labels)
    probe.update(torch.tensor(False))
    assert probe.take()["probe_top1"].item() == pytest.approx(100 / 3)
    for _ in range(50):
        probe.add(x, labels)
        probe.update(torch.tensor(False))
    assert probe.take()["probe_top1"].item() == 100
    assert probe.take()["probe_top1"].isnan()


def test_its_gradient_is_that_of_the_labelled_views_over_all_micro_batches() -> None:
    probe = probe_of()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 8, generator=generator)
    labels = torch.tensor([0, 1, 2, -1, 2, 0])
    probe.add(x[[0, 1, 2, 6, 7, 8]], labels[:3])
    probe.add(x[[3, 4, 5, 9, 10, 11]], labels[3:])
    weight = torch.zeros(3, 8, requires_grad=True)
    loss = functional.cross_entropy(x @ weight.T, labels.repeat(2), ignore_index=-1, reduction="sum") / 24
    (expected,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(probe.weight.grad, expected)


def images_of(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features (two views) and labels of this rank's part of six images."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 8, generator=generator)
    own = slice(rank * 6 // world_size, (rank + 1) * 6 // world_size)
    return x[:, own].flatten(0, 1), torch.tensor([0, 1, 2, -1, 2, 0])[own]


def learn_on_a_rank(folder: Path) -> None:
    """Make two updates with this rank's images, and save the result."""
    ranks = find_ranks()
    store = dist.FileStore(f"{folder}/store", ranks.world_size)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.world_size)
    probe = OnlineProbe(8, 3, views_per_step=12, learning_rate=0.01, ranks=ranks, device=CPU)
    for _ in range(2):
        probe.add(*images_of(ranks.rank, ranks.world_size))
        probe.update(torch.tensor(False))
    torch.save((probe.weight.detach(), probe.take()["probe_top1"]), folder / f"{ranks.rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    alone = OnlineProbe(8, 3, views_per_step=12, learning_rate=0.01, ranks=Ranks(), device=CPU)
    for _ in range(2):
        alone.add(*images_of(0, 1))
        alone.update(torch.tensor(False))
    top1 = alone.take()["probe_top1"]
    for process in start_ranks(learn_on_a_rank, [tmp_path], tmp_path, ranks=2):
        assert process.wait() == 0, process.output()
    for rank in range(2):
        weight, found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(weight, alone.weight.detach())
        assert found == top1


def test_a_skipped_update_changes_nothing() -> None:
    probe = probe_of()
    probe.add(torch.full((4, 8), torch.nan), torch.tensor([0, 1]))
    probe.update(torch.tensor(True))
    assert not probe.weight.any()
    assert probe.take()["probe_top1"].isnan()
    probe.add(torch.ones(4, 8), torch.tensor([0, 1]))
    probe.update(torch.tensor(False))
    assert probe.weight.isfinite().all()
    assert probe.weight.any()


def test_images_without_classes_are_refused(tiny_set: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"online_probe.enabled is true, but the training images have no classes"):
        train(tmp_path, tiny_set / "train" / "cats", "--data.train_split", ".", "--data.images_per_step", "16", *PROBE)


def test_the_compiled_networks_stay_one_graph_and_keep_their_features(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    config = load_config(tmp_path / "tiny.yaml", [])
    networks = build_networks(EncoderProjector, MethodContext(config, Ranks(), torch.device("cpu")))
    networks.keeps_features = True
    pixels = torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8)
    expected = networks.eval()(pixels)
    features = networks.features
    assert features is not None
    compile_networks(networks, config, CPU, backend="aot_eager")
    networks.features = None
    torch.testing.assert_close(networks(pixels), expected)
    torch.testing.assert_close(networks.features, features)
