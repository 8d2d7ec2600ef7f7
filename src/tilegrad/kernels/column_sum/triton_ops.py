"""Sums over rows in Triton.       x (N, C)   partials (P, C)   sums (C,)

    partials[p] = Σ x[n] over the row tiles p, p + P, p + 2P, …      one program per p and tile of columns
    sums (+)= Σ_p partials[p]                                        one program per tile of columns

Sums are float32, in the order of the grid and without atomics, so the bits are the same each time. x is read once. partials has
at most PROGRAMS rows of a column tile per multiprocessor, and stays in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import ceil_div, launch, multiprocessors, padded
from ..scratch import Scratch, Shapes, TensorLike

TILE, COLUMNS = 4096, 256  # elements of a tile, most columns of a tile
PROGRAMS = 8  # per multiprocessor
PARTIALS_ROWS, PARTIALS_COLUMNS = 128, 32  # a tile of partials
WARPS = 4
STAGES = 3  # tiles whose loads are in flight


@triton.jit
def _column_sum_kernel(x, partials, x_n, n, c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr):
    p, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)

    for first in tl.range(p * BLOCK_N, n, programs * BLOCK_N, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_N)
        inside = (rows < n)[:, None] & (columns < c)[None, :]
        acc += tl.load(x + rows.to(tl.int64)[:, None] * x_n + columns[None, :], inside, 0.0).to(tl.float32)

    tl.store(partials + p.to(tl.int64) * c + columns, tl.sum(acc, 0), columns < c)


@triton.jit
def _add_partials_kernel(
    partials, sums, second, third, programs, c, ACCUMULATE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    """sums (+)= Σ_p partials[0, p]; second and third, if given, (+)= Σ_p partials[1, p] and Σ_p partials[2, p]."""
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    out, i = sums, tl.program_id(1)
    if second is not None:  # compile-time condition  # noqa: SIM102
        if i == 1:
            out = second
    if third is not None:  # noqa: SIM102
        if i == 2:
            out = third
    partials += i.to(tl.int64) * programs * c
    acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)

    for first in range(0, programs, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        inside = (rows < programs)[:, None] & (columns < c)[None, :]
        acc += tl.load(partials + rows.to(tl.int64)[:, None] * c + columns[None, :], inside, 0.0)

    total = tl.sum(acc, 0)
    if ACCUMULATE:
        total += tl.load(out + columns, columns < c, 0.0)
    tl.store(out + columns, total, columns < c)


def _tile(c: int) -> tuple[int, int]:
    """(rows, columns)"""
    columns = min(COLUMNS, padded(c))
    return TILE // columns, columns


def _programs(x: TensorLike) -> int:
    """The number P of programs. It never decreases with more rows, so scratch for many rows also fits fewer."""
    (n, c), (rows, columns) = x.shape, _tile(x.shape[1])
    return max(1, min(ceil_div(n, rows), PROGRAMS * multiprocessors(x.device) // ceil_div(c, columns)))


def workspace(x: TensorLike) -> Shapes:
    return {"partials": ((_programs(x), x.shape[1]), torch.float32)}


def fwd(x: Tensor, *, sums: Tensor, accumulate: bool, scratch: Scratch) -> None:
    (n, c), programs, partials = x.shape, _programs(x), scratch["partials"]
    rows, columns = _tile(c)
    grid = programs, ceil_div(c, columns)
    constants = {"BLOCK_N": rows, "BLOCK_C": columns, "STAGES": STAGES, "num_warps": WARPS}
    launch(_column_sum_kernel, grid, x, partials, x.stride(0), n, c, **constants)
    add_partials(partials, sums, accumulate=accumulate)


def add_partials(
    partials: Tensor, sums: Tensor, second: Tensor | None = None, third: Tensor | None = None, *, accumulate: bool
) -> None:
    """partials (P, C), or (S, P, C) for S sums."""
    programs, c = partials.shape[-2:]
    grid = ceil_div(c, PARTIALS_COLUMNS), 1 + (second is not None) + (third is not None)
    constants = {"ACCUMULATE": accumulate, "BLOCK_P": PARTIALS_ROWS, "BLOCK_C": PARTIALS_COLUMNS, "num_warps": WARPS}
    launch(_add_partials_kernel, grid, partials, sums, second, third, programs, c, **constants)
