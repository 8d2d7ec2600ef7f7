"""Rotary positions in Triton: a program rotates some heads of one position and reads and writes each number once.

Both halves are loaded before either is stored, so y may be x: q and k are rotated in place.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import dependent, start_next, wait_for_previous
from ..gpu import ceil_div, launch, padded
from ..scratch import Scratch, Shapes, TensorLike

TILE, WARPS = 1024, 4  # TILE: elements of a half per program


@triton.jit
def _rotate_kernel(
    x, cos, sin, positions,
    y,
    x_b, x_t, x_h, x_d, y_b, y_t, y_h, y_d, cos_t, cos_i, sin_t, sin_i, T, H, sign,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    n = tl.program_id(0).to(tl.int64)
    b, t = n // T, n % T
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    i = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < H) & (i < HALF)

    at_x = x + b * x_b + t * x_t + h * x_h + i * x_d
    x1 = tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(at_x + HALF * x_d, mask=inside, other=0.0).to(tl.float32)
    p = t
    if positions is not None:
        p = tl.load(positions + n)
    c = tl.load(cos + p * cos_t + i * cos_i, mask=i < HALF, other=0.0)
    s = tl.load(sin + p * sin_t + i * sin_i, mask=i < HALF, other=0.0) * sign

    at_y = y + b * y_b + t * y_t + h * y_h + i * y_d
    tl.store(at_y, (x1 * c - x2 * s).to(y.dtype.element_ty), mask=inside)
    tl.store(at_y + HALF * y_d, (x2 * c + x1 * s).to(y.dtype.element_ty), mask=inside)


def workspace(x: TensorLike, *, packed: bool = False) -> Shapes:
    return {}


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, sign: float, *, y: Tensor, scratch: Scratch
) -> None:
    b, t, h, d = x.shape
    block_d = padded(d // 2)
    block_h = min(padded(h), max(1, TILE // block_d))
    grid, strides = (b * t, ceil_div(h, block_h)), (*x.stride(), *y.stride(), *cos.stride(), *sin.stride())
    constants = {"HALF": d // 2, "BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": WARPS}
    constants |= dependent(x, b * t)
    launch(_rotate_kernel, grid, x, cos, sin, positions, y, *strides, t, h, sign, **constants)
