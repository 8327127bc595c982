"""Triton kernels of the products around the factor: covariance, z, and the three of the backward.

One program makes one tile of one slice, so a few slices fill all multiprocessors. Shapes: x, z, g, dx (B, M, K);
mean, variance, mean_g (B, K); square matrices (B, K, K), all contiguous float32. W = L^-1 is lower triangular, U = L^T.
kernels/README.md has the mathematics. Products are float32 throughout ("ieee"): TF32 would break the factor.

TILE: columns (and rows of a square matrix) a program makes. ROWS: rows of a slice it takes, or goes through, at a time.
"""

import triton
import triton.language as tl


@triton.jit
def _lower_tile(number):
    """Number of a tile of the lower triangle, counted row by row -> its row and column, in tiles."""
    row = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)  # the root may be rounded either way
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    return row, number - row * (row + 1) // 2


@triton.jit
def _rows(x, first, columns, M, K, ROWS: tl.constexpr):
    """Rows first.. of a slice at the given columns -> (ROWS, columns), 0 outside, and the mask."""
    rows = first + tl.arange(0, ROWS)
    inside = (rows[:, None] < M) & (columns[None, :] < K)
    return tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0), inside


@triton.jit
def _column_mean(x, columns, M, K, ROWS: tl.constexpr, TILE: tl.constexpr):
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, M, ROWS):
        values, _ = _rows(x, first, columns, M, K, ROWS)
        total += tl.sum(values, axis=0)
    return total / M


@triton.jit
def _square(matrix, rows, columns, K):
    """Pointers and mask of a tile of a (K, K) matrix."""
    return matrix + rows[:, None] * K + columns[None, :], (rows[:, None] < K) & (columns[None, :] < K)


@triton.jit
def covariance(x, cov, mean, variance, M, K, ROWS: tl.constexpr, TILE: tl.constexpr):
    """cov = (x - mean)^T (x - mean) / (M - 1), its diagonal and the mean. Grid: (B, tiles of the lower triangle)."""
    b = tl.program_id(0).to(tl.int64)
    tile_row, tile_column = _lower_tile(tl.program_id(1))
    i, j = tile_row * TILE + tl.arange(0, TILE), tile_column * TILE + tl.arange(0, TILE)
    x += b * M * K
    mean_i, mean_j = _column_mean(x, i, M, K, ROWS, TILE), _column_mean(x, j, M, K, ROWS, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for first in range(0, M, ROWS):  # centred first: subtracting the means' product afterwards would cancel digits
        x_i, inside_i = _rows(x, first, i, M, K, ROWS)
        x_j, inside_j = _rows(x, first, j, M, K, ROWS)
        c_i = tl.where(inside_i, x_i - mean_i[None, :], 0.0)
        c_j = tl.where(inside_j, x_j - mean_j[None, :], 0.0)
        total += tl.dot(tl.trans(c_i), c_j, input_precision="ieee")
    total = total / (M - 1)
    at, inside = _square(cov + b * K * K, i, j, K)
    tl.store(at, total, mask=inside)
    if tile_row == tile_column:
        tl.store(mean + b * K + i, mean_i, mask=i < K)
        diagonal = tl.sum(tl.where(i[:, None] == j[None, :], total, 0.0), axis=1)
        tl.store(variance + b * K + i, diagonal, mask=i < K)
    else:
        at, inside = _square(cov + b * K * K, j, i, K)
        tl.store(at, tl.trans(total), mask=inside)


@triton.jit
def apply(x, mean, w, ok, z, M, K, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """z = (x - mean) W^T, 0 where the slice is not ok. Grid: (B, blocks of ROWS, tiles of columns)."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    n = tl.program_id(2) * TILE + tl.arange(0, TILE)
    x += b * M * K
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, tl.minimum(K, (tl.program_id(2) + 1) * TILE), DEPTH):  # W[n, j] = 0 for j > n
        j = start + tl.arange(0, DEPTH)
        x_j, inside = _rows(x, first, j, M, K, ROWS)
        mean_j = tl.load(mean + b * K + j, mask=j < K, other=0.0)
        at, within = _square(w + b * K * K, n, j, K)
        w_nj = tl.load(at, mask=within, other=0.0)
        total += tl.dot(tl.where(inside, x_j - mean_j[None, :], 0.0), tl.trans(w_nj), input_precision="ieee")
    rows = first + tl.arange(0, ROWS)
    kept = tl.where(tl.load(ok + b) != 0, total, 0.0)
    tl.store(z + b * M * K + rows[:, None] * K + n[None, :], kept, mask=(rows[:, None] < M) & (n[None, :] < K))


@triton.jit
def symmetric_triangle(g, z, h, mean_g, M, K, ROWS: tl.constexpr, TILE: tl.constexpr):
    """H = T + T^T, T the lower triangle of g^T z with half its diagonal; mean of g. Grid: (B, tiles of the triangle)."""
    b = tl.program_id(0).to(tl.int64)
    tile_row, tile_column = _lower_tile(tl.program_id(1))
    i, j = tile_row * TILE + tl.arange(0, TILE), tile_column * TILE + tl.arange(0, TILE)
    g += b * M * K
    z += b * M * K
    total = tl.zeros((TILE, TILE), tl.float32)
    sum_g = tl.zeros((TILE,), tl.float32)
    for first in range(0, M, ROWS):
        g_i, _ = _rows(g, first, i, M, K, ROWS)
        z_j, _ = _rows(z, first, j, M, K, ROWS)
        sum_g += tl.sum(g_i, axis=0)
        total += tl.dot(tl.trans(g_i), z_j, input_precision="ieee")
    at, inside = _square(h + b * K * K, i, j, K)
    if tile_row == tile_column:
        tl.store(at, tl.where(i[:, None] >= j[None, :], total, tl.trans(total)), mask=inside)
        tl.store(mean_g + b * K + i, sum_g / M, mask=i < K)
    else:
        tl.store(at, total, mask=inside)
        at, inside = _square(h + b * K * K, j, i, K)
        tl.store(at, tl.trans(total), mask=inside)


@triton.jit
def square_product(h, w, hw, trace, K, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """HW, and of each tile its share of trace(W^T H W) = sum of HW * W. Grid: (B, tiles, tiles)."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    n = tl.program_id(2) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(tl.program_id(2) * TILE, K, DEPTH):  # W[j, n] = 0 for j < n
        j = start + tl.arange(0, DEPTH)
        at, inside = _square(h + b * K * K, i, j, K)
        h_ij = tl.load(at, mask=inside, other=0.0)
        at, inside = _square(w + b * K * K, j, n, K)
        total += tl.dot(h_ij, tl.load(at, mask=inside, other=0.0), input_precision="ieee")
    at, inside = _square(hw + b * K * K, i, n, K)
    tl.store(at, total, mask=inside)
    at, inside = _square(w + b * K * K, i, n, K)
    share = tl.sum(tl.sum(total * tl.load(at, mask=inside, other=0.0), axis=1), axis=0)
    number = (b * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(trace + number, share)


@triton.jit
def gradient(
    g, mean_g, z, w, hw, u, trace, ok, dx, scale, eps_scale, M, K, num_shares,
    SHRINK: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """dx = (g - mean_g) W - z (scale HW + eps_scale trace U), 0 where the slice is not ok. Grid as that of `apply`.

    Taking the mean of g instead of that of dx is the same, since z has none, and needs no second pass.
    """
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    n = tl.program_id(2) * TILE + tl.arange(0, TILE)
    shrinkage = 0.0
    if SHRINK:
        shares = tl.arange(0, SHARES)
        shrinkage = eps_scale * tl.sum(
            tl.load(trace + b * num_shares + shares, mask=shares < num_shares, other=0.0), axis=0
        )
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, K, DEPTH):
        j = start + tl.arange(0, DEPTH)
        g_j, inside = _rows(g + b * M * K, first, j, M, K, ROWS)
        mean_j = tl.load(mean_g + b * K + j, mask=j < K, other=0.0)
        at, within = _square(w + b * K * K, j, n, K)
        w_jn = tl.load(at, mask=within, other=0.0)
        total += tl.dot(tl.where(inside, g_j - mean_j[None, :], 0.0), w_jn, input_precision="ieee")
        at, within = _square(hw + b * K * K, j, n, K)
        inner = scale * tl.load(at, mask=within, other=0.0)
        if SHRINK:
            at, within = _square(u + b * K * K, j, n, K)
            inner += shrinkage * tl.load(at, mask=within, other=0.0)
        z_j, _ = _rows(z + b * M * K, first, j, M, K, ROWS)
        total -= tl.dot(z_j, inner, input_precision="ieee")
    rows = first + tl.arange(0, ROWS)
    kept = tl.where(tl.load(ok + b) != 0, total, 0.0)
    tl.store(dx + b * M * K + rows[:, None] * K + n[None, :], kept, mask=(rows[:, None] < M) & (n[None, :] < K))
