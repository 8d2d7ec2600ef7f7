"""Attention's backward for Hopper (sm_90a), in Gluon: one fused walk of five products, dq added up in float32 by TMA.

    rows    shift = −lse·log2(e)/unit   delta = −(rowsum(do ∘ o) − dlse)   dq_acc = 0         padding rows: p = 0
    main    a program owns columns j of a kv head and walks the query heads of its group and the rows i that see them
              sᵀ = k qᵀ            pᵀ = exp2(unit · (sᵀ + shift))       hidden pairs 0
              dpᵀ = v doᵀ          dsᵀ = pᵀ ∘ (dpᵀ + delta)
              dv += pᵀ do          dk += dsᵀ q          dq_acc[i] += ds k
    out     dq = scale · dq_acc, in the tensor's dtype

unit = scale · log2(e), at least 1e-30 large. With a softcap c: t = tanh(sᵀ · scale / c), pᵀ = exp2(c·log2(e)·t + shift) with
unit = 1, and ds gains the factor 1 − t².

**Partitions** of the main kernel, each a function below: eight warps multiply (`_multiply`), one loads (`_load`), one
adds dq and stores dk, dv (`_reduce`). They hand buffers over by pairs of barriers, "full" (waited for by the reader) and
"empty" (waited for by the writer); the n-th use of a ring of S buffers is buffer n % S in phase n // S, and every
partition counts uses for itself:

    q, do + rows of shift, delta     _load → _multiply      rings of STAGES
    k, v                             _load → _multiply      one each, refilled while dv, dk of the tile before drain
    dq (float32), later dk           _multiply → _reduce    one
    dv                               _multiply → _reduce    one

A program stays on its multiprocessor and takes every P-th tile of columns, so that a tile's loads overlap the end of the
tile before. Tiles are ordered so that the heads in flight fit L2, and the longest of those come first where the band
makes some longer (`_column_tile`). Tiles of rows that an edge crosses are walked with a mask, the others without.

**Deterministic**: additions to a tile of dq take turns in the order of the programs' tiles. A semaphore for each
tile of rows counts turns. Whoever comes first never waits, so the wait ends.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_tma import launch as kernel_launch
from .hopper_tma import row_descriptor, tile_descriptor
from .hopper_walk import END, FIELDS, Call, Ring, acquire, await_full, barriers, first_row, hear, is_whole, load, record, reduce, release, row_tile
from .mask import Mask
from .triton_attention import LEAST_FACTOR, LOG2E, Scratch, Shapes, Sizes, _bht, multiprocessors
from .triton_mask import lengths, to_base

PADDING = 128  # rows of shift and delta are padded to multiples of it
SEMAPHORES = 4  # of PADDING rows, enough for the smallest tile
L2_BYTES = 40 * 2**20
NOWHERE = gl.constexpr(2**30)  # a column that no row sees


@gluon.jit
def _tanh(x):
    """Odd polynomial near 0, where 1 − 2 / (1 + exp(2x)) would cancel."""
    y = x * x
    near = 0.020696379244327545 - 0.005768859293311834 * y
    near = -0.333332896232605 + y * (0.13331660628318787 + y * (-0.05375746265053749 + y * near))
    far = 1.0 - 2.0 / (1.0 + gl.exp2(gl.minimum(gl.maximum(x, -20.0), 20.0) * 2.8853900817779268))
    return gl.where(gl.abs(x) < 0.625, x + x * y * near, far)


@gluon.jit
def _hide(x, i, turn, call, tiles_ring, LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """−inf where a row of the i-th row tile does not see a column of the turn's tile, or there is no such column."""
    tile = record(tiles_ring, turn, call)
    j = tile.n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.where(j < tile.tk, j, NOWHERE)[:, None]
    ahead = row_tile(tile, i) * BLOCK_M + tile.tk - tile.tq
    at = ahead + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    seen = j < NOWHERE
    if call.right is not None:
        seen = j <= at + call.right
    if call.left is not None:
        seen = seen & (j >= at - call.left)
    return gl.where(seen, x, float("-inf"))


@gluon.jit
def _add_rows(
    dk, dv, use, turn, i, masked, call, q_ring, do_ring, shift_s, delta_s, k, v, ds_s, dq_ring, tiles_ring,
    unit, cap, cap_inner,
    ST_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """dk, dv of one more tile of rows; its dq goes to `reduce`."""
    dtype: gl.constexpr = k.dtype
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV_L, k_width=2)
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    shift_s = shift_s.index(use % SLOTS)
    delta_s = delta_s.index(use % SLOTS)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)

    q = await_full(q_ring, use, SLOTS).reshape([BLOCK_M, D])
    if cap is None:  # shift as the accumulator's first value costs no registers and no addition
        seed = shift_s.load(ROW_L)[None, :] + zero
        s_token = warpgroup_mma(k, q.permute((1, 0)), seed, is_async=True)
    else:
        s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    do = await_full(do_ring, use, SLOTS).reshape([BLOCK_M, D])
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(1, deps=(s_token,))
    if cap is None:
        x = x * unit
    else:
        t = _tanh(x * cap_inner)
        x = t * cap + shift_s.load(ROW_L)[None, :]
    if MASKED == "if":
        if i < masked:
            x = _hide(x, i, turn, call, tiles_ring, ST_L, BLOCK_M, BLOCK_N)
    elif MASKED:
        x = _hide(x, i, turn, call, tiles_ring, ST_L, BLOCK_M, BLOCK_N)
    p = gl.exp2(x)
    p16 = p.to(dtype)
    delta = delta_s.load(ROW_L)
    ds = p * (warpgroup_mma_wait(0, deps=(dp_token,)) + delta[None, :])
    if cap is not None:
        ds = ds * (1.0 - t * t)
    ds16 = ds.to(dtype)
    ds_s.store(ds16)

    dv_token = warpgroup_mma(gl.convert_layout(p16, A_L), do, dv, is_async=True)
    fence_async_shared()
    zero_dq = gl.zeros((BLOCK_M, D), gl.float32, layout=DQ_L)
    dq_token = warpgroup_mma(ds_s.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(gl.convert_layout(ds16, A_L), q, dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_token,))
    dq = warpgroup_mma_wait(1, deps=(dq_token,))
    dq_use = use + 2 * turn
    dq_s = acquire(dq_ring, dq_use, DQ_SLOTS).reshape([BLOCK_M, D])
    dq_s.store(dq)
    fence_async_shared()
    release(dq_ring.full, dq_use, DQ_SLOTS)
    release(do_ring.empty, use, SLOTS)
    dk = warpgroup_mma_wait(0, deps=(dk_token,))
    release(q_ring.empty, use, SLOTS)
    return dk, dv


@gluon.jit
def _multiply(
    dk_ptr, dv_ptr, dk_h, dk_t, dv_h, dv_t, d, call, q_ring, do_ring, shift_s, delta_s, k_ring, v_ring, ds_s, dq_ring,
    tiles_ring, scale, unit, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """The partition with all products. Eight warps: two warpgroups share the columns of sᵀ, dpᵀ, dk, dv."""
    WARPS: gl.constexpr = gl.num_warps()
    WM: gl.constexpr = BLOCK_M // 16 if BLOCK_M // 16 < WARPS else WARPS
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WM, WARPS // WM], [16, D // (WARPS // WM), 16])
    k = k_ring.buffer.index(0).reshape([BLOCK_N, D])
    v = v_ring.buffer.index(0).reshape([BLOCK_N, D])
    use = 0
    turn = 0
    count = hear(tiles_ring, turn, call).count
    while count != END:
        dk = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        dv = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        masked = record(tiles_ring, turn, call).masked
        await_full(k_ring, turn, 1)
        await_full(v_ring, turn, 1)
        for _g in range(0, call.group):
            if SPLIT:
                for i in range(0, masked):
                    dk, dv = _add_rows(
                        dk, dv, use, turn, i, masked, call,
                        q_ring, do_ring, shift_s, delta_s, k, v, ds_s, dq_ring, tiles_ring, unit, cap, cap_inner,
                        ST_L, KV_L, DQ_L, BLOCK_M, BLOCK_N, D, SLOTS, DQ_SLOTS, True,
                    )  # fmt: skip
                    use += 1
                for i in range(masked, count):
                    dk, dv = _add_rows(
                        dk, dv, use, turn, i, masked, call,
                        q_ring, do_ring, shift_s, delta_s, k, v, ds_s, dq_ring, tiles_ring, unit, cap, cap_inner,
                        ST_L, KV_L, DQ_L, BLOCK_M, BLOCK_N, D, SLOTS, DQ_SLOTS, False,
                    )  # fmt: skip
                    use += 1
            else:
                for i in range(0, count):
                    dk, dv = _add_rows(
                        dk, dv, use, turn, i, masked, call,
                        q_ring, do_ring, shift_s, delta_s, k, v, ds_s, dq_ring, tiles_ring, unit, cap, cap_inner,
                        ST_L, KV_L, DQ_L, BLOCK_M, BLOCK_N, D, SLOTS, DQ_SLOTS, "if",
                    )  # fmt: skip
                    use += 1
        release(k_ring.empty, turn, 1)
        release(v_ring.empty, turn, 1)
        tile = record(tiles_ring, turn, call)
        dq_use = use + 2 * turn
        _hand_over(dv_ptr, dv, dv_h, dv_t, d, tile, call, dq_ring, dq_use, KV_L, BLOCK_N, D, DQ_SLOTS)
        _hand_over(dk_ptr, dk * scale, dk_h, dk_t, d, tile, call, dq_ring, dq_use + 1, KV_L, BLOCK_N, D, DQ_SLOTS)
        release(tiles_ring.empty, turn, 2)
        turn += 1
        count = hear(tiles_ring, turn, call).count


@gluon.jit
def _add_rows_wide(
    dk, dv, use, turn, i, call, q_ring, do_ring, shift_s, delta_s, k, v, p_s, ds_s, dq_ring, tiles_ring,
    unit, cap, cap_inner,
    ST_L: gl.constexpr, DQ_L: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr, SLICES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The same with p and ds through shared memory and dq in SLICES of its columns."""
    dtype: gl.constexpr = k.dtype
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    WIDTH: gl.constexpr = D // SLICES
    shift_s = shift_s.index(use % Q_SLOTS)
    delta_s = delta_s.index(use % DO_SLOTS)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)

    q = await_full(q_ring, use, Q_SLOTS).reshape([BLOCK_M, D])
    s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    shift = shift_s.load(ROW_L)
    do = await_full(do_ring, use, DO_SLOTS).reshape([BLOCK_M, D])
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(1, deps=(s_token,))
    if cap is None:
        x = x * unit + (shift * unit)[None, :]
    else:
        t = _tanh(x * cap_inner)
        x = t * cap + shift[None, :]
    if MASKED:
        x = _hide(x, i, turn, call, tiles_ring, ST_L, BLOCK_M, BLOCK_N)
    p = gl.exp2(x)
    p_s.store(p.to(dtype))
    delta = delta_s.load(ROW_L)
    ds = p * (warpgroup_mma_wait(0, deps=(dp_token,)) + delta[None, :])
    if cap is not None:
        ds = ds * (1.0 - t * t)
    ds_s.store(ds.to(dtype))
    fence_async_shared()

    zero_dq = gl.zeros((BLOCK_M, WIDTH), gl.float32, layout=DQ_L)
    dq_use = use * SLICES + 2 * turn
    dv_token = warpgroup_mma(p_s, do, dv, is_async=True)
    dq_token = warpgroup_mma(ds_s.permute((1, 0)), k.slice(0, WIDTH, 1), zero_dq, use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv_token,))
    dq = warpgroup_mma_wait(0, deps=(dq_token,))
    release(do_ring.empty, use, DO_SLOTS)
    dk_token = warpgroup_mma(ds_s, q, dk, is_async=True)
    acquire(dq_ring, dq_use, DQ_SLOTS).reshape([BLOCK_M, WIDTH]).store(dq)
    fence_async_shared()
    release(dq_ring.full, dq_use, DQ_SLOTS)
    for part in gl.static_range(1, SLICES):
        k_part = k.slice(part * WIDTH, WIDTH, 1)
        dq_token = warpgroup_mma(ds_s.permute((1, 0)), k_part, zero_dq, use_acc=False, is_async=True)
        if part == 1:
            dk = warpgroup_mma_wait(1, deps=(dk_token,))
        dq = warpgroup_mma_wait(0, deps=(dq_token,))
        if part == SLICES - 1:
            release(q_ring.empty, use, Q_SLOTS)
        acquire(dq_ring, dq_use + part, DQ_SLOTS).reshape([BLOCK_M, WIDTH]).store(dq)
        fence_async_shared()
        release(dq_ring.full, dq_use + part, DQ_SLOTS)
    return dk, dv


@gluon.jit
def _multiply_wide(
    dk_ptr, dv_ptr, dk_h, dk_t, dv_h, dv_t, d, call, q_ring, do_ring, shift_s, delta_s, k_ring, v_ring, p_s, ds_s,
    dq_ring, tiles_ring, scale, unit, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr,
    DQ_SLOTS: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """The partition with all products for D > 128: two warpgroups share the head's columns of dk, dv, dq."""
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_M // 2, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // SLICES // 2, 16])
    k = k_ring.buffer.index(0).reshape([BLOCK_N, D])
    v = v_ring.buffer.index(0).reshape([BLOCK_N, D])
    use = 0
    turn = 0
    count = hear(tiles_ring, turn, call).count
    while count != END:
        dk = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        dv = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        masked = record(tiles_ring, turn, call).masked
        await_full(k_ring, turn, 1)
        await_full(v_ring, turn, 1)
        for _g in range(0, call.group):
            for i in range(0, masked):
                dk, dv = _add_rows_wide(
                    dk, dv, use, turn, i, call, q_ring, do_ring, shift_s, delta_s, k, v, p_s, ds_s, dq_ring, tiles_ring,
                    unit, cap, cap_inner, ST_L, DQ_L, BLOCK_M, BLOCK_N, D, Q_SLOTS, DO_SLOTS, DQ_SLOTS, SLICES, True,
                )  # fmt: skip
                use += 1
            for i in range(masked, count):
                dk, dv = _add_rows_wide(
                    dk, dv, use, turn, i, call, q_ring, do_ring, shift_s, delta_s, k, v, p_s, ds_s, dq_ring, tiles_ring,
                    unit, cap, cap_inner, ST_L, DQ_L, BLOCK_M, BLOCK_N, D, Q_SLOTS, DO_SLOTS, DQ_SLOTS, SLICES, False,
                )  # fmt: skip
                use += 1
        release(k_ring.empty, turn, 1)
        release(v_ring.empty, turn, 1)
        tile = record(tiles_ring, turn, call)
        dq_use = use * SLICES + 2 * turn
        _hand_over(dv_ptr, dv, dv_h, dv_t, d, tile, call, dq_ring, dq_use, KV_L, BLOCK_N, D, DQ_SLOTS)
        _hand_over(dk_ptr, dk * scale, dk_h, dk_t, d, tile, call, dq_ring, dq_use + 1, KV_L, BLOCK_N, D, DQ_SLOTS)
        release(tiles_ring.empty, turn, 2)
        turn += 1
        count = hear(tiles_ring, turn, call).count


@gluon.jit
def _hand_over(
    x, acc, x_h, x_t, d, tile, call, dq_ring, dq_use,
    LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DQ_SLOTS: gl.constexpr,
):  # fmt: skip
    """dk or dv to `reduce`. Of a packed sequence's last tile the rows that are its own are stored here: those behind them
    belong to the next sequence."""
    dtype: gl.constexpr = x.dtype.element_ty
    if call.cu_seqlens_q is not None:
        if not is_whole(tile, call, BLOCK_N):
            j = tile.n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))[:, None]
            c = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
            head = x + tile.kv_head * x_h + tile.start_k * x_t
            gl.store(head + j * x_t + c, acc.to(dtype), mask=(j < tile.tk) & (c < d))
    out_s = acquire(dq_ring, dq_use, DQ_SLOTS)
    H_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_N, D], dtype)
    out_s._reinterpret(dtype, [1, 1, BLOCK_N, D], H_L).reshape([BLOCK_N, D]).store(acc.to(dtype))
    fence_async_shared()
    release(dq_ring.full, dq_use, DQ_SLOTS)


SIZES = ["rows_b", "rows_h", "batch", "kv_heads", "group", "tq", "tk", "left", "right", "span", "row_tiles", "d"]
POINTERS = ["taken", "dk_ptr", "dv_ptr", "semaphores", "cu_seqlens_q", "cu_seqlens_k"]


@gluon.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, cu_seqlens_q, cu_seqlens_k,
    dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, semaphores, taken,
    dk_h: gl.int64, dk_t: gl.int64, dv_h: gl.int64, dv_t: gl.int64,
    rows_b, rows_h, batch, kv_heads, group, tq, tk, left, right, span, row_tiles, d,
    scale: gl.float32, unit: gl.float32, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr,
    DQ_SLOTS: gl.constexpr, SLICES: gl.constexpr, SPLIT: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    DS_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    RECORD_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    call = Call(cu_seqlens_q, cu_seqlens_k, batch, kv_heads, group, tq, tk, left, right, span)
    q_s = gl.allocate_shared_memory(dtype, [Q_SLOTS, 1, 1, BLOCK_M, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [DO_SLOTS, 1, 1, BLOCK_M, D], do_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, D], v_desc.layout)
    shift_s = gl.allocate_shared_memory(gl.float32, [Q_SLOTS, BLOCK_M], shift_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [DO_SLOTS, BLOCK_M], delta_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], DS_L)
    dq_s = gl.allocate_shared_memory(gl.float32, [DQ_SLOTS, 1, 1, BLOCK_M, D // SLICES], dq_desc.layout)
    tiles_s = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], RECORD_L)
    q_ring = Ring(q_s, barriers(Q_SLOTS, 1), barriers(Q_SLOTS, 1))
    do_ring = Ring(do_s, barriers(DO_SLOTS, 1), barriers(DO_SLOTS, 1))
    k_ring = Ring(k_s, barriers(1, 1), barriers(1, 1))
    v_ring = Ring(v_s, barriers(1, 1), barriers(1, 1))
    dq_ring = Ring(dq_s, barriers(DQ_SLOTS, 1), barriers(DQ_SLOTS, 1))
    tiles_ring = Ring(tiles_s, barriers(2, 1), barriers(2, 2))
    if D > 128:
        p_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], DS_L)
        gl.warp_specialize(
            [
                (
                    _multiply_wide,
                    (
                        dk_ptr, dv_ptr, dk_h, dk_t, dv_h, dv_t, d, call, q_ring, do_ring, shift_s, delta_s, k_ring, v_ring,
                        p_s, ds_s, dq_ring, tiles_ring, scale, unit, cap, cap_inner,
                        BLOCK_M, BLOCK_N, D, Q_SLOTS, DO_SLOTS, DQ_SLOTS, SLICES,
                    ),
                ),
                (
                    load,
                    (
                        q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, q_ring, do_ring, shift_s, delta_s, k_ring,
                        v_ring, tiles_ring, taken, rows_b, rows_h, BLOCK_M, BLOCK_N, Q_SLOTS, DO_SLOTS, DESCENDING,
                    ),
                ),
                (
                    reduce,
                    (
                        dq_desc, dk_desc, dv_desc, call, dq_ring, tiles_ring, semaphores, row_tiles,
                        BLOCK_M, BLOCK_N, D, SLICES, DQ_SLOTS, DESCENDING,
                    ),
                ),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        dk_ptr, dv_ptr, dk_h, dk_t, dv_h, dv_t, d, call, q_ring, do_ring, shift_s, delta_s, k_ring, v_ring,
                        ds_s, dq_ring, tiles_ring, scale, unit, cap, cap_inner,
                        BLOCK_M, BLOCK_N, D, Q_SLOTS, DQ_SLOTS, SPLIT,
                    ),
                ),
                (
                    load,
                    (
                        q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, q_ring, do_ring, shift_s, delta_s, k_ring,
                        v_ring, tiles_ring, taken, rows_b, rows_h, BLOCK_M, BLOCK_N, Q_SLOTS, DO_SLOTS, DESCENDING,
                    ),
                ),
                (
                    reduce,
                    (
                        dq_desc, dk_desc, dv_desc, call, dq_ring, tiles_ring, semaphores, row_tiles,
                        BLOCK_M, BLOCK_N, D, SLICES, DQ_SLOTS, DESCENDING,
                    ),
                ),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip


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


@triton.jit(do_not_specialize=ROW_SIZES)
def _hopper_dsinks_kernel(
    shift, delta, sinks, cu_seqlens_q,
    dsinks,
    sinks_h: tl.int64, dsinks_h: tl.int64, rows_b, rows_h, heads, batch, tq, unit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dsinks[h] −= Σ exp(sink − lse) · delta over the rows of head h."""
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


class Tile(NamedTuple):
    """How the main kernel walks: rows and columns of a tile, buffers of q, do and dq, parts that dq's columns come in,
    and whether tiles with a mask have a loop of their own."""

    m: int
    n: int
    q_slots: int
    do_slots: int
    dq_slots: int
    slices: int
    split: bool


NARROW = Tile(64, 128, 2, 2, 2, 1, True)
TILES = {64: Tile(128, 128, 2, 2, 2, 1, True), 128: NARROW, 256: Tile(64, 64, 2, 1, 1, 2, True)}


def width_of(d: int) -> int:
    """Columns of the tiles: the head dimension padded to a multiple of 128 bytes that is a power of two."""
    return 64 if d <= 64 else 128 if d <= 128 else 256


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _padded(sizes: Sizes) -> int:
    return _ceil_div(sizes.tq, PADDING) * PADDING


def workspace(q: Any, sizes: Sizes, varlen: bool, deterministic: bool) -> Shapes:
    """What `launch` works in: dq in float32, two rows, and semaphores where additions take turns."""
    packed = (q.shape[0] // PADDING + sizes.batch) * PADDING if varlen else 0
    rows = (sizes.hq, packed) if varlen else (sizes.batch, sizes.hq, _padded(sizes))
    acc = (sizes.hq, q.shape[0], sizes.d) if varlen else (sizes.batch, sizes.hq, sizes.tq, sizes.d)
    shapes: Shapes = {"dq_acc": (acc, torch.float32), "shift": (rows, torch.float32), "delta": (rows, torch.float32)}
    shapes["taken"] = ((1,), torch.int32)
    if deterministic:
        tiles = sizes.batch * sizes.hq * (_padded(sizes) // PADDING) * SEMAPHORES
        shapes["semaphores"] = ((tiles,), torch.int32)
    return shapes


def _heads_in_flight(sizes: Sizes, tile: Tile, deterministic: bool) -> int:
    """kv heads whose tiles of columns are walked together. One, except where the band makes the first columns the
    longest: then as many as stay in L2 with their q, do and dq_acc, so that the longest of all of them come first."""
    if deterministic or sizes.right is None or sizes.left is not None:
        return 1
    head_bytes = (sizes.hq // sizes.hkv) * sizes.tq * sizes.d * 8
    return max(1, min(L2_BYTES // max(1, head_bytes), sizes.batch * sizes.hkv))


def launch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, sizes: Sizes, *,
    dq: Tensor, dk: Tensor, dv: Tensor, dsinks: Tensor | None, scratch: Scratch, deterministic: bool,
) -> None:  # fmt: skip
    varlen, cap, width = mask.varlen, mask.softcap, width_of(sizes.d)
    if not q.numel() or not k.numel():
        for x in (dq, dk, dv):
            x.zero_()
        return
    tile = NARROW if cap and width < 256 else TILES[width]
    scale = mask.scale_for(sizes.d)
    unit = 1.0 if cap else math.copysign(max(abs(scale) * LOG2E, LEAST_FACTOR), scale)
    acc, shift, delta = scratch["dq_acc"], scratch["shift"], scratch["delta"]
    acc_b, acc_h = (0, acc.stride(0)) if varlen else acc.stride()[:2]
    rows_b, rows_h = (PADDING, shift.stride(0)) if varlen else shift.stride()[:2]
    semaphores = scratch["semaphores"] if deterministic else None
    blocks = _padded(sizes) // PADDING
    descending = deterministic and sizes.right is not None
    absent = tuple(x is None for x in (dlse, semaphores, sizes.left, sizes.right)) + (varlen,)
    dtype = q.dtype
    with torch.cuda.device_of(q):
        kernel_launch(
            _hopper_rows_kernel, (dtype, *absent, width, sizes.d), blocks * sizes.hq * sizes.batch * 2,
            (
                o, do, lse, dlse, mask.cu_seqlens_q, shift, delta, acc, semaphores, scratch["taken"],
                *_bht(o, varlen), *_bht(do, varlen), *_row(lse, varlen), *_row(dlse, varlen), acc_b, acc_h,
                rows_b, rows_h, sizes.hq, blocks * 2, sizes.tq, unit, sizes.d, width, PADDING // 2, PADDING, SEMAPHORES // 2,
            ), 4,
        )  # fmt: skip
        tiles = sizes.hkv * (k.shape[0] // tile.n + sizes.batch if varlen else _ceil_div(sizes.tk, tile.n) * sizes.batch)
        transposed = acc.transpose(0, 1) if varlen else acc
        kernel_launch(
            _hopper_bwd_kernel, (dtype, *absent, width, tile, bool(cap), descending), min(tiles, multiprocessors(q.device)),
            (
                tile_descriptor(q, varlen, tile.m, width), tile_descriptor(k, varlen, tile.n, width),
                tile_descriptor(v, varlen, tile.n, width), tile_descriptor(do, varlen, tile.m, width),
                row_descriptor(shift, tile.m), row_descriptor(delta, tile.m), mask.cu_seqlens_q, mask.cu_seqlens_k,
                tile_descriptor(transposed, varlen, tile.m, width // tile.slices), tile_descriptor(dk, varlen, tile.n, width),
                tile_descriptor(dv, varlen, tile.n, width), dk, dv, semaphores, scratch["taken"],
                *_bht(dk, varlen)[1:], *_bht(dv, varlen)[1:], rows_b, rows_h,
                sizes.batch, sizes.hkv, sizes.hq // sizes.hkv, sizes.tq, sizes.tk, sizes.left, sizes.right,
                _heads_in_flight(sizes, tile, deterministic), blocks * SEMAPHORES, sizes.d,
                scale, unit, cap * LOG2E if cap else None, scale / cap if cap else None,
                tile.m, tile.n, width, *tile[2:], descending,
            ), 8,
        )  # fmt: skip
        kernel_launch(
            _hopper_dq_kernel, (dtype, varlen, width, sizes.d), blocks * sizes.hq * sizes.batch * 2,
            (
                acc, mask.cu_seqlens_q, dq, acc_b, acc_h, *_bht(dq, varlen), sizes.hq, blocks * 2, sizes.tq, scale,
                sizes.d, width, PADDING // 2,
            ), 4,
        )  # fmt: skip
        if dsinks is not None and mask.sinks is not None:
            kernel_launch(
                _hopper_dsinks_kernel, (dtype, varlen, mask.sinks.dtype, dsinks.dtype), sizes.hq,
                (
                    shift, delta, mask.sinks, mask.cu_seqlens_q, dsinks, mask.sinks.stride(0), dsinks.stride(0),
                    rows_b, rows_h, sizes.hq, sizes.batch, sizes.tq, unit, 1024,
                ), 4,
            )  # fmt: skip


def _row(x: Tensor | None, varlen: bool) -> tuple[int, ...]:
    """Strides of lse and its like over sequences, heads and rows."""
    return (0, 0, 0) if x is None else (0, *x.stride()) if varlen else x.stride()
