"""Attention's backward for Hopper (sm_90a), in Gluon: one fused walk of five products, dq added up in float32 by TMA.

    rows    shift = −lse·log2(e)/unit   delta = −(rowsum(do ∘ o) − dlse)   dq_acc = 0         padding rows: p = 0
    main    a program owns columns j of a kv head and walks the query heads of its group and the rows i that see them
              sᵀ = k qᵀ            pᵀ = exp2(unit · (sᵀ + shift))       hidden pairs 0
              dpᵀ = v doᵀ          dsᵀ = pᵀ ∘ (dpᵀ + delta)
              dv += pᵀ do          dk += dsᵀ q          dq_acc[i] += ds k
    dq      dq = scale · dq_acc, in the tensor's dtype

unit = scale · log2(e), at least 1e-30 large. With a softcap c: t = tanh(sᵀ · scale / c), pᵀ = exp2(c·log2(e)·t + shift) with
unit = 1, and ds gains the factor 1 − t².

**Partitions** of the main kernel: eight warps multiply (hopper_products.py), one loads, one adds dq to memory and stores dk
and dv (hopper_walk.py). Slots of shared memory go from one to the other in rings:

    q, do with shift, delta          load → multiply      two slots each (do of D > 128: one)
    k, v                             load → multiply      one each, filled again while dv and dk of the tile before drain
    dq (float32), later dv, dk       multiply → reduce
    records of tiles                 load → both

**Order.** Programs stay on their multiprocessors and take tiles of columns one by one, so a tile's loads overlap the end of
the tile before. Where the band makes the first columns the longest, those of several heads come first, of as many as
stay in L2 together.

**Deterministic**: additions to a tile of dq take turns in the order in which tiles of columns are taken. A semaphore for each
tile of rows counts turns. A program only waits for tiles taken before its own, so the wait ends.

10·Tq·Tk·D FLOPs a head, half of it if causal. Two kinds of call are left to Triton's backward, which needs less scratch: those
with gradients of some inputs only, and those whose o, do, dq, dk or dv TMA can't address.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import triton_attention
from .hopper_products import multiply, multiply_wide
from .hopper_rows import _hopper_dq_kernel, _hopper_dsinks_kernel, _hopper_rows_kernel
from .hopper_tma import launch as launch_kernel
from .hopper_tma import refusal, row_descriptor, tile_descriptor
from .hopper_walk import FIELDS, Call, Ring, barriers, load, reduce
from .mask import Mask
from .triton_attention import LEAST_FACTOR, LOG2E, Scratch, Shapes, Sizes, _bht, multiprocessors

PADDING = 128  # rows of shift and delta are padded to multiples of it
SEMAPHORES = 4  # of PADDING rows, enough for the smallest tile
L2_BYTES = 40 * 2**20

SIZES = [
    "dk_h",
    "dk_t",
    "dv_h",
    "dv_t",
    "rows_b",
    "rows_h",
    "batch",
    "kv_heads",
    "group",
    "tq",
    "tk",
    "left",
    "right",
    "span",
    "row_tiles",
    "d",
]
POINTERS = ["taken", "dk_ptr", "dv_ptr", "semaphores", "cu_seqlens_q", "cu_seqlens_k"]


@gluon.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, cu_seqlens_q, cu_seqlens_k,
    dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, semaphores, taken,
    dk_h, dk_t, dv_h, dv_t,
    rows_b, rows_h, batch, kv_heads, group, tq, tk, left, right, span, row_tiles, d,
    scale, unit, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr,
    DQ_SLOTS: gl.constexpr, SLICES: gl.constexpr, DESCENDING: gl.constexpr,
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
                    multiply_wide,
                    (
                        dk_ptr, dv_ptr, dk_h, dk_t, dv_h, dv_t, d, call, q_ring, do_ring, shift_s, delta_s, k_ring, v_ring,
                        p_s, ds_s, dq_ring, tiles_ring, scale, unit, cap, cap_inner,
                        BLOCK_M, BLOCK_N, D, Q_SLOTS, DO_SLOTS, DQ_SLOTS, SLICES,
                    ),
                ),
                (
                    load,
                    (
                        q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, q_ring, do_ring, shift_s, delta_s,
                        k_ring, v_ring, tiles_ring, taken, rows_b, rows_h, BLOCK_M, BLOCK_N, Q_SLOTS, DO_SLOTS, DESCENDING,
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
                    multiply,
                    (
                        dk_ptr, dv_ptr, dk_h, dk_t, dv_h, dv_t, d, call, q_ring, do_ring, shift_s, delta_s, k_ring, v_ring,
                        ds_s, dq_ring, tiles_ring, scale, unit, cap, cap_inner,
                        BLOCK_M, BLOCK_N, D, Q_SLOTS, DQ_SLOTS,
                    ),
                ),
                (
                    load,
                    (
                        q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, q_ring, do_ring, shift_s, delta_s,
                        k_ring, v_ring, tiles_ring, taken, rows_b, rows_h, BLOCK_M, BLOCK_N, Q_SLOTS, DO_SLOTS, DESCENDING,
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


class Tile(NamedTuple):
    """How the main kernel walks: rows and columns of a tile, slots of q, do and dq, slices of dq's columns."""

    m: int
    n: int
    q_slots: int
    do_slots: int
    dq_slots: int
    slices: int


NARROW = Tile(64, 128, 2, 2, 2, 1)
TILES = {64: Tile(128, 128, 2, 2, 2, 1), 128: NARROW, 256: Tile(64, 64, 2, 1, 1, 2)}


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
    """kv heads whose tiles of columns are taken together. One, except where the band makes the first columns the
    longest: then as many as stay in L2 with their q, do and dq_acc, so that the longest of all of them come first."""
    if deterministic or sizes.right is None or sizes.left is not None:
        return 1
    head_bytes = (sizes.hq // sizes.hkv) * sizes.tq * sizes.d * 8
    return max(1, min(L2_BYTES // max(1, head_bytes), sizes.batch * sizes.hkv))


def launch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, sizes: Sizes, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dsinks: Tensor | None, scratch: Scratch, deterministic: bool,
) -> None:  # fmt: skip
    varlen, cap, width = mask.varlen, mask.softcap, width_of(sizes.d)
    if not q.numel() or not k.numel():
        for x in (dq, dk, dv):
            if x is not None:
                x.zero_()
        return
    if dq is None or dk is None or dv is None or any(refusal("", x, varlen) for x in (o, do, dq, dk, dv)):
        delta, lse2 = scratch["dq_acc"].view(-1)[: 2 * lse.numel()].view(2, *lse.shape)
        triton_attention.bwd(
            q, k, v, o, lse, do, dlse, mask, dq=dq, dk=dk, dv=dv, dbias=None, dsinks=dsinks,
            scratch={"delta": delta, "lse2": lse2}, deterministic=deterministic,
        )  # fmt: skip
        return
    tile = NARROW if cap and width < 256 else TILES[width]
    scale = float(mask.scale_for(sizes.d))
    unit = 1.0 if cap else math.copysign(max(abs(scale) * LOG2E, LEAST_FACTOR), scale)
    acc, shift, delta = scratch["dq_acc"], scratch["shift"], scratch["delta"]
    acc_b, acc_h = (0, acc.stride(0)) if varlen else acc.stride()[:2]
    rows_b, rows_h = (PADDING, shift.stride(0)) if varlen else shift.stride()[:2]
    semaphores = scratch["semaphores"] if deterministic else None
    blocks = _padded(sizes) // PADDING
    descending = deterministic and sizes.right is not None
    absent = (*(x is None for x in (dlse, semaphores, sizes.left, sizes.right)), varlen)
    dtype = q.dtype
    with torch.cuda.device_of(q):
        launch_kernel(
            _hopper_rows_kernel, (dtype, *absent, width, sizes.d), blocks * sizes.hq * sizes.batch * 2,
            (
                o, do, lse, dlse, mask.cu_seqlens_q, shift, delta, acc, semaphores, scratch["taken"],
                *_bht(o, varlen), *_bht(do, varlen), *_row(lse, varlen), *_row(dlse, varlen), acc_b, acc_h,
                rows_b, rows_h, sizes.hq, blocks * 2, sizes.tq, unit, sizes.d, width, PADDING // 2, PADDING, SEMAPHORES // 2,
            ), 4,
        )  # fmt: skip
        per_head = k.shape[0] // tile.n + sizes.batch if varlen else _ceil_div(sizes.tk, tile.n) * sizes.batch
        tiles = sizes.hkv * per_head
        transposed = acc.transpose(0, 1) if varlen else acc
        launch_kernel(
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
        launch_kernel(
            _hopper_dq_kernel, (dtype, varlen, width, sizes.d), blocks * sizes.hq * sizes.batch * 2,
            (
                acc, mask.cu_seqlens_q, dq, acc_b, acc_h, *_bht(dq, varlen), sizes.hq, blocks * 2, sizes.tq, scale,
                sizes.d, width, PADDING // 2,
            ), 4,
        )  # fmt: skip
        if dsinks is not None and mask.sinks is not None:
            launch_kernel(
                _hopper_dsinks_kernel, (dtype, varlen, mask.sinks.dtype, dsinks.dtype), sizes.hq,
                (
                    shift, delta, mask.sinks, mask.cu_seqlens_q, dsinks, mask.sinks.stride(0), dsinks.stride(0),
                    rows_b, rows_h, sizes.hq, sizes.batch, sizes.tq, unit, 1024,
                ), 4,
            )  # fmt: skip


def _row(x: Tensor | None, varlen: bool) -> tuple[int, ...]:
    """Strides of lse and its like over sequences, heads and rows."""
    return (0, 0, 0) if x is None else (0, *x.stride()) if varlen else x.stride()
