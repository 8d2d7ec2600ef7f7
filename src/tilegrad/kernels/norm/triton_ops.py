"""Norms in Triton: one pass over rows forward, one backward.       x, f, x1, y, dy, dx (N, C)   partials (3, P, C)

    forward    one program per tile of rows
    backward   P programs; program p has the row tiles p, p + P, p + 2P, …: it adds to dx, writes y, and writes
               partials[:, p] = Σ dy ∘ x̂, Σ dy, Σ dx of its rows, if requested; then dw, db, dx_sum (+)= Σ_p partials

A whole row is in registers, in float32. Only x1, y and dx are rounded; sums and norms use the rounded numbers. Sums have a
fixed order, so the bits are the same each time. With STAGES > 1 the backward prefetches tiles (cp.async). The backward
spills some registers with 16384 columns, and four with 1024 columns if y is written. With other sizes it spills none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..column_sum.triton_ops import add_partials
from ..dependent_launch import dependent, start_next, wait_for_previous
from ..gpu import ceil_div, launch, multiprocessors, padded
from ..scratch import Scratch, Shapes, TensorLike

if TYPE_CHECKING:
    from . import Gradients, Outputs, Statistics


class Tile(NamedTuple):
    rows: int
    warps: int
    stages: int = 1
    programs: int = 0  # per multiprocessor, if programs loop over tiles


# the key is the number of columns of a padded row; the first key that is large enough applies
FORWARD = {
    16: Tile(128, 4),
    64: Tile(32, 4),
    256: Tile(8, 4),
    1024: Tile(4, 4),
    2048: Tile(2, 4),
    4096: Tile(1, 4),
    8192: Tile(1, 8),
    16384: Tile(1, 16),
}
BACKWARD = {
    16: Tile(32, 1, 3, 8),
    64: Tile(8, 1, 3, 8),
    256: Tile(4, 1, 3, 8),
    1024: Tile(1, 1, 3, 8),
    2048: Tile(1, 4, 3, 4),
    4096: Tile(1, 4, 1, 2),
    8192: Tile(1, 8, 1, 1),
    16384: Tile(1, 16, 1, 1),
}


@triton.jit
def _norm_fwd_kernel(
    x, f, w, b, x1, y, mean, rstd, x_n, f_n, x1_n, y_n, n, eps,
    C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_C)
    inside = (rows < n)[:, None] & (columns < C)[None, :]
    steps = rows.to(tl.int64)[:, None]

    centred = tl.load(x + steps * x_n + columns[None, :], inside, 0.0).to(tl.float32)
    if f is not None:
        centred += tl.load(f + steps * f_n + columns[None, :], inside, 0.0).to(tl.float32)
        x1_tile = centred.to(x1.dtype.element_ty)
        tl.store(x1 + steps * x1_n + columns[None, :], x1_tile, inside)
        centred = x1_tile.to(tl.float32)
    if mean is not None:
        row_mean = tl.sum(centred, 1) / C
        tl.store(mean + rows, row_mean, rows < n)
        centred = tl.where(inside, centred - row_mean[:, None], 0.0)
    row_rstd = tl.math.div_rn(1.0, tl.math.sqrt_rn(tl.sum(centred * centred, 1) / C + eps))
    tl.store(rstd + rows, row_rstd, rows < n)

    out = centred * row_rstd[:, None] * tl.load(w + columns, columns < C, 0.0).to(tl.float32)[None, :]
    if b is not None:
        out += tl.load(b + columns, columns < C, 0.0).to(tl.float32)[None, :]
    tl.store(y + steps * y_n + columns[None, :], out.to(y.dtype.element_ty), inside)


@triton.jit
def _norm_bwd_kernel(
    dy, x, w, b, mean, rstd, dx, y, partials, dy_n, x_n, dx_n, y_n, n,
    DW: tl.constexpr, DB: tl.constexpr, DX_SUM: tl.constexpr, C: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outside (n, C), dy is loaded as 0, so it adds nothing to the sums."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_C)
    weights = tl.load(w + columns, columns < C, 0.0).to(tl.float32)[None, :]
    if b is not None:
        bias = tl.load(b + columns, columns < C, 0.0)[None, :]
    dw = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    dx_sum = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)

    for first in tl.range(p * BLOCK_N, n, programs * BLOCK_N, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_N)
        inside = (rows < n)[:, None] & (columns < C)[None, :]
        steps = rows.to(tl.int64)[:, None]
        if STAGES == 1:  # a long row leaves no registers for parameters: reload them from cache
            weights = tl.load(w + columns, columns < C, 0.0).to(tl.float32)[None, :]
        row_rstd = tl.load(rstd + rows, rows < n, 0.0)[:, None]
        grad = tl.load(dy + steps * dy_n + columns[None, :], inside, 0.0).to(tl.float32)
        hat = tl.load(x + steps * x_n + columns[None, :], inside, 0.0).to(tl.float32)
        if mean is not None:
            hat -= tl.load(mean + rows, rows < n, 0.0)[:, None]
        hat *= row_rstd
        if DW:
            dw += grad * hat
        if DB:
            db += grad
        if dx is not None:
            g = grad * weights
            step = g - hat * (tl.sum(g * hat, 1) / C)[:, None]
            if mean is not None:
                step -= (tl.sum(g, 1) / C)[:, None]
            pointers = dx + steps * dx_n + columns[None, :]
            new = (tl.load(pointers, inside, 0.0).to(tl.float32) + step * row_rstd).to(dx.dtype.element_ty)
            tl.store(pointers, new, inside)
            if DX_SUM:
                dx_sum += tl.where(inside, new.to(tl.float32), 0.0)
        if y is not None:
            out = hat * weights
            if b is not None:
                if STAGES == 1:
                    bias = tl.load(b + columns, columns < C, 0.0)[None, :]
                out += bias.to(tl.float32)
            tl.store(y + steps * y_n + columns[None, :], out.to(y.dtype.element_ty), inside)

    place, next_sum = partials + p.to(tl.int64) * C + columns, tl.cast(programs, tl.int64) * C
    if DW:
        tl.store(place, tl.sum(dw, 0), columns < C)
        place += next_sum
    if DB:
        tl.store(place, tl.sum(db, 0), columns < C)
        place += next_sum
    if DX_SUM:
        tl.store(place, tl.sum(dx_sum, 0), columns < C)


def _tile(tiles: dict[int, Tile], c: int) -> Tile:
    return tiles[min(columns for columns in tiles if columns >= padded(c))]


def _programs(x: TensorLike, tile: Tile) -> int:
    """P, the programs of the backward. It never decreases with more rows, so scratch for many rows also fits fewer."""
    return max(1, min(ceil_div(x.shape[0], tile.rows), tile.programs * multiprocessors(x.device)))


def workspace(x: TensorLike, *, backward: bool) -> Shapes:
    if not backward:
        return {}
    c = x.shape[1]
    return {"partials": ((3, _programs(x, _tile(BACKWARD, c)), c), torch.float32)}


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def fwd(
    x: Tensor, f: Tensor | None, w: Tensor, b: Tensor | None, eps: float, *, out: Outputs, scratch: Scratch
) -> None:
    x1, y, mean, rstd = out
    n, c = x.shape
    tile = _tile(FORWARD, c)
    strides = (x.stride(0), _stride(f), _stride(x1), y.stride(0))
    constants = {"C": c, "BLOCK_N": tile.rows, "BLOCK_C": padded(c), "num_warps": tile.warps, **dependent(x, n)}
    launch(_norm_fwd_kernel, (ceil_div(n, tile.rows),), x, f, w, b, x1, y, mean, rstd, *strides, n, eps, **constants)


def bwd(
    dy: Tensor, x: Tensor, w: Tensor, b: Tensor | None, statistics: Statistics, *, out: Gradients, scratch: Scratch
) -> None:
    (mean, rstd), (dx, dw, db, dx_sum, y, accumulate) = statistics, out
    n, c = x.shape
    tile, sums = _tile(BACKWARD, c), [grad for grad in (dw, db, dx_sum) if grad is not None]
    partials = scratch["partials"][: len(sums)]
    tensors, strides = (dy, x, w, b, mean, rstd, dx, y, partials), map(_stride, (dy, x, dx, y))
    wanted = {"DW": dw is not None, "DB": db is not None, "DX_SUM": dx_sum is not None}
    constants = {"C": c, "BLOCK_N": tile.rows, "BLOCK_C": padded(c), "STAGES": tile.stages, "num_warps": tile.warps}
    launch(_norm_bwd_kernel, (_programs(x, tile),), *tensors, *strides, n, **wanted, **constants)
    if sums:
        add_partials(partials, *sums, accumulate=accumulate)
