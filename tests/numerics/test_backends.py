"""Choice of a whitening backend: which backends can run, how "auto" uses the table, and what it logs.

tests/unit/test_backends_table.py tests the table itself.
"""

import json
import logging

import pytest
import torch

from kernels import backends, whitening
from kernels.backends import BACKENDS, backends_for, fastest_backend, why_not
from kernels.whitening import whiten
from trainer.losses.wmse import wmse_loss


@pytest.fixture(autouse=True)
def no_remembered_choice():
    """Clear the caches, because a choice is made once for each size."""
    caches = whitening._chosen, backends._measured
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_auto_logs_its_choice_once_for_each_size(caplog):
    with caplog.at_level(logging.INFO, logger="kernels.whitening"):
        for batch in (1, 1, 2, 2):
            whiten(torch.randn(batch, 8, 4))
    taken = [fastest_backend("cpu", batch, 8, 4, False) for batch in (1, 2)]
    assert [record.message for record in caplog.records] == [
        f"whitening: backend 'auto' uses '{taken[0]}' for 1 slices of 8 x 4 on cpu",
        f"whitening: backend 'auto' uses '{taken[1]}' for 2 slices of 8 x 4 on cpu",
    ]


def test_auto_uses_the_fastest_backend_for_the_sizes_of_the_slices(monkeypatch):
    asked = []

    def choose_the_reference(*arguments):
        asked.append(arguments)
        return "reference"

    monkeypatch.setattr(whitening, "fastest_backend", choose_the_reference)
    x = torch.randn(3, 9, 4, dtype=torch.float64).requires_grad_()
    z = whiten(x)
    assert z.grad_fn is not None
    assert "Whiten" not in z.grad_fn.name()  # only the other backends have this node
    whiten(x.float())
    whiten(x.float(), cholesky_float64=True)
    # 2 views of 27 images, twice, are 12 slices: another size, for which auto looks at the table again
    loss = wmse_loss(torch.randn(54, 4).requires_grad_(), num_views=2, slice_size=9, iterations=2)
    assert loss.grad_fn is not None
    assert "FusedLoss" not in loss.grad_fn.name()
    assert asked == [
        ("cpu", 3, 9, 4, True), ("cpu", 3, 9, 4, False), ("cpu", 12, 9, 4, False)
    ]  # fmt: skip


def test_a_named_backend_does_not_use_the_table(monkeypatch):
    monkeypatch.setattr(whitening, "fastest_backend", None)
    assert whiten(torch.randn(3, 9, 4), backend="torch").shape == (3, 9, 4)


def test_each_device_type_has_a_separate_table(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "__file__", str(tmp_path / "backends.py"))
    monkeypatch.setattr(backends, "_has_triton", lambda: True)
    cell = {"slices": 1, "rows": 9, "size": 4, "microseconds": {"torch": 2.0, "triton": 1.0}}
    (tmp_path / "backends_cuda.json").write_text(json.dumps({"cells": [cell]}))
    assert fastest_backend("cuda", 1, 9, 4, in_float64=False) == "triton"
    assert fastest_backend("cpu", 1, 9, 4, in_float64=False) == "torch"


def test_the_reason_why_triton_cannot_run_is_given(monkeypatch):
    monkeypatch.setattr(backends, "_has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert why_not("triton", "cuda", 512, in_float64=False) is None
    assert "at most 512 dimensions, not 513" in why_not("triton", "cuda", 513, in_float64=False)
    assert "float32 only" in why_not("triton", "cuda", 8, in_float64=True)
    assert "this is 'cpu'" in why_not("triton", "cpu", 8, in_float64=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not("triton", "cpu", 8, in_float64=False) is None
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    assert "not installed" in why_not("triton", "cuda", 8, in_float64=False)
    for name in ("reference", "torch"):
        assert why_not(name, "cpu", 4096, in_float64=True) is None


def test_interpreted_kernels_do_not_count_as_available_on_a_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backends, "_has_triton", lambda: True)
    assert backends_for(torch.device("cpu")) == ("reference", "torch")
    assert backends_for(torch.device("cuda")) == BACKENDS
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    assert backends_for(torch.device("cuda")) == ("reference", "torch")
