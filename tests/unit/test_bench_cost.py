"""Operators, bytes and memory are counted right where they can be counted by hand."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from trainer.bench.cost import MEANING, measure_cost, peak_bytes, saved_bytes
from trainer.bench.traffic import Traffic

CPU = torch.device("cpu")


@torch.library.custom_op("wmse_test::twice_plus_one", mutates_args=())
def twice_plus_one(x: Tensor) -> Tensor:
    """Two operators that a dispatch mode does not see from outside, one of them composite."""
    return torch.multiply(x, 2).add_(1)


@torch.library.custom_op("wmse_test::opaque_copy", mutates_args=())
def opaque_copy(x: Tensor) -> Tensor:
    """Work that torch does not see, as a Triton kernel's."""
    out = torch.empty_like(x)
    ctypes.memmove(out.data_ptr(), x.data_ptr(), x.nbytes)
    return out


@torch.library.custom_op("wmse_test::opaque_after_copy", mutates_args=())
def opaque_after_copy(x: Tensor) -> Tensor:
    """An operator that is seen, and work that is not."""
    rows, out = x.contiguous(), torch.empty(x.shape)
    ctypes.memmove(out.data_ptr(), rows.data_ptr(), rows.nbytes)
    return out


@torch.library.custom_op("wmse_test::nested", mutates_args=())
def nested(x: Tensor) -> tuple[Tensor, Tensor]:
    """Custom operators of both kinds, and nothing of its own."""
    return twice_plus_one(x), opaque_copy(x)


A = torch.arange(32.0).view(8, 4)  # 128 bytes
ROW = torch.arange(4.0)  # 16 bytes
ROWS = torch.tensor([5, 0, 2])  # 24 bytes; three rows of A have 48
THREE = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("run", "operators", "num_bytes"),
    [
        pytest.param(lambda: A.t().reshape(2, 16)[1:].detach(), 1, 256, id="only the copy of reshape, no view"),
        pytest.param(lambda: torch.empty_like(A), 0, 0, id="an allocation"),
        pytest.param(lambda: A.contiguous(), 0, 0, id="contiguous already"),
        pytest.param(lambda: A + A, 1, 3 * 128, id="two arguments, one result"),
        pytest.param(lambda: A + ROW, 1, 128 + 16 + 128, id="broadcast"),
        pytest.param(lambda: A + ROW.expand(8, 4), 1, 128 + 16 + 128, id="expanded"),
        pytest.param(lambda: A.clone().add_(1), 2, 256 + 256, id="in place: read and written"),
        pytest.param(lambda: torch.empty(8, 4).copy_(A), 1, 256, id="copied into: not read"),
        pytest.param(lambda: torch.add(A, 1, out=torch.empty(8, 4)), 1, 256, id="out: not read"),
        pytest.param(lambda: torch.zeros_like(A), 1, 128, id="shape taken, not read"),
        pytest.param(lambda: A[ROWS], 1, 48 + 24 + 48, id="rows read by index"),
        pytest.param(lambda: A.index_select(0, ROWS), 1, 48 + 24 + 48, id="index_select"),
        pytest.param(lambda: A.clone().__setitem__(ROWS, THREE), 2, 256 + 48 + 24 + 48, id="rows written by index"),
        pytest.param(lambda: A.clone().index_put_((ROWS,), ROW[0]), 2, 256 + 4 + 24 + 48, id="rows filled by index"),
        pytest.param(lambda: A.index_put((ROWS,), THREE), 1, 256 + 48 + 24 + 48, id="rows written into a copy"),
        pytest.param(lambda: A.clone().index_add_(0, ROWS, THREE), 2, 256 + 48 + 24 + 2 * 48, id="rows added to"),
        pytest.param(lambda: A.mT @ A, 1, 2 * 128 + 64, id="product"),
        pytest.param(lambda: twice_plus_one(A), 2, 256 + 256, id="custom operator"),
        pytest.param(lambda: opaque_copy(A), 1, 256, id="opaque custom operator"),
        pytest.param(lambda: opaque_after_copy(A.t()), 2, 256 + 256, id="a copy, then work that is not seen"),
        pytest.param(lambda: nested(A), 3, 256 + 256 + 256, id="custom operators in one"),
    ],
)
def test_operators_and_their_bytes(run: Callable[[], object], operators: int, num_bytes: int) -> None:
    with Traffic() as traffic:
        run()
    assert (traffic.operators, traffic.bytes) == (operators, num_bytes)


def test_what_the_mode_sees_is_computed_right() -> None:
    with Traffic():
        assert torch.equal(twice_plus_one(A), 2 * A + 1)
        assert torch.equal(opaque_copy(A), A)
        assert torch.equal(opaque_after_copy(A.t()), A.t())


def test_cost_of_a_small_function_by_hand() -> None:
    """(v * w).sum() of 128 bytes each. Forward: a product (3 x 128), a sum (128 + 4). Backward: a one (4), expanded for
    free, times w (4 + 2 x 128). Memory: the product; then one, sum and gradient."""
    v, w = A.clone().requires_grad_(), A + 1

    def forward() -> Tensor:
        return (v * w).sum()

    forward()
    cost = measure_cost(forward, v)
    assert cost == {"operators": 4, "bytes": 3 * 128 + 132 + 4 + 260, "peak_bytes": 4 + 4 + 128, "saved_bytes": 128}
    assert set(cost) < set(MEANING)


def test_a_slice_s_gradient_costs_no_copy_that_autograd_does_not_make() -> None:
    """Backward of v[rows]: zeros for v, then rows added in place; a dispatch mode makes autograd do it out of place."""
    v = A.clone().requires_grad_()
    rows = v[ROWS]
    with Traffic() as traffic:
        torch.autograd.grad(rows, v, THREE)
    assert (traffic.operators, traffic.bytes) == (2, 128 + 48 + 24 + 2 * 48)


def test_peak_is_of_what_lives_at_one_time() -> None:
    def step() -> None:
        first = torch.ones(1000)
        second = first + first
        del first
        torch.ones(500)
        del second

    assert peak_bytes(step, CPU) == 8000
    assert peak_bytes(lambda: torch.ones(10).neg(), CPU) == 80, "nothing is left of the profile before"


def test_each_saved_storage_counts_once() -> None:
    v = A.clone().requires_grad_()
    assert saved_bytes(lambda: v * 2) == 0
    assert saved_bytes(lambda: v.square()) == 128, "v itself"
    assert saved_bytes(lambda: v.exp()) == 128, "a result"

    def halves_of_one_storage() -> Tensor:
        y = v.exp()
        return (y[:4] * y[4:]).sum()

    assert saved_bytes(halves_of_one_storage) == 128
    assert saved_bytes(lambda: v.exp().exp()) == 256


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_launches_and_memory_on_a_gpu() -> None:
    v, w = A.cuda().requires_grad_(), A.cuda() + 1

    def forward() -> Tensor:
        return (v * w).sum()

    torch.autograd.grad(forward(), v)
    cost = measure_cost(forward, v)
    assert (cost["operators"], cost["launches"]) == (4, 4)
    assert cost["peak_bytes"] == 3 * 512, "CUDA's allocator rounds up to 512 bytes"
    assert cost["saved_bytes"] == 128
