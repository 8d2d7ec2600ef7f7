"""Norms in Triton: one pass over rows forward, one backward.       x, y, dy, dx (N, C)   partials (2, P, C)

    forward    a program for each tile of rows
    backward   P programs, each with the row tiles p, p + P, p + 2P, …: dx is added to, and partials[0, p] = Σ dy ∘ x̂ and
               partials[1, p] = Σ dy of the program's rows; then dw (+)= Σ_p partials[0, p], db (+)= Σ_p partials[1, p]

A whole row is in registers, in float32; only y and dx are rounded. Sums are in the grid's order: the same bits each time.
The backward's loads go ahead of its arithmetic where STAGES > 1 (cp.async).
With 16384 columns the backward spills some registers; up to 8192 it spills none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..column_sum.triton_ops import add_partials
from ..gpu import ceil_div, multiprocessors, padded
from ..scratch import Scratch, Shapes


class Tile(NamedTuple):
    rows: int
    warps: int
    stages: int = 1
    programs: int = 0  # for each multiprocessor, where they loop over tiles


# by the columns that a row is padded to: the first key that is not below them
FORWARD = {
    16: Tile(128, 4), 64: Tile(32, 4), 256: Tile(8, 4), 1024: Tile(4, 4),
    2048: Tile(2, 4), 4096: Tile(1, 4), 8192: Tile(1, 8), 16384: Tile(1, 16),
}  # fmt: skip
BACKWARD = {
    16: Tile(32, 1, 3, 8), 64: Tile(16, 1, 3, 8), 256: Tile(4, 1, 3, 8), 1024: Tile(1, 1, 3, 8),
    2048: Tile(1, 2, 3, 4), 4096: Tile(1, 4, 1, 2), 8192: Tile(1, 8, 1, 1), 16384: Tile(1, 16, 1, 1),
}  # fmt: skip


@triton.jit
def _norm_fwd_kernel(
    x, w, b, y, mean, rstd, x_n, y_n, n, eps, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_C)
    inside = (rows < n)[:, None] & (columns < C)[None, :]
    steps = rows.to(tl.int64)[:, None]

    centred = tl.load(x + steps * x_n + columns[None, :], inside, 0.0).to(tl.float32)
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
    dy, x, w, mean, rstd, dx, partials, dy_n, x_n, dx_n, n,
    DW: tl.constexpr, DB: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of a column from C on and a row from n on dy is 0, and so is all that is added up."""
    p, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_C)
    weights = tl.load(w + columns, columns < C, 0.0).to(tl.float32)[None, :]
    dw = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)

    for first in tl.range(p * BLOCK_N, n, programs * BLOCK_N, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_N)
        inside = (rows < n)[:, None] & (columns < C)[None, :]
        steps = rows.to(tl.int64)[:, None]
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
            at = dx + steps * dx_n + columns[None, :]
            old = tl.load(at, inside, 0.0).to(tl.float32)
            tl.store(at, (old + step * row_rstd).to(dx.dtype.element_ty), inside)

    own = partials + p.to(tl.int64) * C + columns
    if DW:
        tl.store(own, tl.sum(dw, 0), columns < C)
        own += tl.cast(programs, tl.int64) * C
    if DB:
        tl.store(own, tl.sum(db, 0), columns < C)


def _tile(tiles: dict[int, Tile], c: int) -> Tile:
    return tiles[min(columns for columns in tiles if columns >= padded(c))]


def _programs(x: Any, tile: Tile) -> int:
    """P of the backward. It never falls as rows are added, so that scratch for many serves few."""
    return max(1, min(ceil_div(x.shape[0], tile.rows), tile.programs * multiprocessors(torch.device(x.device))))


def workspace(x: Any, *, backward: bool) -> Shapes:
    if not backward:
        return {}
    c = x.shape[1]
    return {"partials": ((2, _programs(x, _tile(BACKWARD, c)), c), torch.float32)}


def fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *,
    y: Tensor, mean: Tensor | None, rstd: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    n, c = x.shape
    tile = _tile(FORWARD, c)
    if n == 0:
        return
    with torch.cuda.device_of(x):
        _norm_fwd_kernel[(ceil_div(n, tile.rows),)](
            x, w, b, y, mean, rstd, x.stride(0), y.stride(0), n, eps,
            C=c, BLOCK_N=tile.rows, BLOCK_C=padded(c), num_warps=tile.warps,
        )  # fmt: skip


def bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor | None, rstd: Tensor, *,
    dx: Tensor | None, dw: Tensor | None, db: Tensor | None, accumulate: bool, scratch: Scratch,
) -> None:  # fmt: skip
    n, c = x.shape
    tile, sums = _tile(BACKWARD, c), [grad for grad in (dw, db) if grad is not None]
    partials, dx_n = scratch["partials"][: len(sums)], 0 if dx is None else dx.stride(0)
    with torch.cuda.device_of(x):
        _norm_bwd_kernel[(_programs(x, tile),)](
            dy, x, w, mean, rstd, dx, partials, dy.stride(0), x.stride(0), dx_n, n,
            DW=dw is not None, DB=db is not None, C=c, BLOCK_N=tile.rows, BLOCK_C=padded(c), STAGES=tile.stages,
            num_warps=tile.warps,
        )  # fmt: skip
        if sums:
            add_partials(partials, *sums, accumulate=accumulate)
