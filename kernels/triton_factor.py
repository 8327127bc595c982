"""Triton kernel that factors and inverts the covariance of each slice, in place and in panels.

A (K, K) = L L^T is eliminated panel by panel (PANEL rows) together with an identity that becomes W = L^-1. One K x K
array holds both: before panel p the columns left of it hold what the identity has become, those right of it what is
left of A (full and symmetric). One step of panel p, R being its rows:

    factor A_pp = L_pp L_pp^T, invert: W_pp          column by column, in registers
    R <- W_pp R, with I in place of A_pp             one product; right of p this is U = L^T, left of it rows of W
    rows i below:  row_i <- row_i - U_pi^T R         one product each, with 0 in place of A_ip
    zero R right of p

So all but PANEL x PANEL tiles is done by products of PANEL x K (a column-by-column factor of the whole matrix takes
13 times as long at K = 128). One program a slice; it passes rows on through memory that stays in the
cache, with a barrier between writing and reading.
"""

import triton
import triton.language as tl


@triton.jit
def _factor_panel(a, PANEL: tl.constexpr):
    """a (PANEL, PANEL) symmetric = L L^T -> L^-1, L^T and the pivots L_jj^2.

    The same elimination column by column, in place too: before step j the columns left of j hold rows of L^-1, the others
    what is left of a, and above the diagonal L^T stays. Where a is not positive definite the pivot is not positive (or
    NaN), and NaN follows.
    """
    index = tl.arange(0, PANEL)
    rows, columns = index[:, None], index[None, :]
    pivots = tl.zeros((PANEL,), tl.float32)
    for j in range(PANEL):
        column = tl.sum(tl.where(columns == j, a, 0.0), axis=1)
        row = tl.sum(tl.where(rows == j, a, 0.0), axis=0)
        pivot = tl.sum(tl.where(index == j, row, 0.0), axis=0)
        inverse_root = 1.0 / tl.sqrt_rn(pivot)
        below = tl.where(index > j, column * inverse_root, 0.0)
        row = tl.where(index == j, 1.0, row) * inverse_root
        a = tl.where((columns == j) & (rows > j), 0.0, a) - below[:, None] * row[None, :]
        a = tl.where(rows == j, row[None, :], a)
        pivots = tl.where(index == j, pivot, pivots)
    w = tl.where(rows >= columns, a, 0.0)
    u = tl.where(rows < columns, a, tl.where(rows == columns, tl.sqrt_rn(pivots)[:, None], 0.0))
    return w, u, pivots


@triton.jit
def _shrink(a, mean_variance, eps, K, PANEL: tl.constexpr, WIDTH: tl.constexpr):
    """a <- (1 - eps) a + eps mean_variance I, in place."""
    columns = tl.arange(0, WIDTH)[None, :]
    for first in range(0, K, PANEL):
        rows = first + tl.arange(0, PANEL)[:, None]
        at, inside = a + rows * K + columns, (rows < K) & (columns < K)
        shrunk = (1.0 - eps) * tl.load(at, mask=inside, other=0.0)
        tl.store(at, shrunk + tl.where(rows == columns, eps * mean_variance, 0.0), mask=inside)
    tl.debug_barrier()


@triton.jit
def _eliminate(a, w_pp, first, K, PANEL: tl.constexpr, WIDTH: tl.constexpr):
    """One step but for its factor: rows first.. become rows of W and U, those below are updated -> the rows."""
    index = tl.arange(0, PANEL)
    rows, columns = first + index[:, None], tl.arange(0, WIDTH)[None, :]
    own = (columns >= first) & (columns < first + PANEL)
    at, inside = a + rows * K + columns, (rows < K) & (columns < K)
    strip = tl.where(own, tl.where(rows == columns, 1.0, 0.0), tl.load(at, mask=inside, other=0.0))
    strip = tl.dot(w_pp, strip, input_precision="ieee")
    tl.debug_barrier()  # all threads have read the rows
    tl.store(at, strip, mask=inside)
    tl.debug_barrier()
    for below in range(first + PANEL, K, PANEL):
        i = below + index
        u_pi = tl.load(a + rows * K + i[None, :], mask=(rows < K) & (i[None, :] < K), other=0.0)
        at_i, inside_i = a + i[:, None] * K + columns, (i[:, None] < K) & (columns < K)
        row_i = tl.where(own, 0.0, tl.load(at_i, mask=inside_i, other=0.0))
        tl.store(at_i, row_i - tl.dot(tl.trans(u_pi), strip, input_precision="ieee"), mask=inside_i)
    tl.debug_barrier()
    tl.store(at, tl.zeros((PANEL, WIDTH), tl.float32), mask=inside & (columns >= first + PANEL))
    tl.debug_barrier()
    return strip


@triton.jit
def factor(
    a, mean, variance, u, ok, min_pivot, eps, resolution, input_noise, K,
    SHRINK: tl.constexpr, PANEL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """a: covariances (B, K, K) -> W in place, anything where not ok; u (B, K, K) = L^T where SHRINK; ok, min_pivot (B,).

    mean, variance: (B, K). A pivot counts as sound above resolution * variance + input_noise * mean^2, see
    `whitening_reference.judge_factor`. WIDTH: power of 2, K or more. Grid: (B,).
    """
    b = tl.program_id(0).to(tl.int64)
    a += b * K * K
    u += b * K * K
    wide = tl.arange(0, WIDTH)
    mean_variance = tl.sum(tl.load(variance + b * K + wide, mask=wide < K, other=0.0), axis=0) / K
    if SHRINK:
        _shrink(a, mean_variance, eps, K, PANEL, WIDTH)
    index = tl.arange(0, PANEL)
    sound = 1
    smallest = float("inf")
    for first in range(0, K, PANEL):
        i = first + index
        inside = (i[:, None] < K) & (i[None, :] < K)
        padded = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        a_pp = tl.where(inside, tl.load(a + i[:, None] * K + i[None, :], mask=inside, other=0.0), padded)
        w_pp, u_pp, pivots = _factor_panel(a_pp, PANEL)
        own_variance = (1.0 - eps) * tl.load(variance + b * K + i, mask=i < K, other=0.0) + eps * mean_variance
        own_mean = tl.load(mean + b * K + i, mask=i < K, other=0.0)
        noise = resolution * own_variance + input_noise * own_mean * own_mean
        sound = tl.minimum(sound, tl.min(tl.where((i >= K) | (pivots > noise), 1, 0), axis=0))
        smallest = tl.minimum(smallest, tl.min(tl.where(i < K, pivots, float("inf")), axis=0))
        strip = _eliminate(a, w_pp, first, K, PANEL, WIDTH)
        if SHRINK:
            right = tl.where(wide[None, :] >= first + PANEL, strip, 0.0)
            tl.store(u + i[:, None] * K + wide[None, :], right, mask=(i[:, None] < K) & (wide[None, :] < K))
            tl.debug_barrier()  # the diagonal tile comes over these zeros
            tl.store(u + i[:, None] * K + i[None, :], u_pp, mask=inside)
    tl.store(ok + b, sound)
    tl.store(min_pivot + b, tl.where(sound == 1, smallest / mean_variance, 0.0))
