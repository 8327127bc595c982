"""kernels.operator: one node for autograd, one operator for torch.compile, no second derivative."""

import shutil

import pytest
import torch

from kernels.whitening import whiten
from tests.numerics.whitening_cases import rows_of_condition, value_and_gradient


@pytest.mark.parametrize("power", [1, 3])
def test_second_derivative_is_refused(power):
    x = rows_of_condition(1, 9, 4, 1e1).requires_grad_()
    loss = whiten(x, backend="torch").pow(power).sum()
    with pytest.raises(NotImplementedError, match=r"'torch' .* no second derivative.* backend='reference'"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_second_derivative_of_the_reference():
    x = rows_of_condition(1, 5, 2, 1e1).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: whiten(x, backend="reference"), x)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_as_one_graph(compiler):
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    x = rows_of_condition(3, 33, 8, 1e2).float()
    x[1, 0, 0] = float("nan")
    eager = value_and_gradient(lambda x: whiten(2 * x), x, x.nan_to_num())
    compiled = torch.compile(lambda x: whiten(2 * x), fullgraph=True, backend=compiler)
    for actual, expected in zip(value_and_gradient(compiled, x, x.nan_to_num()), eager, strict=True):
        torch.testing.assert_close(actual, expected)
