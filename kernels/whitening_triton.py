"""All slices at once by six Triton kernels, three forward and three backward. NVIDIA GPUs; the interpreter in tests.

    x --covariance--> A, mean --factor--> W, ok --apply--> z          (kernels/triton_products.py, kernels/triton_factor.py)
    grad_z --symmetric_triangle--> H --square_product--> HW --gradient--> grad_x

Shapes: x, z, grad_z, grad_x (B, M, k); A, W, H (B, k, k); all float32. Nothing waits for the device or depends on a value
on it, so CUDA graphs capture it.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels import triton_factor, triton_products
from kernels.whitening_reference import noise_coefficients


class _Tiles(NamedTuple):
    """Sizes of tiles for one embedding size; tl.dot wants 16 or more of each."""

    tile: int  # columns a program makes
    rows: int  # rows of a slice it takes
    depth: int  # of a product's inner dimension at a time
    panel: int  # rows that the factor eliminates at a time
    width: int  # power of 2 that holds a row of a square matrix
    factor_warps: int


def _tiles(size: int) -> _Tiles:
    """Chosen so that no kernel spills registers on sm_90 (ptxas): larger tiles do."""
    width = max(16, triton.next_power_of_2(size))
    return _Tiles(
        tile=min(width, 32),
        rows=32,
        depth=16,
        panel=32 if 32 <= width <= 128 else 16,
        width=width,
        factor_warps=4 if width <= 32 else 8,
    )


def forward(x: Tensor, eps: float, cholesky_float64: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x (B, M, k) float32 -> z, W (B, k, k), U = L^T (B, k, k) if eps > 0 else empty, ok (B,), min_pivot (B,).

    Raises ValueError for float64, which these kernels do not have.
    """
    if x.dtype != torch.float32 or cholesky_float64:
        raise ValueError("the triton backend whitens in float32 only; take backend='torch' for float64")
    batch, num_rows, size = x.shape
    x = x.contiguous()
    t = _tiles(size)
    z = torch.empty_like(x)
    mean, variance = x.new_empty(2, batch, size)
    w = x.new_empty(batch, size, size)
    u = torch.empty_like(w) if eps > 0 else x.new_empty(0)
    ok, min_pivot = x.new_empty(batch, dtype=torch.bool), x.new_empty(batch)
    ok_bytes = ok.view(torch.uint8)
    resolution, input_noise = noise_coefficients(torch.float32, torch.float32)

    tiles = triton.cdiv(size, t.tile)
    triton_products.covariance[(batch, tiles * (tiles + 1) // 2)](
        x, w, mean, variance, num_rows, size, ROWS=t.rows, TILE=t.tile
    )
    triton_factor.factor[(batch,)](
        w, mean, variance, u, ok_bytes, min_pivot, eps, resolution, input_noise, size,
        SHRINK=eps > 0, PANEL=t.panel, WIDTH=t.width, num_warps=t.factor_warps, num_stages=1,
    )  # fmt: skip
    triton_products.apply[(batch, triton.cdiv(num_rows, t.rows), tiles)](
        x, mean, w, ok_bytes, z, num_rows, size, ROWS=t.rows, TILE=t.tile, DEPTH=t.depth
    )
    return z, w, u, ok, min_pivot


def backward(grad_z: Tensor, z: Tensor, w: Tensor, u: Tensor, ok: Tensor, eps: float) -> Tensor:
    """Gradient at x (B, M, k) from that at z and what `forward` returned; kernels/README.md derives it."""
    batch, num_rows, size = z.shape
    grad_z = grad_z.contiguous()
    t = _tiles(size)
    tiles = triton.cdiv(size, t.tile)
    grad_x = torch.empty_like(z)
    mean_g = z.new_empty(batch, size)
    h, hw = torch.empty_like(w), torch.empty_like(w)
    trace = z.new_empty(batch, tiles * tiles)

    triton_products.symmetric_triangle[(batch, tiles * (tiles + 1) // 2)](
        grad_z, z, h, mean_g, num_rows, size, ROWS=t.rows, TILE=t.tile
    )
    triton_products.square_product[(batch, tiles, tiles)](h, w, hw, trace, size, TILE=t.tile, DEPTH=t.depth)
    triton_products.gradient[(batch, triton.cdiv(num_rows, t.rows), tiles)](
        grad_z, mean_g, z, w, hw, u, trace, ok.view(torch.uint8), grad_x,
        (1 - eps) / (num_rows - 1), eps / (size * (num_rows - 1)), num_rows, size, tiles * tiles,
        SHRINK=eps > 0, SHARES=triton.next_power_of_2(tiles * tiles), ROWS=t.rows, TILE=t.tile, DEPTH=t.depth,
    )  # fmt: skip
    return grad_x
