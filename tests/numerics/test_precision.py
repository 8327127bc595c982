"""kernels.precision computes in full float32 and restores every setting afterwards."""

import pytest
import torch

from kernels.precision import full_float32
from kernels.whitening import whiten
from tests.numerics.whitening_cases import rows_of_condition, value_and_gradient

PRECISIONS = {
    "legacy_high": lambda: torch.set_float32_matmul_precision("high"),
    "legacy_medium": lambda: torch.set_float32_matmul_precision("medium"),
    "legacy_allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "matmul_flag": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "global_flag": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


def matmul_precision() -> str:
    """Return the precision of matrix products on the CPU, on which these tests run."""
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def restored_precision():
    """Restore the precision of matrix products after the test."""
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("allow", PRECISIONS.values(), ids=PRECISIONS.keys())
def test_products_are_float32_under_every_setting_which_is_then_restored(restored_precision, monkeypatch, allow):
    seen = []
    for name in ("bmm", "baddbmm"):  # the torch backend uses both
        plain = getattr(torch, name)

        def spy(*arguments, plain=plain, **keywords):
            seen.append(matmul_precision() in ("ieee", "none") and not torch.is_autocast_enabled("cpu"))
            return plain(*arguments, **keywords)

        monkeypatch.setattr(torch, name, spy)
    x = rows_of_condition(2, 33, 8, 1e3).float()
    exact = value_and_gradient(lambda x: whiten(x, backend="torch"), x, x)
    seen.clear()
    allow()
    before = matmul_precision()
    with torch.autocast("cpu", torch.bfloat16):  # covers forward and backward
        ours = value_and_gradient(lambda x: whiten(x, backend="torch"), x, x)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [True] * 5
    assert matmul_precision() == before
    for actual, expected in zip(ours, exact, strict=True):
        assert torch.equal(actual, expected)


def test_a_setting_that_follows_the_global_one_still_follows_it(restored_precision):
    torch.backends.fp32_precision = "tf32"
    with full_float32(torch.device("cpu")):
        pass
    torch.backends.fp32_precision = "ieee"
    assert matmul_precision() == "ieee"


def test_the_setting_is_restored_after_an_error(restored_precision):
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ZeroDivisionError), full_float32(torch.device("cpu")):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "high"
