"""What Hopper's backward does row by row, before and after its products.

    begin    shift, delta of every row, padding rows too; dq_acc = 0, semaphores = 0, taken = 0
    finish   x = factor · acc, in the tensor's dtype: dq, and dk, dv where several programs added them up
    dsinks   dsinks[h] −= Σ exp(sink − lse) · delta over the rows of head h

All are bound by memory. What shift, delta and dq_acc are is said in hopper_bwd.py.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from .hopper_walk import first_row
from .triton_mask import lengths, to_base

SIZES = ["rows_b", "rows_h", "heads", "row_tiles", "size", "batch", "acc_b", "acc_h", "sinks_h", "dsinks_h"]
SIZES += [f"{x}_{axis}" for x in ("o", "do", "lse", "dlse", "x") for axis in "bht"]
POINTERS = ["lse", "dlse", "cu_seqlens", "semaphores", "taken", "sinks", "dsinks"]


@triton.jit
def _rows_of(x, x_b, x_h, x_t, b, h, t, ALIGN: tl.constexpr):
    """Addresses of rows t of a head, each a multiple of ALIGN elements."""
    return x + tl.multiple_of(b * x_b, ALIGN) + tl.multiple_of(h * x_h, ALIGN) + tl.multiple_of(t * x_t, ALIGN)[:, None]


@triton.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_begin_kernel(
    o, do, lse, dlse, cu_seqlens,
    shift, delta, dq_acc, semaphores, taken,
    o_b: tl.int64, o_h: tl.int64, o_t: tl.int64, do_b: tl.int64, do_h: tl.int64, do_t: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64, lse_t: tl.int64, dlse_b: tl.int64, dlse_h: tl.int64, dlse_t: tl.int64,
    acc_b: tl.int64, acc_h: tl.int64,
    rows_b, rows_h, heads, row_tiles, size, unit,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PADDING: tl.constexpr, SEMAPHORES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % row_tiles
    h = tl.program_id(0) // row_tiles % heads
    b = tl.program_id(0) // row_tiles // heads
    if tl.program_id(0) == 0:
        tl.store(taken, 0)
    start_q, _, tq, _ = lengths(cu_seqlens, cu_seqlens, b, size, size)
    start = tile * BLOCK
    if start >= tl.cdiv(tq, PADDING) * PADDING:
        return

    rows = start + tl.arange(0, BLOCK)
    inside = rows < tq
    t = (start_q + rows).to(tl.int64)
    c = tl.arange(0, BLOCK_D)[None, :]
    both = inside[:, None] & (c < D)
    o_tile = tl.load(_rows_of(o, o_b, o_h, o_t, b, h, t, 8) + c, mask=both, other=0.0).to(tl.float32)
    do_tile = tl.load(_rows_of(do, do_b, do_h, do_t, b, h, t, 8) + c, mask=both, other=0.0).to(tl.float32)
    lse_row = tl.load(lse + b * lse_b + h * lse_h + t * lse_t, mask=inside, other=float("-inf"))
    d = tl.sum(o_tile * do_tile, 1)
    if dlse is not None:
        d -= tl.load(dlse + b * dlse_b + h * dlse_h + t * dlse_t, mask=inside, other=0.0)
    some = lse_row > float("-inf")
    nothing = tl.where(unit < 0.0, float("inf"), float("-inf"))

    at = h * rows_h + first_row(b, start_q, rows_b, cu_seqlens is not None) + rows
    tl.store(shift + at, tl.where(some, -to_base(lse_row, False) / unit, nothing))
    tl.store(delta + at, tl.where(some, -d, 0.0))
    tl.store(_rows_of(dq_acc, acc_b, acc_h, D, b, h, t, 8) + c, tl.zeros([BLOCK, BLOCK_D], tl.float32), mask=both)
    if semaphores is not None:
        first = ((b * heads + h) * row_tiles + tile) * SEMAPHORES
        tl.store(semaphores + first + tl.arange(0, SEMAPHORES), 0)


@triton.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_finish_kernel(
    acc, cu_seqlens,
    x,
    acc_b: tl.int64, acc_h: tl.int64, x_b: tl.int64, x_h: tl.int64, x_t: tl.int64,
    heads, row_tiles, size, factor,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) % row_tiles * BLOCK
    h = tl.program_id(0) // row_tiles % heads
    b = tl.program_id(0) // row_tiles // heads
    first, _, end, _ = lengths(cu_seqlens, cu_seqlens, b, size, size)
    if start >= end:
        return

    rows = start + tl.arange(0, BLOCK)
    t = (first + rows).to(tl.int64)
    c = tl.arange(0, BLOCK_D)[None, :]
    both = (rows < end)[:, None] & (c < D)
    tile = tl.load(_rows_of(acc, acc_b, acc_h, D, b, h, t, 8) + c, mask=both, other=0.0)
    tl.store(_rows_of(x, x_b, x_h, x_t, b, h, t, 8) + c, (tile * factor).to(x.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_dsinks_kernel(
    shift, delta, sinks, cu_seqlens,
    dsinks,
    sinks_h: tl.int64, dsinks_h: tl.int64, rows_b, rows_h, batch, size, unit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    sink = to_base(tl.load(sinks + h * sinks_h).to(tl.float32), False)
    acc = tl.zeros([BLOCK], tl.float32)
    for b in range(0, batch):
        start_q, _start_k, t, _tk = lengths(cu_seqlens, cu_seqlens, b, size, size)
        at = h * rows_h + first_row(b, start_q, rows_b, cu_seqlens is not None)
        for start in range(0, t, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            z = tl.load(shift + at + rows, mask=rows < t, other=0.0) * unit
            acc += tl.math.exp2(sink + z) * tl.load(delta + at + rows, mask=rows < t, other=0.0)
    total = tl.load(dsinks + h * dsinks_h).to(tl.float32) + tl.sum(acc, 0)
    tl.store(dsinks + h * dsinks_h, total.to(dsinks.dtype.element_ty))
