"""Benchmark of the loss, beside a loop that computes the same, at the sizes of a rank."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from trainer.bench.implementations import drop_refusing, loop_loss
from trainer.bench.shapes import RECIPE_SHAPES, LossShape, shape_of_config
from trainer.cli import main
from trainer.config.loading import load_config
from trainer.losses.wmse import draw_permutations, wmse_loss
from trainer.tools.memory import saved_storages
from trainer.tools.run_plan import plan_lines


def test_the_loop_computes_the_same_loss_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(3 * 32, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    permutations = draw_permutations(2, 32, v.device, generator)
    loop = loop_loss(v, permutations, num_views=3, slice_size=16)
    batched = wmse_loss(v, num_views=3, slice_size=16, iterations=2, permutations=permutations)
    torch.testing.assert_close(loop, batched)
    torch.testing.assert_close(torch.autograd.grad(loop, v), torch.autograd.grad(batched, v))


def test_the_loss_is_measured_without_settings_and_images(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This works on a machine with torch and rich, but without jsonargparse and DALI."""
    for name in ("jsonargparse", "trainer.config.loading", "trainer.setup", "nvidia.dali"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["bench", "loss", "--shapes", "2,16,8,4,1", "3,8,8,4,2", "--seconds", "0.1"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert "reference" in printed.err
    assert [entry["shape"]["num_views"] for entry in result["results"]] == [2, 3]
    for entry in result["results"]:
        figures = entry["figures"]
        assert set(figures) == set(entry["costs"]) >= {"loop", "reference", "torch", "torch_float64_factor"}
        for name, modes in figures.items():
            both = modes["forward_backward"]
            assert 0 < both["quartile_1"] <= both["median"] <= both["quartile_3"]
            loop = figures["loop"]["forward_backward"]["median"]
            assert both["speedup_over_loop"] == pytest.approx(loop / both["median"])
            assert entry["costs"][name]["times_floor"] == pytest.approx(both["median"] / entry["floor"]["floor_us"])
        assert entry["costs"]["loop"]["saved_bytes"] > entry["costs"]["torch"]["saved_bytes"] > 0


def test_each_storage_that_autograd_saves_counts_once() -> None:
    v = torch.arange(32.0).requires_grad_()  # 128 bytes

    def halves_of_one_storage() -> torch.Tensor:
        y = v.exp()
        return (y[:4] * y[4:8]).sum()

    for forward, expected in ((lambda: v * 2, 0), (v.square, 128), (halves_of_one_storage, 128)):
        assert sum(storage.nbytes() for storage in saved_storages(forward).values()) == expected


def test_an_implementation_that_refuses_a_size_is_dropped_with_the_reason() -> None:
    def refuse() -> None:
        raise ValueError("too large")

    steps = {"loop": lambda: None, "torch": refuse}
    assert drop_refusing(steps) == {"torch": "ValueError: too large"}
    assert list(steps) == ["loop"]
    with pytest.raises(ValueError, match="too large"):  # the loop is needed for all comparisons
        drop_refusing({"loop": refuse})


@pytest.mark.parametrize(
    ("settings", "ranks", "num_images"),
    [
        ("", 1, 64),
        ("", 2, 32),
        ("--optimizer.accumulation_steps 2", 1, 32),  # one micro-batch
        ("", 8, 16),  # 8 images a rank: two ranks whiten a slice of 16 together
        ("--wmse.iterations 2 --wmse.permutation_block 32", 4, 32),  # two ranks permute a block together
    ],
)
def test_the_shape_of_an_experiment_is_that_of_one_rank(
    settings: str, ranks: int, num_images: int, tiny_config: Path
) -> None:
    config = load_config(tiny_config, ["--data.images_per_step", "64", *settings.split()])
    shape = shape_of_config(config, ranks)
    assert shape == LossShape(2, num_images, 16, 8, config.wmse.iterations)
    slices_of_all = shape.num_slices * 64 // num_images
    assert f"whitening: {slices_of_all} slices" in "\n".join(plan_lines(config, 64, ranks))


def test_the_shapes_of_the_recipes_are_those_of_the_configs() -> None:
    configs = [path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("demo")]
    whitening = [config for config in (load_config(path, []) for path in configs) if config.method == "wmse"]
    measured = [config for config in whitening if config.wmse.whitening == "cholesky"]
    shapes = {shape_of_config(config, 1) for config in measured}
    assert shapes | {LossShape(4, 1024, 256, 128, 1)} == set(RECIPE_SHAPES)


def test_settings_that_the_benchmark_ignores_are_reported(
    tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", str(tiny_config), "--data.images_per_step", "32", "--ranks", "2", "--wmse.eps", "0.01",
            "--wmse.whitening", "zca"]  # fmt: skip
    assert main(["bench", "loss", *argv, "--seconds", "0.01"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert [entry["shape"] for entry in result["results"]] == [LossShape(2, 16, 16, 8, 1)._asdict()]
    assert (result["device_type"], result["ranks"], result["config"]) == ("cpu", 2, str(tiny_config))
    assert result["not_measured"] == [
        "wmse.whitening is zca, measured with cholesky",
        "wmse.eps is 0.01, measured with 0.0",
    ]
    assert "note: wmse.eps is 0.01" in printed.err
