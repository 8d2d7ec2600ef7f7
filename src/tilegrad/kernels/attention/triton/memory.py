"""Addressing on the device: where a head, a row and a tile lie, and tiles in and out of memory.

Offsets of heads and rows are 64-bit. Offsets inside a tile are 32-bit unless INT64_OFFSETS. ALIGN is the number of elements
that every row begins at a multiple of: with it Triton loads 16 bytes a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def steps(n, stride, ALIGN: tl.constexpr):
    """n · stride in 64 bits, a multiple of ALIGN."""
    return tl.multiple_of(tl.cast(n, tl.int64) * stride, ALIGN)


@triton.jit
def at(x, x_b, x_h, x_t, b, h, t, ALIGN: tl.constexpr):
    """Where row t of head h of sequence b begins."""
    return x + steps(b, x_b, ALIGN) + steps(h, x_h, ALIGN) + steps(t, x_t, ALIGN)


@triton.jit
def tile_offsets(x_t, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    """Offsets of a tile's elements from its first row, 64-bit where INT64_OFFSETS."""
    t = tl.arange(0, ROWS)[:, None]
    if INT64_OFFSETS:
        t = t.to(tl.int64)
    return tl.multiple_of(t * x_t, [ALIGN, ALIGN]) + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(x, offsets, rows, D: tl.constexpr, CHECKED: tl.constexpr):
    """A tile of rows, 0 from column D on and, if CHECKED, from row `rows` on."""
    ROWS: tl.constexpr = offsets.shape[0]
    BLOCK_D: tl.constexpr = offsets.shape[1]
    t = tl.arange(0, ROWS)[:, None] < rows
    d = tl.arange(0, BLOCK_D)[None, :] < D
    if CHECKED and D < BLOCK_D:
        tile = tl.load(x + offsets, mask=t & d, other=0.0)
    elif CHECKED:
        tile = tl.load(x + offsets, mask=t, other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(x + offsets, mask=d, other=0.0)
    else:
        tile = tl.load(x + offsets)
    return tile


@triton.jit
def load_row(x, rows, end, other, DUPLICATES: tl.constexpr):
    """x[rows] as (DUPLICATES, M), one element a thread; `other` from `end` on. Without the duplicates Triton sees fewer
    elements than threads, and has every thread read all that it needs, 16 words of M = 64, through shared memory."""
    offsets = rows[None, :] + tl.zeros([DUPLICATES, 1], tl.int32)
    return tl.load(x + offsets, mask=offsets < end, other=other)


@triton.jit
def deduplicated(copies):
    """(DUPLICATES, M) → (1, M)."""
    return tl.max(copies, 0, keep_dims=True) if copies.shape[0] > 1 else copies


@triton.jit
def store_tile(x, offsets, tile, rows, D: tl.constexpr):
    ROWS: tl.constexpr = offsets.shape[0]
    BLOCK_D: tl.constexpr = offsets.shape[1]
    inside = (tl.arange(0, ROWS)[:, None] < rows) & (tl.arange(0, BLOCK_D)[None, :] < D)
    tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def lengths(cu_seqlens_q, cu_seqlens_k, b, tq, tk):
    """(first row of q, first row of k, Tq, Tk) of sequence b; of a dense call (0, 0, tq, tk)."""
    start_q = b * 0
    start_k = b * 0
    if cu_seqlens_q is not None:
        start_q = tl.load(cu_seqlens_q + b)
        start_k = tl.load(cu_seqlens_k + b)
        tq = tl.load(cu_seqlens_q + b + 1) - start_q
        tk = tl.load(cu_seqlens_k + b + 1) - start_k
    return start_q, start_k, tq, tk
