"""Attention's backward for Hopper (sm_90a), in Gluon: one fused walk of five products, dq added up in float32 by TMA.

    begin   shift = −lse·log2(e)/unit   delta = −(rowsum(do ∘ o) − dlse)   dq_acc = 0         padding rows: p = 0
    main    a program owns columns j of a kv head and walks the query heads of its group and the rows i that see them
              sᵀ = k qᵀ            pᵀ = exp2(unit · (sᵀ + shift))       hidden pairs 0
              dpᵀ = v doᵀ          dsᵀ = pᵀ ∘ (dpᵀ + delta)
              dv += pᵀ do          dk += dsᵀ q          dq_acc[i] += ds k
    finish  dq = scale · dq_acc, in the tensor's dtype

unit = scale · log2(e), at least 1e-30 large. With a softcap c: t = tanh(sᵀ · scale / c), pᵀ = exp2(c·log2(e)·t + shift) with
unit = 1, and ds gains the factor 1 − t².

**Partitions** of the main kernel: eight warps multiply (hopper_products.py), one loads, one adds dq to memory and stores dk
and dv (hopper_walk.py). Slots of shared memory go from one to the other in rings:

    q, do with shift, delta, notes   load → multiply      a few slots each
    k, v                             load → multiply      one each, filled again while dv and dk of the tile before drain
    dq (float32), later dv, dk       multiply → reduce
    records of tiles                 load → both

**Order.** Programs stay on their multiprocessors and take tiles of columns one by one, so a tile's loads overlap the end of
the tile before. Where the band makes the first columns the longest, those of several heads come first, of as many as
stay in L2 together. Where tiles are too few for the device, several programs share the rows of each and add dk and dv
in float32. Tiles of rows that an edge crosses are masked, the others not.

**Deterministic**: additions to a tile of dq take turns in the order in which tiles of columns are taken. A semaphore for each
tile of rows counts turns. A program only waits for tiles taken before its own, so the wait ends.

Read q, k, v, do once for each tile that sees them, mostly from L2. 10·Tq·Tk·D FLOPs a head, half of it if causal.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_attention import MOST_LAUNCHES, check_addressable
from .hopper_products import Out, multiply, multiply_wide
from .hopper_rows import _hopper_begin_kernel, _hopper_dsinks_kernel, _hopper_finish_kernel
from .hopper_tma import Launch, current, prepare, row_descriptor, tile_descriptor
from .hopper_walk import RECORD, RECORDS, Call, Ring, barriers, load, reduce
from .mask import Mask
from .triton_attention import LEAST_FACTOR, LOG2E, Scratch, Shapes, Sizes, multiprocessors

PADDING = 128  # rows of shift and delta are padded to multiples of it
BLOCK = 64  # rows of a program before and after the products
SEMAPHORES = 2  # of BLOCK rows, enough for the smallest tile
L2_BYTES = 24 * 2**20
LEAST_STEPS = 4  # tiles of rows that a program must have for several to share a tile of columns
SHARED_TILES = 66  # at most so many tiles of columns are shared

SIZES = ["rows_b", "rows_h", "batch", "kv_heads", "group", "tq", "tk", "left", "right", "span", "splits", "row_tiles"]
SIZES += ["d", "dk_b", "dk_h", "dk_t", "dv_b", "dv_h", "dv_t"]
POINTERS = ["dk", "dv", "semaphores", "taken", "cu_seqlens_q", "cu_seqlens_k"]


@gluon.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, cu_seqlens_q, cu_seqlens_k,
    dq_desc, dk_desc, dv_desc, dk, dv, semaphores, taken,
    dk_b: gl.int64, dk_h: gl.int64, dk_t: gl.int64, dv_b: gl.int64, dv_h: gl.int64, dv_t: gl.int64,
    rows_b, rows_h, batch, kv_heads, group, tq, tk, left, right, span, splits, row_tiles, d,
    scale: gl.float32, unit: gl.float32, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr,
    DQ_SLOTS: gl.constexpr, SLICES: gl.constexpr, OUT_SLOTS: gl.constexpr, HALVES: gl.constexpr, PIN: gl.constexpr,
    DESCENDING: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    SCORES_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    NUMBERS_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    call = Call(cu_seqlens_q, cu_seqlens_k, batch, kv_heads, group, tq, tk, left, right, span, splits)
    dk_out = Out(dk, dk_b, dk_h, dk_t)
    dv_out = Out(dv, dv_b, dv_h, dv_t)

    q_s = gl.allocate_shared_memory(dtype, [Q_SLOTS, 1, 1, BLOCK_M, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [DO_SLOTS, 1, 1, BLOCK_M, D], do_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, D], v_desc.layout)
    dq_s = gl.allocate_shared_memory(gl.float32, [DQ_SLOTS, 1, 1, BLOCK_M, D // SLICES], dq_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], SCORES_L)
    shift_s = gl.allocate_shared_memory(gl.float32, [Q_SLOTS, BLOCK_M], shift_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [DO_SLOTS, BLOCK_M], delta_desc.layout)
    notes = gl.allocate_shared_memory(gl.int32, [Q_SLOTS, 1], NUMBERS_L)
    records_s = gl.allocate_shared_memory(gl.int32, [RECORDS * RECORD, 1], NUMBERS_L)

    q_ring = Ring(q_s, barriers(Q_SLOTS, 1), barriers(Q_SLOTS, 1))
    do_ring = Ring(do_s, barriers(DO_SLOTS, 1), barriers(DO_SLOTS, 1))
    k_ring = Ring(k_s, barriers(1, 1), barriers(1, 1))
    v_ring = Ring(v_s, barriers(1, 1), barriers(1, 1))
    dq_ring = Ring(dq_s, barriers(DQ_SLOTS, 1), barriers(DQ_SLOTS, 1))
    records = Ring(records_s, barriers(RECORDS, 1), barriers(RECORDS, 2))

    if D > 128:
        p_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], SCORES_L)
        gl.warp_specialize(
            [
                (
                    multiply_wide,
                    (
                        dk_out, dv_out, d, call, q_ring, do_ring, notes, shift_s, delta_s, k_ring, v_ring, p_s, ds_s, dq_ring,
                        records, scale, unit, cap, cap_inner,
                        BLOCK_M, BLOCK_N, D, Q_SLOTS, DO_SLOTS, DQ_SLOTS, SLICES, OUT_SLOTS,
                    ),
                ),
                (
                    load,
                    (
                        q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, q_ring, do_ring, notes, shift_s,
                        delta_s, k_ring, v_ring, records, taken, rows_b, rows_h,
                        BLOCK_M, BLOCK_N, Q_SLOTS, DO_SLOTS, DESCENDING,
                    ),
                ),
                (
                    reduce,
                    (
                        dq_desc, dk_desc, dv_desc, call, dq_ring, records, semaphores, row_tiles,
                        dtype, BLOCK_M, BLOCK_N, D, SLICES, DQ_SLOTS, OUT_SLOTS, DESCENDING,
                    ),
                ),
            ],
            [1, 1],
            [40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        dk_out, dv_out, d, call, q_ring, do_ring, notes, shift_s, delta_s, k_ring, v_ring, ds_s, dq_ring,
                        records, scale, unit, cap, cap_inner,
                        BLOCK_M, BLOCK_N, D, Q_SLOTS, DQ_SLOTS, OUT_SLOTS, HALVES, PIN,
                    ),
                ),
                (
                    load,
                    (
                        q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, q_ring, do_ring, notes, shift_s,
                        delta_s, k_ring, v_ring, records, taken, rows_b, rows_h,
                        BLOCK_M, BLOCK_N, Q_SLOTS, DO_SLOTS, DESCENDING,
                    ),
                ),
                (
                    reduce,
                    (
                        dq_desc, dk_desc, dv_desc, call, dq_ring, records, semaphores, row_tiles,
                        dtype, BLOCK_M, BLOCK_N, D, SLICES, DQ_SLOTS, OUT_SLOTS, DESCENDING,
                    ),
                ),
            ],
            [1, 1],
            [24, 24],
        )  # fmt: skip


class Tile(NamedTuple):
    """How the main kernel walks: rows and columns of a tile, slots of q, do and dq, slices of dq's columns, slots of dq that a
    tile of dk or dv takes, whether rows are walked in halves, and whether products wait for exponentials."""

    m: int
    n: int
    q_slots: int
    do_slots: int
    dq_slots: int
    slices: int
    out_slots: int
    halves: bool
    pin: bool


TILES = {
    64: Tile(128, 128, 2, 2, 2, 1, 1, True, False),
    128: Tile(64, 128, 2, 2, 2, 1, 1, False, False),
    256: Tile(64, 64, 2, 1, 2, 4, 2, False, False),
}
CAPPED = TILES | {64: Tile(64, 128, 2, 2, 2, 1, 1, False, False)}  # a softcap takes registers


def width_of(d: int) -> int:
    """Columns of the tiles: the head dimension padded to a power of two of at least 128 bytes."""
    return 64 if d <= 64 else 128 if d <= 128 else 256


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _tiles(sizes: Sizes, total_k: int | None) -> int:
    """Tiles of columns; of packed sequences at most."""
    n = TILES[width_of(sizes.d)].n
    if total_k is not None:
        return sizes.hkv * (total_k // n + sizes.batch)
    return sizes.hkv * sizes.batch * _ceil_div(sizes.tk, n)


def workspace(q: Any, k: Any, sizes: Sizes, varlen: bool, deterministic: bool) -> Shapes:
    """dq in float32, two rows, and a count of tiles; semaphores where additions take turns, else float32 dk and dv of the few
    tiles that several programs may share. A smaller batch never needs more."""
    padded = _ceil_div(sizes.tq, PADDING) * PADDING
    rows: tuple[int, ...] = (sizes.batch, sizes.hq, padded)
    if varlen:
        rows = (sizes.hq, (q.shape[0] // PADDING + sizes.batch) * PADDING)
    acc = (sizes.hq, q.shape[0], sizes.d) if varlen else (sizes.batch, sizes.hq, sizes.tq, sizes.d)
    shapes: Shapes = {"dq_acc": (acc, torch.float32), "shift": (rows, torch.float32), "delta": (rows, torch.float32)}
    shapes["taken"] = ((1,), torch.int32)
    if deterministic:
        shapes["semaphores"] = ((sizes.batch * sizes.hq * padded // BLOCK * SEMAPHORES,), torch.int32)
    else:
        columns = min(SHARED_TILES, _tiles(sizes, k.shape[0] if varlen else None)) * TILES[width_of(sizes.d)].n
        shapes["dkdv_acc"] = ((2, columns * sizes.d), torch.float32)
    return shapes


def splits_for(sizes: Sizes, tiles: int, device: torch.device) -> int:
    """Programs that share a tile of columns: as many as fill the device, each with some rows to walk."""
    if not 0 < tiles <= SHARED_TILES:
        return 1
    rows = sizes.tq if sizes.left is None else min(sizes.tq, sizes.left + TILES[width_of(sizes.d)].n)
    steps = sizes.hq // sizes.hkv * _ceil_div(rows, TILES[width_of(sizes.d)].m)
    return max(1, min(multiprocessors(device) // tiles, steps // LEAST_STEPS))


def heads_together(sizes: Sizes) -> int:
    """kv heads whose tiles of columns are taken together. One, except where the band makes the first columns the
    longest: then as many as stay in L2 with their q, do and dq_acc, so that the longest of all of them come first."""
    if sizes.right is None or sizes.left is not None:
        return 1
    head_bytes = max(1, sizes.hq // sizes.hkv * sizes.tq * sizes.d * 8)
    return max(1, min(L2_BYTES // head_bytes, sizes.batch * sizes.hkv))


_prepared: dict[tuple[Any, ...], tuple[bool, tuple[Launch, ...]]] = {}  # (programs share tiles, launches) by address


def launch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, sizes: Sizes, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dsinks: Tensor | None, scratch: Scratch, deterministic: bool,
) -> None:  # fmt: skip
    if not q.numel() or not k.numel():
        for x in (dq, dk, dv):
            if x is not None:
                x.zero_()
        return
    strided = (q, k, v, o, do, dq, dk, dv, lse, dlse)
    others = (dsinks, mask.sinks, mask.cu_seqlens_q, mask.cu_seqlens_k, *scratch.values())
    key = (
        tuple([None if x is None else x.data_ptr() for x in strided + others]),
        tuple([None if x is None else x.stride() for x in strided]),
        sizes, q.shape[0], k.shape[0], q.dtype, q.device, mask.scale, mask.softcap, deterministic,
        None if dsinks is None or mask.sinks is None else (dsinks.dtype, mask.sinks.dtype),
    )  # fmt: skip
    with current(q.device):
        prepared = _prepared.get(key)
        if prepared is None:
            if len(_prepared) >= MOST_LAUNCHES:
                _prepared.clear()
            prepared = _prepared[key] = _prepare(
                q, k, v, o, lse, do, dlse, mask, sizes, dq, dk, dv, dsinks, scratch, deterministic
            )
        shared, launches = prepared
        if shared:
            scratch["dkdv_acc"].zero_()
        for each in launches:
            each()


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, sizes: Sizes,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dsinks: Tensor | None, scratch: Scratch, deterministic: bool,
) -> tuple[bool, tuple[Launch, ...]]:  # fmt: skip
    varlen, d, cap, scale, width = mask.varlen, sizes.d, mask.softcap, mask.scale_for(sizes.d), width_of(sizes.d)
    check_addressable(varlen, o=o, do=do, dq=dq, dk=dk, dv=dv)
    tile = (CAPPED if cap else TILES)[width]
    tiles = _tiles(sizes, k.shape[0] if varlen else None)
    splits = 1 if deterministic else splits_for(sizes, tiles, q.device)
    unit = 1.0 if cap else math.copysign(max(abs(scale) * LOG2E, LEAST_FACTOR), scale)
    descending = deterministic and sizes.right is not None
    cu_q, cu_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    acc, shift, delta = scratch["dq_acc"], scratch["shift"], scratch["delta"]
    semaphores = scratch["semaphores"] if deterministic else None
    rows_b, rows_h = (PADDING, shift.stride(0)) if varlen else shift.stride()[:2]
    row_tiles = _ceil_div(sizes.tq, PADDING) * PADDING // BLOCK
    if varlen:
        acc = acc.transpose(0, 1)
    sums_k, sums_v = dk, dv
    if splits > 1:
        like = (sizes.hkv, k.shape[0], d) if varlen else (sizes.batch, sizes.hkv, sizes.tk, d)
        sums_k, sums_v = (x[: math.prod(like)].view(like) for x in scratch["dkdv_acc"])
        if varlen:
            sums_k, sums_v = sums_k.transpose(0, 1), sums_v.transpose(0, 1)
    code = (q.dtype, varlen, dlse is None, dk is None, dv is None, deterministic, width, d)

    begin = prepare(
        _hopper_begin_kernel, code, row_tiles * sizes.hq * sizes.batch,
        (
            o, do, lse, dlse, cu_q, shift, delta, acc, semaphores, scratch["taken"],
            *_bht(o, varlen), *_bht(do, varlen), *_row(lse, varlen), *_row(dlse, varlen), *_bht(acc, varlen)[:2],
            rows_b, rows_h, sizes.hq, row_tiles, sizes.tq, unit, d, width, BLOCK, PADDING, SEMAPHORES,
        ), num_warps=4,
    )  # fmt: skip
    main = prepare(
        _hopper_bwd_kernel, (*code, tile, cap == 0.0, sizes.left is None, sizes.right is None, splits > 1),
        min(tiles * splits, multiprocessors(q.device)),
        (
            tile_descriptor(q, varlen, tile.m, width), tile_descriptor(k, varlen, tile.n, width),
            tile_descriptor(v, varlen, tile.n, width), tile_descriptor(do, varlen, tile.m, width),
            row_descriptor(shift, tile.m), row_descriptor(delta, tile.m), cu_q, cu_k,
            tile_descriptor(acc, varlen, tile.m, width // tile.slices),
            None if dk is None else tile_descriptor(dk, varlen, tile.n, width),
            None if dv is None else tile_descriptor(dv, varlen, tile.n, width),
            sums_k, sums_v, semaphores, scratch["taken"], *_bht(sums_k, varlen), *_bht(sums_v, varlen),
            rows_b, rows_h, sizes.batch, sizes.hkv, sizes.hq // sizes.hkv, sizes.tq, sizes.tk, sizes.left, sizes.right,
            1 if deterministic else heads_together(sizes), splits if splits > 1 else None, row_tiles * SEMAPHORES, d,
            scale, unit, cap * LOG2E if cap else None, scale / cap if cap else None,
            tile.m, tile.n, width, *tile[2:6], tile.out_slots if splits == 1 else 0, *tile[7:], descending,
        ), num_warps=8,
    )  # fmt: skip
    launches = [begin, main]
    finished: list[tuple[Tensor | None, Tensor | None, Tensor | None, int, int, float]] = [
        (acc, cu_q, dq, sizes.hq, sizes.tq, scale)
    ]
    if splits > 1:
        finished += [(sums_k, cu_k, dk, sizes.hkv, sizes.tk, 1.0), (sums_v, cu_k, dv, sizes.hkv, sizes.tk, 1.0)]
    for sums, cu_seqlens, x, heads, size, factor in finished:
        if x is not None:
            blocks = _ceil_div(size, BLOCK)
            numbers = (*_bht(sums, varlen)[:2], *_bht(x, varlen), heads, blocks, size, factor, d, width, BLOCK)
            programs, tensors = blocks * heads * sizes.batch, (sums, cu_seqlens, x)
            launches.append(
                prepare(_hopper_finish_kernel, (q.dtype, varlen, d), programs, (*tensors, *numbers), num_warps=4)
            )
    if dsinks is not None and mask.sinks is not None:
        sums_of = (shift, delta, mask.sinks, cu_q, dsinks, mask.sinks.stride(0), dsinks.stride(0))
        dtypes = (varlen, mask.sinks.dtype, dsinks.dtype)
        heads_of = (*sums_of, rows_b, rows_h, sizes.batch, sizes.tq, unit, 1024)
        launches.append(prepare(_hopper_dsinks_kernel, dtypes, sizes.hq, heads_of, num_warps=4))
    return splits > 1, tuple(launches)


def _bht(x: Tensor | None, varlen: bool) -> tuple[int, int, int]:
    """Strides over sequences, heads and rows; packed sequences have no stride between them."""
    if x is None:
        return 0, 0, 0
    return (0, x.stride(1), x.stride(0)) if varlen else (x.stride(0), x.stride(1), x.stride(2))


def _row(x: Tensor | None, varlen: bool) -> tuple[int, ...]:
    """The same for lse and its like."""
    return (0, 0, 0) if x is None else (0, *x.stride()) if varlen else x.stride()
