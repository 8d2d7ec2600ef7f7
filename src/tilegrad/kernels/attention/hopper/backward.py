"""Attention's backward for Hopper (sm_90a), in Gluon: one fused walk of five products, dq added up in float32 by TMA.

    begin   shift = −lse·log2(e)   delta = −(rowsum(do ∘ o) − dlse)   dq_acc = 0              padding rows: p = 0
    main    a program owns columns j of a kv head and walks the query heads of its group and the rows i that see them
              sᵀ = k qᵀ            pᵀ = exp2(unit · sᵀ + shift)         hidden pairs 0
              dpᵀ = v doᵀ          dsᵀ = pᵀ ∘ (dpᵀ + delta)
              dv += pᵀ do          dk += dsᵀ q          dq_acc[i] += ds k
    finish  dq = scale · dq_acc, in the tensor's dtype

unit = scale · log2(e), at least 1e-30 large. With a softcap c: t = tanh(sᵀ · scale / c), pᵀ = exp2(c·log2(e)·t + shift), and ds
gains the factor 1 − t². Beyond D 64 shift is kept divided by unit and multiplied again: 1 % faster at D 128, 2 % slower at 64.

**Partitions** of the main kernel: eight warps multiply (backward_mma.py; beyond D 128 two partitions of four, with a task
each: backward_wide.py), one loads, one adds dq to memory and stores dk and dv (backward_schedule.py). Slots of shared
memory go from one to the other in rings:

    q, do with shift, delta, notes   load → multiply      two slots each (do of D > 128: one)
    k, v                             load → multiply      one each, filled again while dv and dk of the tile before drain
    p, ds of D > 128                 between the two that multiply
    dq (float32), later dv, dk       multiply → reduce
    records of tiles                 load → all others

**Order.** Programs stay on their multiprocessors and take tiles of columns one by one, so a tile's loads overlap the end of
the tile before. Where the band makes the first columns the longest, those of several heads come first: of no more than stay in
L2, and so many that programs end together. Where tiles are too few for the device, several programs share the rows of each, add
dk and dv in float32, and the last of them stores. Tiles of rows that an edge crosses are masked, the others not.

**Packed sequences** are bounded by TMA itself (`packed_descriptor`): rows of the next sequence, NaN or not, are never read.

**Deterministic**: additions to a tile of dq take turns in the order in which tiles of columns are taken; the first stores. A
counter for each tile of rows counts turns. A program only waits for tiles taken before its own, so the wait ends.

10·Tq·Tk·D FLOPs a head, half of it if causal. Launches are kept by the addresses, sizes and strides of the call: a training
step makes the same ones again.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import functools
import heapq
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...scratch import Scratch, Shapes
from ..mask import Mask
from ..problem import LOG2E, Sizes, tma_refusal
from ..triton.launch import LEAST_FACTOR, multiprocessors
from .backward_mma import Factors, Sums, multiply
from .backward_schedule import RECORD, RECORDS, WRAP, Call, Inputs, Ring, barriers, load, reduce, ring
from .backward_wide import OUT_SLOTS, SLICES, WIDE_REGISTERS, grade, new_exchange, weigh
from .launch import MOST_LAUNCHES
from .prepost import _hopper_begin_kernel, _hopper_dsinks_kernel, _hopper_finish_kernel
from .tma import Descriptor, Launch, current, layout_of, prepare, row_descriptor, tile_descriptor

PADDING = 128  # rows of shift and delta are padded to multiples of it
BLOCK = 64  # rows of a program before and after the products
Q_SLOTS = gl.constexpr(2)
DQ_SLOTS = gl.constexpr(2)
REGISTERS = gl.constexpr(24)  # of threads that move data
DIVIDED = gl.constexpr(64)  # of wider heads shift is kept divided by unit
L2_BYTES = 24 * 2**20
SHARED_TILES = 66  # at most so many tiles of columns are shared among programs
MOST_SPLITS = 32
MANY = 24  # tiles of columns for each program
START = 6  # a program's start at a tile and its end there take as long as so many tiles of rows

SIZES = [
    "rows_b",
    "rows_h",
    "batch",
    "kv_heads",
    "all_heads",
    "group",
    "tq",
    "tk",
    "left",
    "right",
    "span",
    "splits",
    "row_tiles",
]
POINTERS = ["arrived", "turns", "taken", "cu_seqlens_q", "cu_seqlens_k"]


@gluon.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, cu_seqlens_q, cu_seqlens_k,
    dq_desc, dk_desc, dv_desc, sums, arrived, turns, taken,
    rows_b, rows_h, batch, kv_heads, all_heads, group, tq, tk, left, right, span, splits, row_tiles,
    scale, unit, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DO_SLOTS: gl.constexpr, SLICES: gl.constexpr,
    OUT_SLOTS: gl.constexpr, HALVES: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    NUMBERS_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    call = Call(cu_seqlens_q, cu_seqlens_k, batch, kv_heads, all_heads, group, tq, tk, left, right, span, splits)
    factors = Factors(scale, unit, cap, cap_inner, D > DIVIDED)

    WIDE: gl.constexpr = D > 128
    READERS: gl.constexpr = 2 if WIDE else 1  # partitions that multiply
    inputs = Inputs(
        ring(q_desc, Q_SLOTS, READERS), ring(do_desc, DO_SLOTS, READERS), ring(k_desc, 1, READERS), ring(v_desc, 1),
        gl.allocate_shared_memory(gl.float32, [Q_SLOTS, BLOCK_M], shift_desc.layout),
        gl.allocate_shared_memory(gl.float32, [DO_SLOTS, BLOCK_M], delta_desc.layout),
        gl.allocate_shared_memory(gl.int32, [Q_SLOTS, 1], NUMBERS_L),
    )  # fmt: skip
    dq_ring = ring(dq_desc, DQ_SLOTS)
    records_s = gl.allocate_shared_memory(gl.int32, [RECORDS * RECORD, 1], NUMBERS_L)
    records = Ring(records_s, barriers(RECORDS, 1), barriers(RECORDS, READERS + 1))
    # the lists below are alike, but a tuple that has a name loses its constants in Gluon
    if WIDE:
        exchange = new_exchange(dtype, BLOCK_N, BLOCK_M)
        gl.warp_specialize([
            (weigh, (Sums(sums, arrived), call, inputs, exchange, dq_ring, records, factors)),
            (grade, (Sums(sums, arrived), call, inputs, exchange, dq_ring, records, factors)),
            (load, (
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, inputs, records, taken, rows_b, rows_h,
                BLOCK_M, BLOCK_N, DESCENDING,
            )),
            (reduce, (
                dq_desc, dk_desc, dv_desc, call, inputs, dq_ring, records, turns, row_tiles, rows_b, rows_h,
                BLOCK_M, BLOCK_N, D, SLICES, OUT_SLOTS, DESCENDING,
            )),
        ], [4, 1, 1], [WIDE_REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
    else:
        SCORES_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
        ds_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], SCORES_L)
        gl.warp_specialize([
            (multiply, (Sums(sums, arrived), call, inputs, ds_s, dq_ring, records, factors, HALVES)),
            (load, (
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, inputs, records, taken, rows_b, rows_h,
                BLOCK_M, BLOCK_N, DESCENDING,
            )),
            (reduce, (
                dq_desc, dk_desc, dv_desc, call, inputs, dq_ring, records, turns, row_tiles, rows_b, rows_h,
                BLOCK_M, BLOCK_N, D, SLICES, OUT_SLOTS, DESCENDING,
            )),
        ], [1, 1], [REGISTERS, REGISTERS])  # fmt: skip


class Tile(NamedTuple):
    """How the main kernel walks: rows and columns of a tile, slots of do, slices of dq's columns, slots of dq that a tile of
    dk or dv takes, and whether rows are walked in halves."""

    m: int
    n: int
    do_slots: int
    slices: int
    out_slots: int
    halves: bool


TILES = {
    64: Tile(128, 128, 2, 1, 1, True),
    128: Tile(64, 128, 2, 1, 1, False),
    256: Tile(64, 64, 1, SLICES.value, OUT_SLOTS.value, False),
}
CAPPED = TILES | {64: Tile(64, 128, 2, 1, 1, False)}  # a softcap takes registers


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


def workspace(q: Any, sizes: Sizes, varlen: bool, deterministic: bool) -> Shapes:
    """dq in float32, two rows, counters, and unless deterministic float32 dk and dv of tiles that several programs may share.
    A smaller batch never needs more."""
    padded = _ceil_div(sizes.tq, PADDING) * PADDING
    rows: tuple[int, ...] = (sizes.batch, sizes.hq, padded)
    if varlen:
        rows = (sizes.hq, (q.shape[0] // PADDING + sizes.batch) * PADDING)
    shapes: Shapes = {
        "dq_acc": ((*rows, sizes.d), torch.float32),
        "shift": (rows, torch.float32),
        "padded_delta": (rows, torch.float32),
    }
    shapes["counters"] = ((1 + 2 * SHARED_TILES + sizes.batch * sizes.hq * padded // BLOCK,), torch.int32)
    if not deterministic:
        tile, width = TILES[width_of(sizes.d)], width_of(sizes.d)
        shapes["sums"] = ((max(1, min(SHARED_TILES, _tiles(sizes, None))), 2, tile.n, width), torch.float32)
    return shapes


def splits_for(sizes: Sizes, tiles: int, programs: int, m: int) -> int:
    """Programs that share each tile of columns where tiles are too few for the device: as many as end soonest."""
    if not 0 < tiles <= min(SHARED_TILES, programs // 2):
        return 1
    rows = sizes.tq if sizes.left is None else min(sizes.tq, sizes.left + BLOCK)
    steps = sizes.hq // sizes.hkv * _ceil_div(rows, m)

    def duration(splits: int) -> int:
        adding_up = START if splits > 1 else 0
        return _ceil_div(tiles * splits, programs) * (_ceil_div(steps, splits) + START) + adding_up

    return min(range(1, min(MOST_SPLITS, steps) + 1), key=duration)


def heads_together(sizes: Sizes, programs: int) -> int:
    """kv heads whose tiles of columns are taken together. One, except where the band makes the first columns the longest:
    then those of several heads come first, of no more than stay in L2 with q, do and dq_acc of one query head each."""
    if sizes.right is None or sizes.left is not None:
        return 1
    heads, tile = sizes.batch * sizes.hkv, TILES[width_of(sizes.d)]
    most = max(1, min(L2_BYTES // max(1, sizes.tq * sizes.d * 8), heads))
    rows, before = _ceil_div(sizes.tq, tile.m), sizes.tq - sizes.tk - sizes.right
    firsts = [max(0, n * tile.n + before) // tile.m for n in range(_ceil_div(sizes.tk, tile.n))]
    steps = tuple([START + sizes.hq // sizes.hkv * max(0, rows - first) for first in firsts])
    return _soonest(most, heads, steps, programs)


@functools.lru_cache(1024)
def _soonest(most: int, heads: int, steps: tuple[int, ...], programs: int) -> int:
    """Of 1, 2, 4 … `most` heads together the fewest with which the last program ends within half a percent of the soonest, if
    each takes the next tile when it is free. `steps`: of each of a head's tiles. Many tiles even out in any case."""
    if heads * len(steps) > MANY * programs:
        return most

    def end(together: int) -> int:
        ends = [0] * programs
        for first in range(0, heads, together):
            for length in steps:
                for _ in range(min(together, heads - first)):
                    heapq.heapreplace(ends, ends[0] + length)
        return max(ends)

    ends = {span: end(span) for span in sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})}
    return next(span for span in ends if ends[span] <= 1.005 * min(ends.values()))


def packed_descriptor(x: Tensor, rows: int, columns: int) -> Descriptor:
    """Packed (total, H, D) in boxes of `rows`, bounded by the sequence: reads beyond its end give zeros, writes and additions
    are dropped, though the next sequence lies there.

    Row r of the n rows from s on is at (W, s + n, h, W − n + r, c): an end at W = 2³⁰ for every sequence. Addresses come
    out right because they are taken modulo 2⁶⁴: W·(2³⁴ − t) + (s + n)·t + (W − n + r)·t = 2⁶⁴ + (s + r)·t for rows t apart.
    """
    box = (1, 1, 1, rows, columns)
    (total, h, d), (x_t, x_h, _) = x.shape, x.stride()
    x_t = x_t if total > 1 else h * d  # the stride of an axis of 1 means nothing, but TMA wants it in order
    sizes, most = WRAP.value, 2**31 - 2**16
    strides = [2**34 - x_t, x_t, x_h if h > 1 else x_t, x_t, 1]
    return Descriptor(x, [most, most, h, sizes, d], strides, list(box), layout_of(box, x.dtype))


def _descriptor(x: Tensor, varlen: bool, rows: int, columns: int) -> Descriptor:
    return packed_descriptor(x, rows, columns) if varlen else tile_descriptor(x, varlen, rows, columns)


def _rows_descriptor(acc: Tensor, rows: int, columns: int) -> Descriptor:
    """dq_acc (…, D) as one run of rows."""
    d = acc.shape[-1]
    return Descriptor(acc, [acc.numel() // d, d], [d, 1], [rows, columns], layout_of((rows, columns), acc.dtype))


_prepared: dict[tuple[Any, ...], tuple[Launch, ...]] = {}


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
        tuple([None if x is None else (x.dtype, x.stride()) for x in (dsinks, mask.sinks)]),
    )  # fmt: skip
    with current(q.device):
        launches = _prepared.get(key)
        if launches is None:
            if len(_prepared) >= MOST_LAUNCHES:
                _prepared.clear()
            launches = _prepared[key] = _prepare(
                q, k, v, o, lse, do, dlse, mask, sizes, dq, dk, dv, dsinks, scratch, deterministic
            )
        for each in launches:
            each()


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, sizes: Sizes,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dsinks: Tensor | None, scratch: Scratch, deterministic: bool,
) -> tuple[Launch, ...]:  # fmt: skip
    varlen, d, cap, scale, width = mask.varlen, sizes.d, mask.softcap, float(mask.scale_for(sizes.d)), width_of(sizes.d)
    for name, x in (("o", o), ("do", do), ("dq", dq), ("dk", dk), ("dv", dv)):
        unfit = None if x is None else tma_refusal(name, x, varlen)
        if unfit:
            raise ValueError(f"{unfit}; kernel='triton' takes it as it is")
    tile = (CAPPED if cap else TILES)[width]
    programs, tiles = multiprocessors(q.device), _tiles(sizes, k.shape[0] if varlen else None)
    splits = 1 if deterministic else splits_for(sizes, tiles, programs, tile.m)
    shared = splits > 1
    unit = 1.0 if cap else math.copysign(max(abs(scale) * LOG2E, LEAST_FACTOR), scale)
    divisor = unit if width > DIVIDED.value else 1.0
    descending = deterministic and sizes.right is not None
    cu_q, cu_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    acc, shift, delta, counters = scratch["dq_acc"], scratch["shift"], scratch["padded_delta"], scratch["counters"]
    arrived, turns = counters[1:], counters[1 + 2 * SHARED_TILES :]
    sums = scratch["sums"] if shared else None
    summed = 0 if sums is None else min(sums.numel(), tiles * sums.stride(0))
    rows_b, rows_h = (PADDING, shift.stride(0)) if varlen else shift.stride()[:2]
    row_tiles = _ceil_div(sizes.tq, PADDING) * PADDING // BLOCK
    code = (q.dtype, varlen, dlse is None, dk is None, dv is None, deterministic, shared, d, tile)

    begin = prepare(
        _hopper_begin_kernel, code, row_tiles * sizes.hq * sizes.batch,
        (
            o, do, lse, dlse, cu_q, shift, delta, None if deterministic else acc, counters, sums,
            *_bht(o, varlen), *_bht(do, varlen), *_row(lse, varlen), *_row(dlse, varlen),
            rows_b, rows_h, sizes.hq, row_tiles, sizes.tq, counters.numel(), summed, divisor, d, width, BLOCK, PADDING,
        ), num_warps=4,
    )  # fmt: skip
    main = prepare(
        _hopper_bwd_kernel, (*code, cap == 0.0, sizes.left is None, sizes.right is None),
        min(tiles * splits, programs),
        (
            _descriptor(q, varlen, tile.m, width), _descriptor(k, varlen, tile.n, width),
            _descriptor(v, varlen, tile.n, width), _descriptor(do, varlen, tile.m, width),
            row_descriptor(shift, tile.m), row_descriptor(delta, tile.m), cu_q, cu_k,
            _rows_descriptor(acc, tile.m, width // tile.slices),
            None if dk is None else _descriptor(dk, varlen, tile.n, width),
            None if dv is None else _descriptor(dv, varlen, tile.n, width),
            sums, arrived if shared else None, turns if deterministic else None, counters,
            rows_b, rows_h, sizes.batch, sizes.hkv, sizes.batch * sizes.hkv, sizes.hq // sizes.hkv, sizes.tq, sizes.tk,
            sizes.left, sizes.right,
            1 if deterministic or varlen else heads_together(sizes, programs), splits if shared else None,
            row_tiles, scale, unit, cap * LOG2E if cap else None, scale / cap if cap else None,
            tile.m, tile.n, width, *tile[2:], descending,
        ), num_warps=4 if width > 128 else 8,
    )  # fmt: skip
    launches = [begin, main]
    if dq is not None:
        finish = (
            acc, turns if deterministic else None, cu_q, dq, *_bht(dq, varlen), rows_b, rows_h,
            sizes.hq, row_tiles, sizes.tq, scale, d, width, BLOCK, tile.m,
        )  # fmt: skip
        launches.append(prepare(_hopper_finish_kernel, code, row_tiles * sizes.hq * sizes.batch, finish, num_warps=4))
    if dsinks is not None and mask.sinks is not None:
        sums_of = (shift, delta, mask.sinks, cu_q, dsinks, mask.sinks.stride(0), dsinks.stride(0))
        dtypes = (varlen, mask.sinks.dtype, dsinks.dtype)
        heads_of = (*sums_of, rows_b, rows_h, sizes.batch, sizes.tq, divisor, 1024)
        launches.append(prepare(_hopper_dsinks_kernel, dtypes, sizes.hq, heads_of, num_warps=4))
    return tuple(launches)


def _bht(x: Tensor | None, varlen: bool) -> tuple[int, int, int]:
    """Strides over sequences, heads and rows; packed sequences have no stride between them."""
    if x is None:
        return 0, 0, 0
    return (0, x.stride(1), x.stride(0)) if varlen else (x.stride(0), x.stride(1), x.stride(2))


def _row(x: Tensor | None, varlen: bool) -> tuple[int, ...]:
    """The same for lse and its like."""
    return (0, 0, 0) if x is None else (0, *x.stride()) if varlen else x.stride()
