"""kernels.backends: who can, who is fastest by the measured table, and what "auto" says."""

import logging

import torch

from kernels import whitening
from kernels.backends import fastest_backend
from kernels.whitening import whiten


def test_auto_says_once_a_size_what_it_took(caplog):
    whitening._chosen.cache_clear()
    with caplog.at_level(logging.INFO, logger="kernels.whitening"):
        for batch in (1, 1, 2, 2):
            whiten(torch.randn(batch, 8, 4))
    taken = [fastest_backend("cpu", batch, 8, 4, False) for batch in (1, 2)]
    assert [record.message for record in caplog.records] == [
        f"whitening: backend 'auto' takes '{taken[0]}' for 1 slices of 8 x 4 on cpu",
        f"whitening: backend 'auto' takes '{taken[1]}' for 2 slices of 8 x 4 on cpu",
    ]
