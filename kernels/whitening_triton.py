"""Whitening of all slices at once by six Triton kernels, three for each direction, on NVIDIA GPUs or, in tests, interpreted.

    x --covariance--> A, mean --factor--> W, ok --apply--> z          (kernels/triton_products.py, kernels/triton_factor.py)
    grad_z --symmetric_triangle--> H --square_product--> HW --gradient--> grad_x

Shapes: x, z, grad_z, grad_x (B, M, k); A, W, H (B, k, k); all float32. The host never waits for the device and never reads a
value from it, so a CUDA graph can capture all of this.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels import triton_factor, triton_products
from kernels.whitening_reference import noise_coefficients


class _Tiles(NamedTuple):
    """Sizes of tiles for one embedding size; tl.dot needs at least 16 in each dimension."""

    tile: int  # columns that a program computes
    rows: int  # rows of a slice that a program computes
    depth: int  # length of a product's inner dimension that a program reads at a time
    panel: int  # rows that the factor eliminates at a time
    width: int  # power of 2 that holds a row of a square matrix
    factor_warps: int  # warps of a program of the factor


def _tiles(size: int) -> _Tiles:
    """Return the largest tiles with which no kernel spills registers on sm_90 (according to ptxas)."""
    # A power of 2 that holds a row, as tl.arange requires.
    width = max(16, triton.next_power_of_2(size))
    return _Tiles(
        tile=min(width, 32),
        rows=32,
        depth=16,
        panel=32 if 32 <= width <= 128 else 16,
        width=width,
        factor_warps=4 if width <= 32 else 8,
    )


def forward(
    x: Tensor, eps: float, cholesky_float64: bool, factor_warps: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Whiten x (B, M, k) float32; return z (B, M, k), W (B, k, k), U, ok (B,), min_pivot (B,).

    U = L^T (B, k, k) if eps > 0, otherwise it is empty. factor_warps: warps of a program of the factor; 0: as `_tiles` says.
    Raises ValueError for float64, which the kernels do not support.
    """
    if x.dtype != torch.float32 or cholesky_float64:
        raise ValueError("the triton backend whitens in float32 only; use backend='torch' for float64")
    batch, num_rows, size = x.shape
    x = x.contiguous()
    t = _tiles(size)
    # Allocate the results; the kernels fill them.
    z = torch.empty_like(x)
    mean, variance = x.new_empty(2, batch, size)
    w = x.new_empty(batch, size, size)
    u = torch.empty_like(w) if eps > 0 else x.new_empty(0)
    ok = x.new_empty(batch, dtype=torch.bool)
    ok_bytes = ok.view(torch.uint8)  # the kernels read and write bytes
    min_pivot = x.new_empty(batch)
    resolution, input_noise = noise_coefficients(torch.float32, torch.float32)

    # `w` holds the covariance first; the factor replaces it by W.
    tiles = triton.cdiv(size, t.tile)
    lower_tiles = tiles * (tiles + 1) // 2
    triton_products.covariance[(batch, lower_tiles)](x, w, mean, variance, num_rows, size, ROWS=t.rows, TILE=t.tile)
    triton_factor.factor[(batch,)](
        w,
        mean,
        variance,
        u,
        ok_bytes,
        min_pivot,
        eps,
        resolution,
        input_noise,
        size,
        SHRINK=eps > 0,
        PANEL=t.panel,
        WIDTH=t.width,
        num_warps=factor_warps or t.factor_warps,
        num_stages=1,
    )
    row_blocks = triton.cdiv(num_rows, t.rows)
    triton_products.apply[(batch, row_blocks, tiles)](
        x, mean, w, ok_bytes, z, num_rows, size, ROWS=t.rows, TILE=t.tile, DEPTH=t.depth
    )
    return z, w, u, ok, min_pivot


def backward(grad_z: Tensor, z: Tensor, w: Tensor, u: Tensor, ok: Tensor, eps: float) -> Tensor:
    """Return the gradient at x (B, M, k), given that at z and what `forward` returned; kernels/README.md derives it."""
    batch, num_rows, size = z.shape
    grad_z = grad_z.contiguous()
    t = _tiles(size)
    tiles = triton.cdiv(size, t.tile)
    lower_tiles = tiles * (tiles + 1) // 2
    row_blocks = triton.cdiv(num_rows, t.rows)
    grad_x = torch.empty_like(z)
    mean_g = z.new_empty(batch, size)
    h = torch.empty_like(w)
    hw = torch.empty_like(w)
    num_shares = tiles * tiles  # each tile of HW contributes a share of the trace
    trace = z.new_empty(batch, num_shares)

    triton_products.symmetric_triangle[(batch, lower_tiles)](
        grad_z, z, h, mean_g, num_rows, size, ROWS=t.rows, TILE=t.tile
    )
    triton_products.square_product[(batch, tiles, tiles)](h, w, hw, trace, size, TILE=t.tile, DEPTH=t.depth)
    # Factors of the two terms that flow through the covariance.
    scale = (1 - eps) / (num_rows - 1)
    eps_scale = eps / (size * (num_rows - 1))
    triton_products.gradient[(batch, row_blocks, tiles)](
        grad_z,
        mean_g,
        z,
        w,
        hw,
        u,
        trace,
        ok.view(torch.uint8),
        grad_x,
        scale,
        eps_scale,
        num_rows,
        size,
        num_shares,
        SHRINK=eps > 0,
        SHARES=triton.next_power_of_2(num_shares),
        ROWS=t.rows,
        TILE=t.tile,
        DEPTH=t.depth,
    )
    return grad_x
