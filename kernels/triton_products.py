"""Triton kernels of the products before and after the factorisation: covariance, z, and the three products of the backward.

Each program computes one tile of one slice, so even a few slices occupy all multiprocessors. Shapes: x, z, g, dx (B, M, K);
mean, variance, mean_g (B, K); square matrices (B, K, K), all contiguous float32. W = L^-1 is lower triangular, U = L^T.
kernels/README.md has the mathematics. All products are in float32 ("ieee"), because TF32 would break the factor.

TILE: columns (and rows of a square matrix) that a program computes. ROWS: rows of a slice that it computes or reads at a time.
DEPTH: length of the inner dimension of a product that it reads at a time.
"""

import triton
import triton.language as tl


@triton.jit
def _lower_tile(number):
    """Return row and column, in tiles, of a tile of the lower triangle; the tiles are numbered row by row."""
    root = tl.sqrt(8.0 * number.to(tl.float32) + 1.0)
    row = ((root - 1.0) * 0.5).to(tl.int32)
    # The root may be rounded up or down, so correct the row by one.
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    first_of_row = row * (row + 1) // 2
    return row, number - first_of_row


@triton.jit
def _rows(x, first, columns, M, K, ROWS: tl.constexpr):
    """Load rows first, first + 1, ... of a slice at the given columns; return (ROWS, columns), 0 outside, and the mask."""
    rows = first + tl.arange(0, ROWS)
    inside = (rows[:, None] < M) & (columns[None, :] < K)
    at = x + rows[:, None] * K + columns[None, :]
    return tl.load(at, mask=inside, other=0.0), inside


@triton.jit
def _centred_rows(x, mean, first, columns, M, K, ROWS: tl.constexpr):
    """Load rows as `_rows` does and subtract `mean` (columns,) from them; 0 outside."""
    values, inside = _rows(x, first, columns, M, K, ROWS)
    return tl.where(inside, values - mean[None, :], 0.0)


@triton.jit
def _column_mean(x, columns, M, K, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Return the mean of each of the given columns of a slice, (TILE,)."""
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, M, ROWS):
        values, _ = _rows(x, first, columns, M, K, ROWS)
        total += tl.sum(values, axis=0)
    return total / M


@triton.jit
def _square(matrix, rows, columns, K):
    """Return pointers and mask of a tile of a (K, K) matrix."""
    at = matrix + rows[:, None] * K + columns[None, :]
    inside = (rows[:, None] < K) & (columns[None, :] < K)
    return at, inside


@triton.jit
def _load_square(matrix, rows, columns, K):
    """Load a tile of a (K, K) matrix, 0 outside."""
    at, inside = _square(matrix, rows, columns, K)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _store_square(matrix, rows, columns, values, K):
    """Store a tile of a (K, K) matrix."""
    at, inside = _square(matrix, rows, columns, K)
    tl.store(at, values, mask=inside)


@triton.jit
def _store_rows(x, first, columns, values, ok, M, K, ROWS: tl.constexpr):
    """Store rows first, first + 1, ... of a slice at the given columns, or 0 if the slice is not ok."""
    rows = first + tl.arange(0, ROWS)
    kept = tl.where(tl.load(ok) != 0, values, 0.0)
    at = x + rows[:, None] * K + columns[None, :]
    inside = (rows[:, None] < M) & (columns[None, :] < K)
    tl.store(at, kept, mask=inside)


@triton.jit
def covariance(
    x,  # (B, M, K)
    cov,  # (B, K, K), written
    mean,  # (B, K), written
    variance,  # (B, K), written
    M,
    K,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute cov = (x - mean)^T (x - mean) / (M - 1), its diagonal and the mean. Grid: (B, tiles of the lower triangle)."""
    b = tl.program_id(0).to(tl.int64)
    tile_row, tile_column = _lower_tile(tl.program_id(1))
    i = tile_row * TILE + tl.arange(0, TILE)
    j = tile_column * TILE + tl.arange(0, TILE)
    x += b * M * K
    mean_i = _column_mean(x, i, M, K, ROWS, TILE)
    mean_j = _column_mean(x, j, M, K, ROWS, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    # Centre the rows first: subtracting the product of the means afterwards would cancel digits.
    for first in range(0, M, ROWS):
        c_i = _centred_rows(x, mean_i, first, i, M, K, ROWS)
        c_j = _centred_rows(x, mean_j, first, j, M, K, ROWS)
        total += tl.dot(tl.trans(c_i), c_j, input_precision="ieee")
    # the unbiased estimate
    total = total / (M - 1)
    _store_square(cov + b * K * K, i, j, total, K)
    if tile_row == tile_column:
        # The tiles on the diagonal also write the mean and the variance of their columns.
        tl.store(mean + b * K + i, mean_i, mask=i < K)
        diagonal = tl.sum(tl.where(i[:, None] == j[None, :], total, 0.0), axis=1)
        tl.store(variance + b * K + i, diagonal, mask=i < K)
    else:
        # The other tiles also write their mirror image in the upper triangle.
        _store_square(cov + b * K * K, j, i, tl.trans(total), K)


@triton.jit
def apply(
    x,  # (B, M, K)
    mean,  # (B, K)
    w,  # (B, K, K), lower triangular
    ok,  # (B,)
    z,  # (B, M, K), written
    M,
    K,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute z = (x - mean) W^T, or 0 if the slice is not ok. Grid: (B, blocks of ROWS, tiles of columns)."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    tile = tl.program_id(2)
    n = tile * TILE + tl.arange(0, TILE)
    x += b * M * K
    w += b * K * K
    total = tl.zeros((ROWS, TILE), tl.float32)
    # W is lower triangular, W[n, j] = 0 for j > n, so the sum ends at the tile's last column.
    end = tl.minimum(K, (tile + 1) * TILE)
    for start in range(0, end, DEPTH):
        j = start + tl.arange(0, DEPTH)
        mean_j = tl.load(mean + b * K + j, mask=j < K, other=0.0)
        c_j = _centred_rows(x, mean_j, first, j, M, K, ROWS)
        w_nj = _load_square(w, n, j, K)
        total += tl.dot(c_j, tl.trans(w_nj), input_precision="ieee")
    _store_rows(z + b * M * K, first, n, total, ok + b, M, K, ROWS)


@triton.jit
def symmetric_triangle(
    g,  # (B, M, K), gradient at z
    z,  # (B, M, K)
    h,  # (B, K, K), written
    mean_g,  # (B, K), written
    M,
    K,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute H = T + T^T and the mean of g. Grid: (B, tiles of the lower triangle).

    T is the lower triangle of g^T z with half its diagonal.
    """
    b = tl.program_id(0).to(tl.int64)
    tile_row, tile_column = _lower_tile(tl.program_id(1))
    i = tile_row * TILE + tl.arange(0, TILE)
    j = tile_column * TILE + tl.arange(0, TILE)
    g += b * M * K
    z += b * M * K
    h += b * K * K
    total = tl.zeros((TILE, TILE), tl.float32)
    sum_g = tl.zeros((TILE,), tl.float32)
    for first in range(0, M, ROWS):
        g_i, _ = _rows(g, first, i, M, K, ROWS)
        z_j, _ = _rows(z, first, j, M, K, ROWS)
        sum_g += tl.sum(g_i, axis=0)
        total += tl.dot(tl.trans(g_i), z_j, input_precision="ieee")
    if tile_row == tile_column:
        # Mirror the lower half of the tile; twice half the diagonal is the diagonal.
        is_lower = i[:, None] >= j[None, :]
        _store_square(h, i, j, tl.where(is_lower, total, tl.trans(total)), K)
        tl.store(mean_g + b * K + i, sum_g / M, mask=i < K)
    else:
        _store_square(h, i, j, total, K)
        _store_square(h, j, i, tl.trans(total), K)


@triton.jit
def square_product(
    h,  # (B, K, K), symmetric
    w,  # (B, K, K), lower triangular
    hw,  # (B, K, K), written
    trace,  # (B, tiles * tiles), written: the share of each tile
    K,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute HW and, for each tile, its share of trace(W^T H W) = sum of HW * W. Grid: (B, tiles, tiles)."""
    b = tl.program_id(0).to(tl.int64)
    tile_row = tl.program_id(1)
    tile_column = tl.program_id(2)
    i = tile_row * TILE + tl.arange(0, TILE)
    n = tile_column * TILE + tl.arange(0, TILE)
    h += b * K * K
    w += b * K * K
    total = tl.zeros((TILE, TILE), tl.float32)
    # W is lower triangular, W[j, n] = 0 for j < n, so the sum begins at the tile's first column.
    for start in range(tile_column * TILE, K, DEPTH):
        j = start + tl.arange(0, DEPTH)
        h_ij = _load_square(h, i, j, K)
        w_jn = _load_square(w, j, n, K)
        total += tl.dot(h_ij, w_jn, input_precision="ieee")
    _store_square(hw + b * K * K, i, n, total, K)
    w_in = _load_square(w, i, n, K)
    # The trace of W^T H W is the sum of the elementwise product of HW and W.
    share = tl.sum(tl.sum(total * w_in, axis=1), axis=0)
    number = (b * tl.num_programs(1) + tile_row) * tl.num_programs(2) + tile_column
    tl.store(trace + number, share)


@triton.jit
def gradient(
    g,  # (B, M, K), gradient at z
    mean_g,  # (B, K)
    z,  # (B, M, K)
    w,  # (B, K, K), lower triangular
    hw,  # (B, K, K)
    u,  # (B, K, K), upper triangular; read only if SHRINK
    trace,  # (B, num_shares); read only if SHRINK
    ok,  # (B,)
    dx,  # (B, M, K), written
    scale,
    eps_scale,
    M,
    K,
    num_shares,
    SHRINK: tl.constexpr,
    SHARES: tl.constexpr,  # power of 2, at least num_shares
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute dx = (g - mean_g) W - z (scale HW + eps_scale trace U), or 0 if the slice is not ok. Grid as in `apply`.

    Subtracting the mean of g gives the same result as subtracting that of dx, because z has zero mean, and it needs no second
    pass over dx.
    """
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    n = tl.program_id(2) * TILE + tl.arange(0, TILE)
    g += b * M * K
    z += b * M * K
    w += b * K * K
    hw += b * K * K
    # The trace is the sum of the shares that the tiles of `square_product` wrote.
    shrinkage = 0.0
    if SHRINK:
        share = tl.arange(0, SHARES)
        shares = tl.load(trace + b * num_shares + share, mask=share < num_shares, other=0.0)
        shrinkage = eps_scale * tl.sum(shares, axis=0)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, K, DEPTH):
        j = start + tl.arange(0, DEPTH)
        # the direct part, (g - mean_g) W
        mean_j = tl.load(mean_g + b * K + j, mask=j < K, other=0.0)
        g_j = _centred_rows(g, mean_j, first, j, M, K, ROWS)
        w_jn = _load_square(w, j, n, K)
        total += tl.dot(g_j, w_jn, input_precision="ieee")
        # the part through the covariance, z (...)
        inner = scale * _load_square(hw, j, n, K)
        if SHRINK:
            inner += shrinkage * _load_square(u + b * K * K, j, n, K)
        z_j, _ = _rows(z, first, j, M, K, ROWS)
        total -= tl.dot(z_j, inner, input_precision="ieee")
    _store_rows(dx + b * M * K, first, n, total, ok + b, M, K, ROWS)
