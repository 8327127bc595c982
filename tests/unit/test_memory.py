"""Estimate of a rank's memory, compared with the tensors that real forward passes keep."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config.loading import load_config
from trainer.config.schema import Config
from trainer.models.networks import EncoderProjector
from trainer.tools.memory import Memory, estimate_memory, memory_lines

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


@pytest.mark.parametrize(("name", "copies"), [("adam", 4), ("adamw", 4), ("lars", 3), ("sgd", 3)])
def test_the_memory_of_weights_gradients_and_moments_is_exact(name: str, copies: int, tiny_config: Path) -> None:
    """Weights, gradients and one or two moments have 4 bytes each. Activations grow with the area of the views."""
    config = load_config(tiny_config, ["--optimizer.name", name])
    weights = sum(p.numel() for p in EncoderProjector(config).parameters())
    memory = estimate_memory(config, 10, CPU)
    assert memory.state == copies * 4 * weights
    larger = load_config(tiny_config, ["--optimizer.name", name, "--views.size", "64", "--views.eval_resize", "64"])
    assert 3.5 < estimate_memory(larger, 10, CPU).kept / memory.kept < 4.1


def test_copies_of_the_weights_count_once_for_any_number_of_views(tiny_config: Path) -> None:
    """Under bf16 autocast each weight except the last layer's has a second copy of two bytes."""
    config = load_config(tiny_config, ["--precision", "bf16", "--views.size", "16", "--views.eval_resize", "16"])
    model = EncoderProjector(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "projector.last" not in name)
    some, twice = (estimate_memory(config, views, CPU).kept for views in (10, 20))
    assert 2 * some - twice == pytest.approx(2 * matrices, rel=0.05)


def test_the_memory_of_activations_is_what_an_eager_step_keeps(tiny_config: Path) -> None:
    """The estimate is compared with the storages that a real forward pass keeps."""
    config = load_config(tiny_config, ["--precision", "bf16"])
    model, kept = EncoderProjector(config), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rows = 24
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(rows, 3, 32, 32, dtype=torch.uint8).to(memory_format=torch.channels_last))
    own = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    found = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)
    assert estimate_memory(config, rows, CPU).kept == pytest.approx(found, rel=0.01)


@pytest.mark.slow
def test_a_compiled_step_under_a_budget_keeps_less_than_an_eager_one_over_ranks(tiny_config: Path) -> None:
    """BatchNorm over ranks consists of plain tensor operations, which keep float32 copies if they are not compiled."""
    config = load_config(tiny_config, ["--precision", "bf16", "--model.batch_norm_ranks", "all"])
    local = replace(config, model=replace(config.model, batch_norm_ranks="local"))
    tight = replace(config, model=replace(config.model, activation_memory_budget=0.9))
    eager_all, eager, compiled, budget = (
        estimate_memory(c, 64, device).kept
        for c, device in ((config, CPU), (local, CPU), (config, CUDA), (tight, CUDA))
    )
    assert eager_all > 1.3 * eager
    assert compiled < 1.1 * eager
    assert budget < 0.75 * compiled


def memory_of(monkeypatch: pytest.MonkeyPatch, gib_a_view: float, with_budget: float) -> None:
    """Replace the estimate by fixed sizes of a view's activations, without and with a budget of 0.9."""

    def estimate(config: Config, views: int, device: torch.device) -> Memory:
        gib = with_budget if config.model.activation_memory_budget == 0.9 else gib_a_view
        return Memory(GIB, int(views * gib * GIB), views)

    monkeypatch.setattr("trainer.tools.memory.estimate_memory", estimate)


@pytest.mark.parametrize(
    ("gib_a_view", "with_budget", "settings", "expected"),
    [
        (0.01, 0.01, {}, "40 GB: yes; 80 GB: yes"),
        (0.04, 0.02, {}, "40 GB: no, but with model.activation_memory_budget 0.9; 80 GB: yes"),
        (
            0.03,
            0.02,
            {"images": 512},
            "40 GB: no, but with model.activation_memory_budget 0.9 and optimizer.images_per_micro_batch 256; 80 GB: yes",
        ),
        (0.05, 0.02, {"images": 512}, "80 GB: no, but with model.activation_memory_budget 0.9 ("),
        (0.05, 0.02, {"images": 512, "compile": "false"}, "80 GB: no, but with optimizer.images_per_micro_batch 256 ("),
        (0.5, 0.4, {}, "80 GB: no; use more ranks"),
    ],
)
def test_the_settings_that_make_a_run_fit_a_card_are_named(
    gib_a_view: float, with_budget: float, settings: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has one rank, 4 views of each image and slices of 256."""
    memory_of(monkeypatch, gib_a_view, with_budget)
    config = replace(Config(), compile=settings.get("compile", "auto"))
    config = replace(config, data=replace(config.data, images_per_step=settings.get("images", 256)))
    assert expected in memory_lines(config, 1)[-1]


def test_on_a_cpu_no_gpu_is_named(tiny_config: Path) -> None:
    (line,) = memory_lines(load_config(tiny_config, []), 1)
    assert "(eager)" in line
