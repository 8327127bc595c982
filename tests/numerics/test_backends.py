"""Choice of a whitening backend, and which backends can run."""

import torch

from kernels import backends
from kernels.backends import BACKENDS, backends_for, why_not
from kernels.whitening import choose_backend


def test_auto_is_torch_on_every_device():
    x = torch.randn(3, 9, 4, dtype=torch.float64)
    assert choose_backend("auto", x, 4, False) == "torch"
    assert choose_backend("auto", x.to("meta"), 4, True) == "torch"


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
