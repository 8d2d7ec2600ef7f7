"""What Hopper's backward does row by row, before and after its products.

    rows     shift, delta of every row, padding rows too; dq_acc = 0, semaphores = 0, taken = 0
    dq       dq = scale · dq_acc, in the tensor's dtype
    dsinks   dsinks[h] += Σ exp(sink − lse) · delta over the rows of head h; delta is the negative one of hopper_bwd.py

All are bound by memory. What shift, delta and dq_acc are is said in hopper_bwd.py.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from .hopper_walk import first_row
from .triton_mask import lengths, to_base

ROW_SIZES = ["rows_b", "rows_h", "heads", "row_tiles", "tq"]


@triton.jit(do_not_specialize=[*ROW_SIZES, "lse", "dlse", "cu_seqlens_q"])
def _hopper_rows_kernel(
    o, do, lse, dlse, cu_seqlens_q,
    shift, delta, dq_acc, semaphores, taken,
    o_b: tl.int64, o_h: tl.int64, o_t: tl.int64, do_b: tl.int64, do_h: tl.int64, do_t: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64, lse_t: tl.int64, dlse_b: tl.int64, dlse_h: tl.int64, dlse_t: tl.int64,
    acc_b: tl.int64, acc_h: tl.int64,
    rows_b, rows_h, heads, row_tiles, tq, unit,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PADDING: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % row_tiles
    h = tl.program_id(0) // row_tiles % heads
    b = tl.program_id(0) // row_tiles // heads
    start_q, _, tq, _ = lengths(cu_seqlens_q, cu_seqlens_q, b, tq, tq)
    if tl.program_id(0) == 0:
        tl.store(taken, 0)
    start = tile * BLOCK
    if start >= tl.cdiv(tq, PADDING) * PADDING:
        return

    rows = start + tl.arange(0, BLOCK)
    inside = rows < tq
    c = tl.arange(0, BLOCK_D)[None, :]
    both = inside[:, None] & (c < D)
    t = (start_q + rows).to(tl.int64)
    o += tl.multiple_of(b * o_b, 8) + tl.multiple_of(h * o_h, 8)
    do += tl.multiple_of(b * do_b, 8) + tl.multiple_of(h * do_h, 8)
    o_tile = tl.load(o + tl.multiple_of(t * o_t, 8)[:, None] + c, mask=both, other=0.0).to(tl.float32)
    do_tile = tl.load(do + tl.multiple_of(t * do_t, 8)[:, None] + c, mask=both, other=0.0).to(tl.float32)
    lse_row = tl.load(lse + b * lse_b + h * lse_h + t * lse_t, mask=inside, other=float("-inf"))
    d = tl.sum(o_tile * do_tile, 1)
    if dlse is not None:
        d -= tl.load(dlse + b * dlse_b + h * dlse_h + t * dlse_t, mask=inside, other=0.0)
    some = lse_row > float("-inf")
    nothing = tl.where(unit < 0.0, float("inf"), float("-inf"))

    at = h * rows_h + first_row(b, start_q, rows_b, cu_seqlens_q is not None) + rows
    tl.store(shift + at, tl.where(some, -to_base(lse_row, False) / unit, nothing))
    tl.store(delta + at, tl.where(some, -d, 0.0))
    acc = dq_acc + b * acc_b + h * acc_h + tl.multiple_of(t * D, 8)[:, None] + c
    tl.store(acc, tl.zeros([BLOCK, BLOCK_D], tl.float32), mask=both)
    if semaphores is not None:
        tl.store(semaphores + (b * heads + h) * row_tiles * PER_BLOCK + tile * PER_BLOCK + tl.arange(0, PER_BLOCK), 0)


@triton.jit(do_not_specialize=ROW_SIZES)
def _hopper_dq_kernel(
    dq_acc, cu_seqlens_q,
    dq,
    acc_b: tl.int64, acc_h: tl.int64, dq_b: tl.int64, dq_h: tl.int64, dq_t: tl.int64,
    heads, row_tiles, tq, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) % row_tiles * BLOCK
    h = tl.program_id(0) // row_tiles % heads
    b = tl.program_id(0) // row_tiles // heads
    start_q, _, tq, _ = lengths(cu_seqlens_q, cu_seqlens_q, b, tq, tq)
    if start >= tq:
        return

    rows = start + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_D)[None, :]
    both = (rows < tq)[:, None] & (c < D)
    t = (start_q + rows).to(tl.int64)
    acc = tl.load(dq_acc + b * acc_b + h * acc_h + tl.multiple_of(t * D, 8)[:, None] + c, mask=both, other=0.0)
    dq += tl.multiple_of(b * dq_b, 8) + tl.multiple_of(h * dq_h, 8)
    tl.store(dq + tl.multiple_of(t * dq_t, 8)[:, None] + c, (acc * scale).to(dq.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=[*ROW_SIZES, "batch"])
def _hopper_dsinks_kernel(
    shift, delta, sinks, cu_seqlens_q,
    dsinks,
    sinks_h: tl.int64, dsinks_h: tl.int64, rows_b, rows_h, heads, batch, tq, unit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dsinks[h] += Σ exp(sink − lse) · delta over the rows of head h."""
    h = tl.program_id(0)
    sink = to_base(tl.load(sinks + h * sinks_h).to(tl.float32), False)
    acc = tl.zeros([BLOCK], tl.float32)
    for b in range(0, batch):
        start_q, _start_k, t, _tk = lengths(cu_seqlens_q, cu_seqlens_q, b, tq, tq)
        for start in range(0, t, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            at = h * rows_h + first_row(b, start_q, rows_b, cu_seqlens_q is not None) + rows
            z = tl.load(shift + at, mask=rows < t, other=0.0) * unit
            acc += tl.math.exp2(sink + z) * tl.load(delta + at, mask=rows < t, other=0.0)
    total = tl.load(dsinks + h * dsinks_h).to(tl.float32) + tl.sum(acc, 0)
    tl.store(dsinks + h * dsinks_h, total.to(dsinks.dtype.element_ty))
