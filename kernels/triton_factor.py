"""Triton kernel that factors the covariance of each slice and inverts the factor, in place and panel by panel.

A (K, K) = L L^T is eliminated panel by panel (PANEL rows) together with an identity matrix, which becomes W = L^-1. One K x K
array holds both: before panel p, the columns to the left of p hold what the identity has become so far, and the columns to the
right hold what is left of A (full and symmetric). The step of panel p, whose rows are R:

    factor A_pp = L_pp L_pp^T and invert: W_pp       column by column, in registers
    R <- W_pp R, with I in place of A_pp             one product; to the right of p this is U = L^T, to the left rows of W
    rows i below:  row_i <- row_i - U_pi^T R         one product each, with 0 in place of A_ip
    set R to zero to the right of p

All work except that on the PANEL x PANEL tiles consists of products of PANEL x K. (Factoring the whole matrix column by column
takes 13 times as long at K = 128.) There is one program for each slice. Its threads exchange rows through memory that stays in
the cache, with a barrier between writing and reading.
"""

import triton
import triton.language as tl


@triton.jit
def _factor_panel(a, PANEL: tl.constexpr):
    """Factor a (PANEL, PANEL), symmetric, = L L^T; return L^-1, L^T and the pivots L_jj^2.

    This is the same elimination in place, column by column: before step j the columns left of j hold rows of L^-1, the others
    what is left of a, and L^T remains above the diagonal. If a is not positive definite, a pivot is not positive (or NaN), and
    NaN follows.
    """
    index = tl.arange(0, PANEL)
    rows = index[:, None]
    columns = index[None, :]
    pivots = tl.zeros((PANEL,), tl.float32)
    for j in range(PANEL):
        # Registers cannot be indexed: row j, column j and the pivot are masked sums.
        column = tl.sum(tl.where(columns == j, a, 0.0), axis=1)
        row = tl.sum(tl.where(rows == j, a, 0.0), axis=0)
        pivot = tl.sum(tl.where(index == j, row, 0.0), axis=0)
        inverse_root = 1.0 / tl.sqrt_rn(pivot)
        # Scale row j, with 1 of the identity in place of the pivot, and subtract its multiples from the rows below.
        below = tl.where(index > j, column * inverse_root, 0.0)
        row = tl.where(index == j, 1.0, row) * inverse_root
        remaining = tl.where((columns == j) & (rows > j), 0.0, a)
        a = remaining - below[:, None] * row[None, :]
        a = tl.where(rows == j, row[None, :], a)
        pivots = tl.where(index == j, pivot, pivots)
    w = tl.where(rows >= columns, a, 0.0)
    diagonal = tl.where(rows == columns, tl.sqrt_rn(pivots)[:, None], 0.0)
    u = tl.where(rows < columns, a, diagonal)
    return w, u, pivots


@triton.jit
def _shrink(a, mean_variance, eps, K, PANEL: tl.constexpr, WIDTH: tl.constexpr):
    """Replace a by (1 - eps) a + eps mean_variance I, in place."""
    columns = tl.arange(0, WIDTH)[None, :]
    for first in range(0, K, PANEL):
        rows = first + tl.arange(0, PANEL)[:, None]
        at = a + rows * K + columns
        inside = (rows < K) & (columns < K)
        shrunk = (1.0 - eps) * tl.load(at, mask=inside, other=0.0)
        added = tl.where(rows == columns, eps * mean_variance, 0.0)
        tl.store(at, shrunk + added, mask=inside)
    tl.debug_barrier()


@triton.jit
def _eliminate(a, w_pp, first, K, PANEL: tl.constexpr, WIDTH: tl.constexpr):
    """Do the rest of a step after W_pp is known: update the panel's rows, which begin at `first`, and the rows below.

    Returns the panel's rows (PANEL, WIDTH), which hold rows of W and of U.
    """
    index = tl.arange(0, PANEL)
    rows = first + index[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    own = (columns >= first) & (columns < first + PANEL)
    at = a + rows * K + columns
    inside = (rows < K) & (columns < K)

    # R <- W_pp R, with I in place of A_pp
    identity = tl.where(rows == columns, 1.0, 0.0)
    strip = tl.where(own, identity, tl.load(at, mask=inside, other=0.0))
    strip = tl.dot(w_pp, strip, input_precision="ieee")
    tl.debug_barrier()  # all threads have read the rows
    tl.store(at, strip, mask=inside)
    tl.debug_barrier()

    # row_i <- row_i - U_pi^T R, with 0 in place of A_ip
    for below in range(first + PANEL, K, PANEL):
        i = below + index
        at_u = a + rows * K + i[None, :]
        u_pi = tl.load(at_u, mask=(rows < K) & (i[None, :] < K), other=0.0)
        at_i = a + i[:, None] * K + columns
        inside_i = (i[:, None] < K) & (columns < K)
        row_i = tl.where(own, 0.0, tl.load(at_i, mask=inside_i, other=0.0))
        product = tl.dot(tl.trans(u_pi), strip, input_precision="ieee")
        tl.store(at_i, row_i - product, mask=inside_i)
    tl.debug_barrier()

    # set R to zero to the right of the panel
    zeros = tl.zeros((PANEL, WIDTH), tl.float32)
    tl.store(at, zeros, mask=inside & (columns >= first + PANEL))
    tl.debug_barrier()
    return strip


@triton.jit
def factor(
    a,  # (B, K, K), covariances; replaced by W
    mean,  # (B, K)
    variance,  # (B, K)
    u,  # (B, K, K), written if SHRINK: L^T
    ok,  # (B,), written
    min_pivot,  # (B,), written
    eps,
    resolution,
    input_noise,
    K,
    SHRINK: tl.constexpr,
    PANEL: tl.constexpr,
    WIDTH: tl.constexpr,  # power of 2, at least K
):
    """Factor the covariances and replace them by W in place; judge the pivots. Grid: (B,).

    If a slice is not ok, its W is undefined. A pivot counts as sound if it exceeds
    resolution * variance + input_noise * mean^2, see `whitening_reference.judge_factor`.
    """
    b = tl.program_id(0).to(tl.int64)
    a += b * K * K
    u += b * K * K
    mean += b * K
    variance += b * K
    wide = tl.arange(0, WIDTH)
    variances = tl.load(variance + wide, mask=wide < K, other=0.0)
    mean_variance = tl.sum(variances, axis=0) / K
    if SHRINK:
        _shrink(a, mean_variance, eps, K, PANEL, WIDTH)
    index = tl.arange(0, PANEL)
    sound = 1
    smallest = float("inf")
    for first in range(0, K, PANEL):
        i = first + index
        # Factor the diagonal tile; beyond K it is padded with the identity.
        inside = (i[:, None] < K) & (i[None, :] < K)
        padding = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        at_pp = i[:, None] * K + i[None, :]
        a_pp = tl.where(inside, tl.load(a + at_pp, mask=inside, other=0.0), padding)
        w_pp, u_pp, pivots = _factor_panel(a_pp, PANEL)

        # Compare the pivots with the rounding noise of their columns. A comparison with NaN is false.
        stored_variance = tl.load(variance + i, mask=i < K, other=0.0)
        own_variance = (1.0 - eps) * stored_variance + eps * mean_variance
        own_mean = tl.load(mean + i, mask=i < K, other=0.0)
        noise = resolution * own_variance + input_noise * own_mean * own_mean
        is_sound = tl.where((i >= K) | (pivots > noise), 1, 0)
        sound = tl.minimum(sound, tl.min(is_sound, axis=0))
        own_pivots = tl.where(i < K, pivots, float("inf"))
        smallest = tl.minimum(smallest, tl.min(own_pivots, axis=0))

        strip = _eliminate(a, w_pp, first, K, PANEL, WIDTH)
        if SHRINK:
            right = tl.where(wide[None, :] >= first + PANEL, strip, 0.0)
            at_strip = i[:, None] * K + wide[None, :]
            tl.store(u + at_strip, right, mask=(i[:, None] < K) & (wide[None, :] < K))
            tl.debug_barrier()  # the diagonal tile overwrites some of these zeros
            tl.store(u + at_pp, u_pp, mask=inside)
    tl.store(ok + b, sound)
    tl.store(min_pivot + b, tl.where(sound == 1, smallest / mean_variance, 0.0))
