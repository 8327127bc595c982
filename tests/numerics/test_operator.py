"""kernels.torch_ops: the whitening is one autograd node and one operator for torch.compile, without a second derivative."""

import shutil

import pytest
import torch
from torch import Tensor

from kernels import whitening_torch
from kernels.whitening import whiten, whiten_with_status
from tests.numerics.whitening_cases import random_like, rows_of_condition, value_and_gradient
from trainer.losses.wmse import wmse_loss, wmse_loss_with_status


@pytest.mark.parametrize("power", [1, 3])
def test_a_second_derivative_is_refused(power):
    x = rows_of_condition(1, 9, 4, 1e1).requires_grad_()
    loss = whiten(x, backend="torch").pow(power).sum()
    with pytest.raises(NotImplementedError, match=r"'torch' .* no second derivative.* backend='reference'"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_the_reference_has_a_second_derivative():
    x = rows_of_condition(1, 5, 2, 1e1).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: whiten(x, backend="reference"), x)


class _Cut(torch.autograd.Function):
    """Identity that passes no gradient back, not even zeros."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> None:
        return None


def test_without_an_incoming_gradient_none_is_returned():
    x = rows_of_condition(2, 9, 4, 1e1).requires_grad_()
    sizes = {"num_views": 2, "slice_size": 9, "permutations": torch.arange(9)[None]}
    for value in (whiten(x, backend="torch"), wmse_loss(x.flatten(0, 1), **sizes, backend="torch")):
        assert torch.autograd.grad(_Cut.apply(value).sum(), x, allow_unused=True) == (None,)


def test_the_status_has_no_gradient():
    x = rows_of_condition(2, 9, 4, 1e1).requires_grad_()
    for backend in ("reference", "torch"):
        z, status = whiten_with_status(x, backend=backend)
        sizes = {"num_views": 2, "slice_size": 9, "permutations": torch.arange(9)[None]}
        loss, status_of_loss = wmse_loss_with_status(x.flatten(0, 1), **sizes, backend=backend)
        assert z.requires_grad
        assert loss.requires_grad
        assert not any(values.requires_grad for values in (*status, *status_of_loss))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("eps", "cholesky_float64"), [(0.0, False), (0.1, False), (0.1, True)])
def test_the_operator_declares_its_output_shapes_and_dtypes(dtype, eps, cholesky_float64):
    x = rows_of_condition(2, 9, 4, 1e1).to(dtype)
    arguments = (x, eps, cholesky_float64, "torch")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.wmse.whiten, arguments, test_utils=checks)
    z, w, u, ok, _ = torch.ops.wmse.whiten(*arguments)
    backward = (random_like(x), z, w, u, ok, eps, "torch")
    torch.library.opcheck(torch.ops.wmse.whiten_backward, backward, test_utils=checks)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_the_whitening_compiles_as_one_graph(compiler):
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    x = rows_of_condition(3, 33, 8, 1e2).float()
    x[1, 0, 0] = float("nan")
    eager = value_and_gradient(lambda x: whiten(2 * x), x, x.nan_to_num())
    compiled = torch.compile(lambda x: whiten(2 * x), fullgraph=True, backend=compiler)
    for actual, expected in zip(value_and_gradient(compiled, x, x.nan_to_num()), eager, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("num_slices", "expected"), [(4, 1), (32, 2)])
def test_few_slices_are_whitened_on_one_thread(monkeypatch, num_slices, expected):
    """Two threads are slower than one where each operation is short. Afterwards the program has its threads again."""
    threads = []
    for name in ("forward", "backward"):
        original = getattr(whitening_torch, name)

        def noting(*args, original=original):
            threads.append(torch.get_num_threads())
            return original(*args)

        monkeypatch.setattr(whitening_torch, name, noting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(num_slices, 128, 64, requires_grad=True)
        whiten(x, backend="torch").sum().backward()
        assert threads == [expected, expected]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
