"""Standardising in place of whitening: each column of a slice gets mean 0 and variance 1, and columns stay correlated.

This is BatchNorm without an affine map. W is diagonal, so forward and backward are those of the whitening.
"""

from functools import partial

import torch
from torch import Tensor

from kernels import whitening_torch
from kernels.whitening_torch import Factor


def _deviations(a: Tensor) -> Factor:
    """Return the factor of a (B, k, k) whose W divides each column by its standard deviation."""
    variance = a.diagonal(dim1=1, dim2=2)
    # A column without variance has pivot 0, which `judge_factor` refuses.
    no_info = torch.zeros_like(variance[:, 0], dtype=torch.int32)
    return Factor(torch.diag_embed(variance.rsqrt()), a.new_empty(0), variance, no_info)


def _diagonal(product: Tensor, _: Tensor) -> Tensor:
    """Return H (B, k, k), the diagonal of the product G^T Z."""
    return torch.diag_embed(product.diagonal(dim1=1, dim2=2))


forward = partial(whitening_torch.forward, factorise=_deviations)
backward = partial(whitening_torch.backward, symmetrise=_diagonal)
