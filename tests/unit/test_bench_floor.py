"""The floor's arithmetic by hand, and ceilings from known times."""

import pytest
import torch
from trainer.bench.floor import Ceilings, floor, measure_ceilings

from trainer.bench import floor as floor_module
from trainer.bench.shapes import LossShape

SHAPE = LossShape(num_views=2, num_images=16, slice_size=8, embedding_size=4, iterations=3)
FLOPS = 12 * (5 * 2 * 8 * 4 * 4 + 2 / 3 * 4**3)  # 3 x 2 x 2 slices
BYTES = 7 * (2 * 16 * 4 * 4)  # v read in three forwards and three backwards, the gradient written


def test_the_slower_of_arithmetic_and_memory_is_the_floor() -> None:
    assert SHAPE.num_slices == 12
    slow_products = floor(SHAPE, Ceilings(gflops=1.0, copy_gb_per_s={256: 99.0, 512: 1.0}))
    assert slow_products == {
        "flops": pytest.approx(FLOPS),
        "bytes": BYTES,
        "floor_us": pytest.approx(FLOPS / 1e3),  # 1e9 operations a second are 1e3 a microsecond
        "bound": "arithmetic",
    }
    slow_memory = floor(SHAPE, Ceilings(gflops=100.0, copy_gb_per_s={256: 99.0, 512: 1.0}))
    assert slow_memory["floor_us"] == pytest.approx(BYTES / 1e3)
    assert slow_memory["bound"] == "memory"


def test_a_copy_s_rate_is_of_v_s_size_or_larger() -> None:
    ceilings = Ceilings(1.0, {1024: 90.0, 4096: 30.0, 16384: 40.0})
    assert [ceilings.copy_of_at_least(n) for n in (1, 1024, 1025, 9000, 99999)] == [90.0, 90.0, 40.0, 40.0, 40.0]


def test_ceilings_are_the_best_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor_module, "PRODUCT_SHAPES", ((2, 3, 4), (5, 6, 4)))
    monkeypatch.setattr(floor_module, "COPY_BYTES", (4096, 8192))
    monkeypatch.setattr(floor_module, "take_turns", lambda windows, seconds: {name: [200.0, 100.0] for name in windows})
    ceilings = measure_ceilings(torch.device("cpu"), 2.0)
    assert ceilings.gflops == pytest.approx(2 * 5 * 6 * 4 * 4 / 100 / 1e3)
    assert ceilings.copy_gb_per_s == {4096: pytest.approx(0.08192), 8192: pytest.approx(0.16384)}
    assert list(ceilings.as_json()["copy_gb_per_s"]) == ["0.00390625 MiB", "0.0078125 MiB"]


def test_products_and_copies_do_the_work_they_are_counted_for() -> None:
    product = floor_module._product(2, 3, 4, torch.device("cpu"))()
    assert product.shape == (2, 3, 4)
    copy = floor_module._copy(4096, torch.device("cpu"))()
    assert copy.nbytes == 4096
    assert bool((copy == 1).all())
