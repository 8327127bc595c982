"""The loss benchmark: what it compares computes the same, and its figures are complete."""

import json

import pytest
import torch

from kernels.whitening import BACKENDS
from trainer.bench_loss import MODES, LossShape, bench_loss, loop_loss
from trainer.losses.wmse import draw_permutations, wmse_loss


def test_the_loop_computes_the_same_loss_and_gradient():
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(3 * 32, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    permutations = draw_permutations(2, 32, v.device, generator)
    loop = loop_loss(v, permutations, num_views=3, slice_size=16)
    batched = wmse_loss(v, num_views=3, slice_size=16, iterations=2, permutations=permutations)
    torch.testing.assert_close(loop, batched)
    torch.testing.assert_close(torch.autograd.grad(loop, v), torch.autograd.grad(batched, v))


def test_figures_are_complete_plain_and_consistent(capsys):
    result = bench_loss([LossShape(2, 16, 8, 4, 1), LossShape(3, 8, 8, 4, 2)], device="cpu", seconds=0.1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "reference" in captured.err
    assert json.loads(json.dumps(result)) == result
    assert result["versions"]["torch"] == torch.__version__
    assert [entry["shape"]["num_views"] for entry in result["results"]] == [2, 3]
    for entry in result["results"]:
        figures = entry["figures"]
        assert set(figures) == {"loop", *BACKENDS}
        for modes in figures.values():
            assert set(modes) == set(MODES)
            for mode, figure in modes.items():
                assert 0 < figure["quartile_1"] <= figure["median"] <= figure["quartile_3"]
                assert figure["windows"] >= 2
                for base in ("loop", "reference"):
                    ratio = figures[base][mode]["median"] / figure["median"]
                    assert figure[f"speedup_over_{base}"] == pytest.approx(ratio)
