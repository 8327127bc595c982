"""kernels.operator: one node for autograd, one operator for torch.compile, no second derivative."""

import shutil

import pytest
import torch

from kernels.whitening import whiten
from tests.numerics.whitening_cases import random_like, rows_of_condition, value_and_gradient


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


@pytest.mark.parametrize("float64_factor", [False, True])
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_the_operators_tell_the_compiler_what_they_return(eps, float64_factor):
    """Shapes, types and strides of the fakes are those of the results; nothing is changed in place."""
    x = random_like(torch.empty(2, 9, 4))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.wmse.whiten.default, (x, eps, float64_factor, "torch"), test_utils=checks)
    z, w, u, ok, _ = torch.ops.wmse.whiten(x, eps, float64_factor, "torch")
    arguments = (random_like(x, 1), z, w, u, ok, eps, "torch")
    torch.library.opcheck(torch.ops.wmse.whiten_backward.default, arguments, test_utils=checks)
