"""The loss benchmark: what it compares computes the same, its figures are complete, and nothing goes missing silently."""

import json
import sys
from pathlib import Path

import pytest
import torch
from trainer.bench.cost import MEANING

from tests.conftest import ROOT
from trainer.bench import floor, implementations
from trainer.bench.implementations import drop_refusing, loop_loss, runnable_backends
from trainer.bench.loss import MODES, bench_loss
from trainer.bench.shapes import RECIPE_SHAPES, LossShape, parse_shapes, shape_of_config
from trainer.cli import main
from trainer.config.loading import load_config
from trainer.errors import InputError
from trainer.losses.wmse import draw_permutations, wmse_loss
from trainer.tools.run_plan import plan_lines

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and copies of a quarter of a gigabyte take longer than all else here."""
    monkeypatch.setattr(floor, "PRODUCT_SHAPES", ((2, 8, 4),))
    monkeypatch.setattr(floor, "COPY_BYTES", (2**12,))


def test_the_loop_computes_the_same_loss_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(3 * 32, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    permutations = draw_permutations(2, 32, v.device, generator)
    loop = loop_loss(v, permutations, num_views=3, slice_size=16)
    batched = wmse_loss(v, num_views=3, slice_size=16, iterations=2, permutations=permutations)
    torch.testing.assert_close(loop, batched)
    torch.testing.assert_close(torch.autograd.grad(loop, v), torch.autograd.grad(batched, v))


def test_figures_are_complete_plain_and_consistent(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench_loss([LossShape(2, 16, 8, 4, 1), LossShape(3, 8, 8, 4, 2)], device="cpu", seconds=0.1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "reference" in captured.err
    assert json.loads(json.dumps(result)) == result
    assert result["versions"]["torch"] == torch.__version__
    assert [entry["shape"]["num_views"] for entry in result["results"]] == [2, 3]
    names = {"loop", *runnable_backends(CPU)[0], "torch_float64_factor"}
    for entry in result["results"]:
        assert set(entry["figures"]) == set(entry["costs"]) == names
        for modes in entry["figures"].values():
            check_figures(modes, entry["figures"])
        for name, cost in entry["costs"].items():
            assert set(cost) == set(MEANING) - {"launches"} | {"times_floor"}
            assert min(cost.values()) > 0
            both = entry["figures"][name]["forward_backward"]["median"]
            assert cost["times_floor"] == pytest.approx(both / entry["floor"]["floor_us"])
        assert entry["costs"]["loop"]["operators"] > entry["costs"]["torch"]["operators"]
        assert entry["costs"]["torch_float64_factor"]["bytes"] > entry["costs"]["torch"]["bytes"]


def check_figures(modes: dict, figures: dict) -> None:
    """One implementation's times: in order, and its ratios those of the medians."""
    assert set(modes) == set(MODES)
    for mode, figure in modes.items():
        assert 0 < figure["quartile_1"] <= figure["median"] <= figure["quartile_3"]
        assert figure["windows"] >= 3
        for base in ("loop", "reference"):
            ratio = figures[base][mode]["median"] / figure["median"]
            assert figure[f"speedup_over_{base}"] == pytest.approx(ratio)


def test_what_cannot_run_is_named_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    runnable, reasons = runnable_backends(CPU)
    assert runnable == ("reference", "torch")
    assert list(reasons) == ["triton"]
    assert "triton" in reasons["triton"] or "GPU" in reasons["triton"]
    monkeypatch.setattr(implementations, "backends_for", lambda device: ("reference", "triton"))
    result = bench_loss([LossShape(2, 16, 8, 4, 1)], device="cpu", seconds=0.01)
    assert result["not_run"] == {"torch": "does not run at full speed on cpu"}
    (entry,) = result["results"]
    assert set(entry["figures"]) == set(entry["costs"]) == {"loop", "reference"}
    assert entry["not_run"]["triton"].startswith("ValueError: whitening backend 'triton' needs")
    shown = capsys.readouterr().err
    assert "not run: torch: does not run at full speed on cpu" in shown
    assert "not run: triton: ValueError" in shown


def test_who_refuses_a_size_is_taken_out_but_not_what_all_are_compared_to() -> None:
    def refuse() -> None:
        raise NotImplementedError("slices of 8 rows are too few for it")

    steps = {"loop": list, "picky": refuse, "torch": list}
    assert drop_refusing(steps) == {"picky": "NotImplementedError: slices of 8 rows are too few for it"}
    assert list(steps) == ["loop", "torch"]
    for base in ("loop", "reference"):
        with pytest.raises(NotImplementedError):
            drop_refusing({base: refuse})


def test_shapes_are_read_and_wrong_ones_refused() -> None:
    assert parse_shapes(["4,256,128,64,1", "2, 512,256,128,4"]) == [RECIPE_SHAPES[1], RECIPE_SHAPES[2]]
    for word, problem in (
        ("4,256,128,64", "whole numbers"),
        ("4,256,128,64,x", "whole numbers"),
        ("1,256,128,64,1", "2 views"),
        ("4,256,64,64,1", "above embedding_size, best 128"),
        ("4,200,128,64,1", "multiple of slice_size=128"),
    ):
        with pytest.raises(InputError, match=problem):
            parse_shapes([word])


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "loss.json"
    assert main(["bench", "loss", "--shapes", "2,16,8,4,1", "--seconds", "0.01", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    assert [entry["shape"]["slice_size"] for entry in printed["results"]] == [8]


@pytest.mark.parametrize(
    ("words", "ranks", "num_images"),
    [
        ("", 1, 64),
        ("", 2, 32),
        ("--optimizer.accumulation_steps 2", 1, 32),  # one part
        ("", 8, 16),  # 8 images a rank: two ranks whiten a slice of 16 together
        ("--wmse.iterations 2 --wmse.permutation_block 32", 2, 32),
        ("--wmse.iterations 2 --wmse.permutation_block 32", 4, 32),  # two ranks permute a block together
    ],
)
def test_the_shape_of_an_experiment_is_what_one_rank_whitens(
    words: str, ranks: int, num_images: int, tiny_config: Path
) -> None:
    config = load_config(tiny_config, ["--data.images_per_step", "64", *words.split()])
    shape = shape_of_config(config, ranks)
    assert shape == LossShape(2, num_images, 16, 8, config.wmse.iterations)
    slices_of_all = shape.num_slices * 64 // num_images
    assert f"whitening: {slices_of_all} slices" in "\n".join(plan_lines(config, 64, ranks))


def test_the_recipes_shapes_are_those_of_the_configs() -> None:
    configs = [path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("demo")]
    shapes = {shape_of_config(load_config(path, []), 1) for path in configs}
    assert shapes | {LossShape(4, 1024, 256, 128, 1)} == set(RECIPE_SHAPES)


def test_an_experiment_is_measured_on_its_device_and_what_is_set_aside_is_said(
    tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(tiny_config), "--data.images_per_step", "32", "--ranks", "2", "--wmse.eps", "0.01"]
    words += ["--wmse.cholesky_float64", "true"]  # which is measured, as an implementation of its own
    assert main(["bench", "loss", *words, "--seconds", "0.01"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert [entry["shape"] for entry in result["results"]] == [LossShape(2, 16, 16, 8, 1)._asdict()]
    assert (result["device_type"], result["ranks"], result["config"]) == ("cpu", 2, str(tiny_config))
    assert result["not_measured"] == ["wmse.eps is 0.01, measured with 0.0"]
    assert "note: wmse.eps is 0.01" in said.err
    if not torch.cuda.is_available():
        assert main(["bench", "loss", *words, "--device", "cuda"]) == 2
        assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("loss --shapes 2,16", "--shapes '2,16'"),
        ("loss --sweep --shapes 2,16,8,4,1", "give one of them"),
        ("loss --config x.yaml --shapes 2,16,8,4,1", "give one of them"),
        ("loss --config x.yaml --sweep", "give one of them"),
        ("loss --config x.yaml", "no config file x.yaml"),
        ("loss --config TINY --shape 2,16,8,4,1", "unknown setting shape"),
        ("loss --config TINY --ranks 3", "3 ranks can't share evenly"),
        ("loss --config TINY --ranks 0", "--ranks is 0"),
        ("loss --shape 2,16,8,4,1", "no use for --shape 2,16,8,4,1 without --config"),
        ("loss --ranks 2", "no use for --ranks without --config"),
        ("loss --ranks 2 --wmse.eps 1e-4", "no use for --ranks --wmse.eps 1e-4 without --config"),
        ("loss --sweep --device cpu", "no use for --device cpu without --config"),
        ("loss --seconds 0", "--seconds"),
        ("loss --out no/such/folder/x.json", "no folder no/such/folder"),
        ("checkpoint --config x.yaml --sweep", "for wmse bench loss and loader"),
        ("loader --config x.yaml --ranks 2", "for wmse bench loss"),
    ],
)
def test_words_without_an_effect_are_refused(
    words: str, problem: str, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words.replace("TINY", str(tiny_config)).split()]) == 2
    assert problem in capsys.readouterr().err


def test_sizes_without_a_config_need_no_settings_machinery(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that has torch and rich, but neither jsonargparse nor DALI, measures the loss."""
    for name in ("jsonargparse", "trainer.config.loading", "trainer.setup", "nvidia.dali"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["bench", "loss", "--shapes", "2,16,8,4,1", "--seconds", "0.01"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "loss"
