"""Addressing on the device: pointers to heads, rows and tiles, and loads and stores of tiles.

Offsets of heads and rows are 64-bit. Offsets inside a tile are 32-bit unless INT64_OFFSETS. Every row starts at a multiple of
ALIGN elements, which lets Triton load 16 bytes per thread.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_program(row_tiles, heads):
    """(row tile, head, sequence) of this program."""
    n = tl.program_id(0)
    return n % row_tiles, n // row_tiles % heads, n // row_tiles // heads


@triton.jit
def steps(n, stride, ALIGN: tl.constexpr):
    """n · stride in 64 bits, a multiple of ALIGN."""
    return tl.multiple_of(tl.cast(n, tl.int64) * stride, ALIGN)


@triton.jit
def at(x, x_b, x_h, x_t, b, h, t, ALIGN: tl.constexpr):
    """A pointer to row t of head h of sequence b."""
    return x + steps(b, x_b, ALIGN) + steps(h, x_h, ALIGN) + steps(t, x_t, ALIGN)


@triton.jit
def tile_offsets(x_t, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    """Offsets of a tile's elements from its first row."""
    t = tl.arange(0, ROWS)[:, None]
    if INT64_OFFSETS:
        t = t.to(tl.int64)
    return tl.multiple_of(t * x_t, [ALIGN, ALIGN]) + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(x, offsets, rows, D, CHECKED: tl.constexpr):
    """A tile that is 0 from column D on, unless D is None, and, if CHECKED, from row `rows` on."""
    ROWS: tl.constexpr = offsets.shape[0]
    BLOCK_D: tl.constexpr = offsets.shape[1]
    t = tl.arange(0, ROWS)[:, None] < rows
    d = tl.arange(0, BLOCK_D)[None, :]
    if CHECKED and D is not None:
        tile = tl.load(x + offsets, mask=t & (d < D), other=0.0)
    elif CHECKED:
        tile = tl.load(x + offsets, mask=t, other=0.0)
    elif D is not None:
        tile = tl.load(x + offsets, mask=d < D, other=0.0)
    else:
        tile = tl.load(x + offsets)
    return tile


@triton.jit
def load_row(x, rows, end, other, DUPLICATES: tl.constexpr):
    """x[rows] as (DUPLICATES, M), one element per thread; `other` from `end` on. Without duplicates there are fewer elements
    than threads, and Triton then makes every thread read the elements that it needs (16 at M = 64) from shared memory."""
    offsets = rows[None, :] + tl.zeros([DUPLICATES, 1], tl.int32)
    return tl.load(x + offsets, mask=offsets < end, other=other)


@triton.jit
def deduplicated(copies):
    """(DUPLICATES, M) → (1, M)."""
    return tl.max(copies, 0, keep_dims=True) if copies.shape[0] > 1 else copies


@triton.jit
def store_tile(x, offsets, tile, rows, D):
    ROWS: tl.constexpr = offsets.shape[0]
    BLOCK_D: tl.constexpr = offsets.shape[1]
    inside = tl.arange(0, ROWS)[:, None] < rows
    if D is not None:
        inside &= tl.arange(0, BLOCK_D)[None, :] < D
    tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def lengths(cu_seqlens_q, cu_seqlens_k, b, tq, tk):
    """(first row of q, first row of k, Tq, Tk) of sequence b; (0, 0, tq, tk) without cu_seqlens."""
    start_q = b * 0
    start_k = b * 0
    if cu_seqlens_q is not None:
        start_q = tl.load(cu_seqlens_q + b)
        start_k = tl.load(cu_seqlens_k + b)
        tq = tl.load(cu_seqlens_q + b + 1) - start_q
        tk = tl.load(cu_seqlens_k + b + 1) - start_k
    return start_q, start_k, tq, tk
