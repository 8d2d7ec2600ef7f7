"""Pre- and postprocess of Hopper's backward; backward.py defines neg_lse2, delta and dq_acc. The kernels are memory-bound.

preprocess    neg_lse2 and delta of every row, padding rows included; counters = 0, sums = 0, dq_acc = 0
postprocess   dq = scale · dq_acc[dq_line], in the tensor's dtype; 0 for rows that attend to no column
dsinks        dsinks[h] += Σ exp(sink − lse) · delta over the rows of head h, with the sign of delta in backward.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.memory import lengths, row_program
from ..triton.numerics import to_log2
from .backward_scheduler import first_row
from .backward_store_dq import dq_line

SIZES = [
    "rows_b",
    "rows_h",
    "heads",
    "row_tiles",
    "tq",
    "d_eighths",
    "batch",
    "sinks_h",
    "dsinks_h",
    "counted",
    "summed",
]
SIZES += ["has_dlse", "zero_dq", "rows_of_semaphore", "dq_warps"]
SIZES += [f"{x}_{axis}" for x in ("o", "do", "lse", "dlse", "dq") for axis in "bht"]
POINTERS = ["lse", "dlse", "cu_seqlens_q", "counters", "dq_semaphores", "sums", "sinks", "dsinks"]


@triton.jit
def _rows_of(x, x_b, x_h, x_t, b, h, t, ALIGN: tl.constexpr):
    """Pointers to rows t of a head. Row offsets must be multiples of ALIGN elements."""
    return x + tl.multiple_of(b * x_b, ALIGN) + tl.multiple_of(h * x_h, ALIGN) + tl.multiple_of(t * x_t, ALIGN)[:, None]


@triton.jit
def _clear(x, size, CHUNK: tl.constexpr):
    """x = 0, divided among all programs."""
    for start in range(tl.program_id(0) * CHUNK, size, tl.num_programs(0) * CHUNK):
        i = start + tl.arange(0, CHUNK)
        tl.store(x + i, tl.zeros([CHUNK], x.dtype.element_ty), mask=i < size)


@triton.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_preprocess_kernel(
    o, do, lse, dlse, cu_seqlens_q,
    neg_lse2, delta, dq_acc, counters, sums,
    o_b: tl.int64, o_h: tl.int64, o_t: tl.int64, do_b: tl.int64, do_h: tl.int64, do_t: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64, lse_t: tl.int64, dlse_b: tl.int64, dlse_h: tl.int64, dlse_t: tl.int64,
    rows_b, rows_h, heads, row_tiles, tq, d_eighths, counted, summed, has_dlse, zero_dq, divisor,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    tile, h, b = row_program(row_tiles, heads)
    _clear(counters, counted, 1024)
    _clear(sums, summed, 1024)
    start_q, _, tq, _ = lengths(cu_seqlens_q, cu_seqlens_q, b, tq, tq)
    start = tile * BLOCK
    if start >= tl.cdiv(tq, PADDING) * PADDING:
        return

    rows = start + tl.arange(0, BLOCK)
    row_inside = rows < tq
    t = (start_q + rows).to(tl.int64)
    c = tl.arange(0, BLOCK_D)[None, :]
    D = d_eighths * 8
    inside = row_inside[:, None] & (c < D)
    o_tile = tl.load(_rows_of(o, o_b, o_h, o_t, b, h, t, 8) + c, mask=inside, other=0.0).to(tl.float32)
    do_tile = tl.load(_rows_of(do, do_b, do_h, do_t, b, h, t, 8) + c, mask=inside, other=0.0).to(tl.float32)
    lse_row = tl.load(lse + b * lse_b + h * lse_h + t * lse_t, mask=row_inside, other=float("-inf"))
    d = tl.sum(o_tile * do_tile, 1)
    d -= tl.load(dlse + b * dlse_b + h * dlse_h + t * dlse_t, mask=row_inside & (has_dlse != 0), other=0.0)
    valid = lse_row > float("-inf")
    of_no_column = tl.where(divisor < 0.0, float("inf"), float("-inf"))

    padded_rows = h * rows_h + first_row(b, start_q, rows_b, cu_seqlens_q is not None) + rows
    tl.store(neg_lse2 + padded_rows, tl.where(valid, -to_log2(lse_row, IEEE_FP32=False) / divisor, of_no_column))
    tl.store(delta + padded_rows, tl.where(valid, -d, 0.0))
    cleared = (c < D) & (zero_dq != 0)
    tl.store(dq_acc + padded_rows.to(tl.int64)[:, None] * D + c, tl.zeros([BLOCK, BLOCK_D], tl.float32), mask=cleared)


@triton.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_postprocess_kernel(
    dq_acc, dq_semaphores, cu_seqlens_q,
    dq,
    dq_b: tl.int64, dq_h: tl.int64, dq_t: tl.int64,
    rows_b, rows_h, heads, row_tiles, tq, d_eighths, rows_of_semaphore, dq_warps, scale,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, h, b = row_program(row_tiles, heads)
    start_q, _, tq, _ = lengths(cu_seqlens_q, cu_seqlens_q, b, tq, tq)
    if tile * BLOCK >= tq:
        return

    rows = tile * BLOCK + tl.arange(0, BLOCK)
    t = (start_q + rows).to(tl.int64)
    c = tl.arange(0, BLOCK_D)[None, :]
    D = d_eighths * 8
    inside = (rows < tq)[:, None] & (c < D)
    padded_rows = h * rows_h + first_row(b, start_q, rows_b, cu_seqlens_q is not None) + rows
    added = inside
    if dq_semaphores is not None:
        number = (b * heads + h) * row_tiles + tile * BLOCK // rows_of_semaphore
        added = inside & (tl.load(dq_semaphores + number * dq_warps) > 0)
    sums = tl.load(dq_acc + dq_line(padded_rows).to(tl.int64)[:, None] * D + c, mask=added, other=0.0)
    tl.store(_rows_of(dq, dq_b, dq_h, dq_t, b, h, t, 8) + c, (sums * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_dsinks_kernel(
    neg_lse2, delta, sinks, cu_seqlens_q,
    dsinks,
    sinks_h: tl.int64, dsinks_h: tl.int64, rows_b, rows_h, batch, tq, divisor,
    BLOCK: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    sink = to_log2(tl.load(sinks + h * sinks_h).to(tl.float32), IEEE_FP32=False)
    acc = tl.zeros([BLOCK], tl.float32)
    for b in range(0, batch):
        start_q, _start_k, t, _tk = lengths(cu_seqlens_q, cu_seqlens_q, b, tq, tq)
        first_padded_row = h * rows_h + first_row(b, start_q, rows_b, cu_seqlens_q is not None)
        for start in range(0, t, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            z = tl.load(neg_lse2 + first_padded_row + rows, mask=rows < t, other=0.0) * divisor
            acc += tl.math.exp2(sink + z) * tl.load(delta + first_padded_row + rows, mask=rows < t, other=0.0)
    total = tl.load(dsinks + h * dsinks_h).to(tl.float32) + tl.sum(acc, 0)
    tl.store(dsinks + h * dsinks_h, total.to(dsinks.dtype.element_ty))
