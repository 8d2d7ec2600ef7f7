"""The gradients in Triton. The kernels read dy (for da: x) once.       dy (N, W)   u, du (N, r)   b, db (W, r)

    program (s, j)   reads the columns of tile j in the row tiles s, s + S, s + 2S, …
                     writes du_parts[j] = dy b of its rows and columns, and db_parts[s] = dyᵀ u of its rows
    then             du = scale · Σ_j du_parts[j]         db (+)= Σ_s db_parts[s]

da is dbᵀ with x instead of dy and du instead of u. Sums are float32, in a fixed order without atomics, so the bits are the same
each time. du_parts has 4 r / BLOCK_W bytes for each element of dy, which is r / 128 of dy's bytes: an eighth for r = 16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import ceil_div, launch, multiprocessors, padded
from ..ordered_sum import BLOCK, WARPS, add_parts, ahead
from ..scratch import Scratch, Shapes, TensorLike

BLOCK_N, BLOCK_BYTES = 64, 512  # rows of a tile of dy, and bytes of its rows
PROGRAMS, PRODUCT_WARPS, STAGES = 2, 8, 3  # PROGRAMS: per multiprocessor


@triton.jit
def _low_rank_kernel(
    dy, u, b, du_parts, db_parts, dy_n, u_n, b_w, n, w,
    R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes no db if u is None, and no du if b is None. Loads outside (n, w) and R return 0."""
    s, splits, j = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    columns, ranks = j * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_R)
    inside = (columns < w)[:, None] & (ranks < R)[None, :]
    if b is not None:
        b_tile = tl.load(b + columns.to(tl.int64)[:, None] * b_w + ranks[None, :], inside, 0.0)
    db = tl.zeros([BLOCK_W, BLOCK_R], tl.float32)

    for first in tl.range(s * BLOCK_N, n, splits * BLOCK_N, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_N)
        steps, in_u = rows.to(tl.int64)[:, None], (rows < n)[:, None] & (ranks < R)[None, :]
        dy_tile = tl.load(dy + steps * dy_n + columns[None, :], (rows < n)[:, None] & (columns < w)[None, :], 0.0)
        if u is not None:
            u_tile = tl.load(u + steps * u_n + ranks[None, :], in_u, 0.0)
            db = tl.dot(tl.trans(dy_tile), u_tile, db, input_precision="ieee")
        if b is not None:
            du = tl.dot(dy_tile, b_tile, input_precision="ieee")
            tl.store(du_parts + (j.to(tl.int64) * n + steps) * R + ranks[None, :], du, in_u)

    if u is not None:
        pointers = db_parts + (s.to(tl.int64) * w + columns[:, None]) * R + ranks[None, :]
        tl.store(pointers, db, inside)


@triton.jit
def _sum_parts_kernel(
    parts, out, count, n, scale, out_n, out_r,
    R: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out (+)= scale · Σ parts       parts (count, n, R)   out (n, R), with any strides"""
    rows, ranks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
    inside, steps = (rows < n)[:, None] & (ranks < R)[None, :], rows.to(tl.int64)[:, None]
    total = tl.zeros([BLOCK, BLOCK_R], tl.float32)

    first_part = parts + steps * R + ranks[None, :]
    total = add_parts(total, first_part, tl.cast(n, tl.int64) * R, count, inside, AHEAD) * scale
    pointers = out + steps * out_n + ranks[None, :] * out_r
    if ACCUMULATE:
        total += tl.load(pointers, inside, 0.0)
    tl.store(pointers, total.to(out.dtype.element_ty), inside)


def _tiles(wide: TensorLike) -> tuple[int, int, int]:
    """(columns of a tile, number of column tiles, S). S never decreases with more rows."""
    n, w = wide.shape
    columns = max(16, min(BLOCK_BYTES // wide.dtype.itemsize, padded(w)))
    tiles = ceil_div(w, columns)
    splits = max(1, min(ceil_div(n, BLOCK_N), PROGRAMS * multiprocessors(wide.device) // tiles))
    return columns, tiles, splits


def workspace(wide: TensorLike, thin: TensorLike, w: TensorLike, *, du: bool) -> Shapes:
    (n, width), r, (_, tiles, splits) = wide.shape, thin.shape[1], _tiles(wide)
    du_parts: Shapes = {"du_parts": ((tiles, n, r), torch.float32)} if du else {}
    return du_parts | {"db_parts": ((splits, width, r), torch.float32)}


def bwd(
    dy: Tensor, u: Tensor, b: Tensor, scale: float, *, du: Tensor, db: Tensor | None, accumulate: bool, scratch: Scratch
) -> None:
    _multiply(dy, u if db is not None else None, b, scratch)
    _sum(scratch["du_parts"], out=du, scale=scale, accumulate=False)
    if db is not None:
        _sum(scratch["db_parts"], out=db, scale=1.0, accumulate=accumulate)


def bwd_a(du: Tensor, x: Tensor, a: Tensor, *, da: Tensor, accumulate: bool, scratch: Scratch) -> None:
    _multiply(x, du, None, scratch)
    _sum(scratch["db_parts"], out=da.t(), scale=1.0, accumulate=accumulate)


def _multiply(dy: Tensor, u: Tensor | None, b: Tensor | None, scratch: Scratch) -> None:
    (n, w), (columns, tiles, splits), r = dy.shape, _tiles(dy), scratch["db_parts"].shape[2]
    strides = (dy.stride(0), 0 if u is None else u.stride(0), 0 if b is None else b.stride(0))
    constants = {"R": r, "BLOCK_N": BLOCK_N, "BLOCK_W": columns, "BLOCK_R": max(16, padded(r)), "STAGES": STAGES}
    parts = None if b is None else scratch["du_parts"], scratch["db_parts"]
    launch(_low_rank_kernel, (splits, tiles), dy, u, b, *parts, *strides, n, w, num_warps=PRODUCT_WARPS, **constants)


def _sum(parts: Tensor, *, out: Tensor, scale: float, accumulate: bool) -> None:
    count, n, r = parts.shape
    ranks = max(16, padded(r))
    rows = max(1, BLOCK // ranks)
    constants = {"R": r, "ACCUMULATE": accumulate, "BLOCK": rows, "BLOCK_R": ranks, "AHEAD": ahead(count)}
    rows_and_strides = (count, n, scale, *out.stride())
    launch(_sum_parts_kernel, (ceil_div(n, rows),), parts, out, *rows_and_strides, num_warps=WARPS, **constants)
