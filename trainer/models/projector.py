"""Projector: a small network between the features of the encoder and the loss. A predictor has the same form.

Shapes: R views, F features, k embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainer.precision import at_least_float32


class _Form(NamedTuple):
    """Layers of a projector: hidden ones of Linear, BatchNorm and ReLU, then a last Linear."""

    hidden_bias: bool = True
    hidden_norm: bool = True
    last_bias: bool = True
    last_norm: Literal["none", "affine", "no_shift", "plain"] = "none"


_FORMS = {
    "mlp": _Form(),
    "mlp_norm": _Form(last_norm="affine"),
    "simclr": _Form(hidden_bias=False, last_bias=False, last_norm="no_shift"),
    "byol": _Form(last_bias=False),
    "simsiam": _Form(hidden_bias=False, last_bias=False, last_norm="plain"),
    "simsiam_predictor": _Form(hidden_bias=False),
    "moco": _Form(hidden_norm=False),
    "barlow_twins": _Form(hidden_bias=False, last_bias=False),
}


class Projector(nn.Module):
    """Linear layers with BatchNorm and ReLU in between, as model.projector describes.

    The last Linear computes in float32 even under autocast. Whitening divides by the square roots of the eigenvalues of the
    covariance, which span a factor of 100, and would enlarge the rounding errors of bf16 by as much. The cost is negligible.
    """

    def __init__(self, form: str, num_features: int, hidden_sizes: Sequence[int], size: int) -> None:
        """form: a value of model.projector, or simsiam_predictor. num_features: F. size: that of the output, k."""
        super().__init__()
        # A bias before a BatchNorm has no effect, but some published networks have one.
        hidden_bias, hidden_norm, last_bias, last_norm = _FORMS[form]
        sizes = [num_features, *hidden_sizes]
        hidden: list[nn.Module] = []
        for before, after in pairwise(sizes):
            hidden.append(nn.Linear(before, after, bias=hidden_bias))
            if hidden_norm:
                hidden.append(nn.BatchNorm1d(after))
            hidden.append(nn.ReLU())
        self.hidden = nn.Sequential(*hidden)
        self.last = nn.Linear(sizes[-1], size, bias=last_bias)
        # SimCLR leaves out the shift of the last BatchNorm, SimSiam scale and shift.
        self.norm = nn.Identity() if last_norm == "none" else nn.BatchNorm1d(size, affine=last_norm != "plain")
        if last_norm == "no_shift":
            self.norm.register_parameter("bias", None)

    def forward(self, features: Tensor) -> Tensor:
        """Project features (R, F) to embeddings (R, k) float32."""
        x = self.hidden(features)
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(self.last(at_least_float32(x)))
