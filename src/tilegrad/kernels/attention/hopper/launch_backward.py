"""The host side of the backward: tile configs, split-K, the order of work tiles, scratch, and the launches of prepost.py and
backward.py. Nothing is allocated."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda_launch import Launch, Plan
from ...gpu import ceil_div, multiprocessors
from ...scratch import Scratch, Shapes, Views
from ...triton_version import takes_more_registers
from ..problem import LEAST_FACTOR, LOG2E, Backward, Sizes, lse_strides, row_strides, sizes_of
from ..triton.arguments import interval_arguments, list_arguments, pairs_of
from ..triton.lists import edges_calls, last_calls
from . import pieces
from .backward import DIVIDED, _hopper_bwd_kernel
from .backward_store_dq import dkdv_columns
from .launch import L2_BYTES, current, launches_of, prepare, right_of
from .prepost import _hopper_dsinks_kernel, _hopper_postprocess_kernel, _hopper_preprocess_kernel
from .tma import Descriptor, row_descriptor, rows_descriptor, tile_descriptor, varlen_descriptor

PADDING = 128  # rows of neg_lse2 and delta are padded to a multiple of this
BLOCK = 64  # rows per program of the pre- and postprocess
SPLIT_TILES = 66  # with more work tiles than this, none is split among CTAs
MOST_SPLITS = 32
MANY = 24  # with more work tiles per CTA, any order is balanced
START = 6  # prologue and epilogue of a work tile, in units of row tiles


class TileConfig(NamedTuple):
    """Constants of the main kernel."""

    m: int  # rows of a tile
    n: int  # columns of a tile
    do_stages: int
    dq_columns: int  # columns of a part of dq
    do_first: bool = False  # do is loaded before q, because the stages of do are released first
    v_in_regs: int = 0  # columns of v that a warpgroup keeps in registers
    dq_warps: int = 1  # dQ store warps of a deterministic call


SPARE = not takes_more_registers()  # whether the compiler leaves registers for v
TILE_CONFIGS = {  # by padded head dimension
    64: TileConfig(128, 128, 2, 64, v_in_regs=16 if SPARE else 0),
    96: TileConfig(64, 128, 2, 64, do_first=True, v_in_regs=64, dq_warps=2),
    128: TileConfig(64, 128, 2, 64, v_in_regs=64 if SPARE else 0, dq_warps=2),
    192: TileConfig(64, 64, 2, 64, do_first=True),
    256: TileConfig(64, 64, 1, 64, do_first=True),
}
SOFTCAP_CONFIGS = TILE_CONFIGS | {  # a softcap takes registers
    64: TileConfig(64, 128, 2, 32),
    96: TILE_CONFIGS[96]._replace(v_in_regs=64 if SPARE else 0),
    128: TILE_CONFIGS[128]._replace(v_in_regs=0),
}


def width_of(d: int) -> int:
    """The padded head dimension, at least 64."""
    return max(64, pieces.width_of(d))


def count_work_tiles(sizes: Sizes, total_k: int | None) -> int:
    """The number of work tiles; for packed sequences, an upper bound."""
    n = TILE_CONFIGS[width_of(sizes.d)].n
    if total_k is not None:
        return sizes.hkv * (total_k // n + sizes.batch)
    return sizes.hkv * sizes.batch * ceil_div(sizes.tk, n)


def workspace(sizes: Sizes, *, deterministic: bool) -> Shapes:
    """dq in float32, neg_lse2 and delta, counters and, unless deterministic, float32 sums of dk and dv of split work tiles. A
    smaller batch never needs more."""
    padded = ceil_div(sizes.tq, PADDING) * PADDING
    rows: tuple[int, ...] = (sizes.batch, sizes.hq, padded)
    if sizes.total_q is not None:
        rows = (sizes.hq, (sizes.total_q // PADDING + sizes.batch) * PADDING)
    shapes: Shapes = {
        "dq_acc": ((*rows, sizes.d), torch.float32),
        "neg_lse2": (rows, torch.float32),
        "padded_delta": (rows, torch.float32),
    }
    tile, width = TILE_CONFIGS[width_of(sizes.d)], width_of(sizes.d)
    semaphores = sizes.batch * sizes.hq * padded // BLOCK * (tile.dq_warps if deterministic else 0)
    shapes["counters"] = ((1 + 4 * SPLIT_TILES + semaphores,), torch.int32)
    if not deterministic:
        shapes["sums"] = ((max(1, min(SPLIT_TILES, count_work_tiles(sizes, None))), 2, tile.n, width), torch.float32)
    return shapes


def splits_for(sizes: Sizes, tiles: int, programs: int, m: int) -> int:
    """How many CTAs share each work tile: 1 or, with too few tiles for the device, the number that ends the call first."""
    if not 0 < tiles <= min(SPLIT_TILES, programs // 2):
        return 1
    rows = sizes.tq if sizes.left is None else min(sizes.tq, sizes.left + BLOCK)
    steps = sizes.hq // sizes.hkv * ceil_div(rows, m)

    def duration(splits: int) -> int:
        reduction = START if splits > 1 else 0
        return ceil_div(tiles * splits, programs) * (ceil_div(steps, splits) + START) + reduction

    return min(range(1, min(MOST_SPLITS, steps) + 1), key=duration)


def heads_per_section(sizes: Sizes, programs: int, *, deterministic: bool = False) -> int:
    """The number of kv heads whose work tiles are taken together: one, with two exceptions.

    With a causal band and no window, the first columns take longest. So several heads begin with them together, unless the call
    is deterministic: at most as many heads as fit in L2 with q, do and dq_acc of one query head each.

    In a deterministic call the work tiles of a head finish one after the other, because each waits for its predecessor at every
    row tile. Without a band, as many heads are taken together as occupy all CTAs, so that tiles start in the order in which
    they add."""
    heads, tile = sizes.batch * sizes.hkv, TILE_CONFIGS[width_of(sizes.d)]
    if deterministic and sizes.right is None and sizes.left is None:
        return max(1, min(heads, programs // ceil_div(sizes.tk, tile.n)))
    if deterministic or sizes.right is None or sizes.left is not None:
        return 1
    most = max(1, min(L2_BYTES // max(1, sizes.tq * sizes.d * 8), heads))
    rows, before = ceil_div(sizes.tq, tile.m), sizes.tq - sizes.tk - sizes.right
    firsts = [max(0, n * tile.n + before) // tile.m for n in range(ceil_div(sizes.tk, tile.n))]
    steps = tuple([START + sizes.hq // sizes.hkv * max(0, rows - first) for first in firsts])
    return _soonest(most, heads, steps, programs)


def _soonest(most: int, heads: int, steps: tuple[int, ...], programs: int) -> int:
    """Simulates sections of 1, 2, 4 … `most` heads and returns the smallest that finishes within 0.5 % of the fastest. `steps`
    are the durations of a head's work tiles."""
    if heads * len(steps) > MANY * programs:
        return most

    def end(together: int) -> int:
        ends = [0] * programs
        for first in range(0, heads, together):
            for length in steps:
                for _ in range(min(together, heads - first)):
                    heapq.heapreplace(ends, ends[0] + length)
        return max(ends)

    ends = {heads: end(heads) for heads in sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})}
    return next(heads for heads in ends if ends[heads] <= 1.005 * min(ends.values()))


def _descriptor(x: Tensor | None, rows: int, columns: int, *, varlen: bool) -> Descriptor | None:
    if x is None or not columns:
        return None
    return varlen_descriptor(x, rows, columns) if varlen else tile_descriptor(x, rows, columns, varlen=False)


def prepare_bwd(call: Backward, views: Views) -> Callable[[Backward], None]:
    with current(call.q.device):
        launches = _prepare(call, views(*call.memory))
        return Plan(launches, call, call.memory, launches[0].device)


def compile_bwd(call: Backward, scratch: Scratch) -> tuple[Callable[[], None]]:
    """Returns a function, for a thread, that compiles the kernels of a backward."""

    def compile() -> None:
        with current(call.q.device):
            _prepare(call, scratch)

    return (compile,)


def _prepare(call: Backward, scratch: Scratch) -> tuple[Launch, ...]:
    q, k, v, o, lse, do, dlse, mask, dq, dk, dv, _, dsinks, _, deterministic = call
    sizes = sizes_of(q, k, v, mask)
    varlen, d, cap, scale, width = mask.varlen, sizes.d, mask.softcap, float(mask.scale_for(sizes.d)), width_of(sizes.d)
    tile = (SOFTCAP_CONFIGS if cap else TILE_CONFIGS)[width]
    programs, tiles = multiprocessors(q.device), count_work_tiles(sizes, sizes.total_k)
    splits = 1 if deterministic else splits_for(sizes, tiles, programs, tile.m)
    split = splits > 1
    dq_warps = tile.dq_warps if deterministic else 1
    scale_log2 = 1.0 if cap else math.copysign(max(abs(scale) * LOG2E, LEAST_FACTOR), scale)
    divisor = scale_log2 if width > DIVIDED.value else 1.0
    cu_q, cu_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    acc, neg_lse2, delta, counters = (scratch[name] for name in ("dq_acc", "neg_lse2", "padded_delta", "counters"))
    semaphores = counters[1 + 4 * SPLIT_TILES :] if deterministic else None
    sums = scratch["sums"] if split else None
    summed = 0 if sums is None else min(sums.numel(), tiles * sums.stride(0))
    rows_b, rows_h = (PADDING, neg_lse2.stride(0)) if varlen else neg_lse2.stride()[:2]
    row_tiles, right = ceil_div(sizes.tq, PADDING) * PADDING // BLOCK, right_of(sizes, softcap=cap != 0.0)
    grid = row_tiles * sizes.hq * sizes.batch
    block_d = max(64, sizes.block_d)  # padded head dimension in the pre- and postprocess
    code = (q.dtype, varlen, dlse is None, dk is None, dv is None, deterministic, split, d, tile)
    launches: list[Launch] = []
    intervals = interval_arguments(mask)
    edges = list_arguments(mask, scratch.get("edges"), ceil_div(sizes.tk, tile.n))
    last_tiles = list_arguments(mask, scratch.get("last_tiles"), ceil_div(sizes.tq, tile.m))
    steps = intervals["intervals_b"], intervals["intervals_h"]
    far = [step is not None and step >= 2**31 for step in steps]

    def add(kernel: object, key: tuple[object, ...], programs: int, *arguments: object) -> None:
        launches.append(prepare(kernel, key, programs, arguments, num_warps=4))

    add(
        _hopper_preprocess_kernel, code, grid,
        o, do, lse, lse if dlse is None else dlse, cu_q, neg_lse2, delta, acc, counters, acc if sums is None else sums,
        *row_strides(o, varlen=varlen), *row_strides(do, varlen=varlen),
        *lse_strides(lse, varlen=varlen), *lse_strides(dlse, varlen=varlen),
        rows_b, rows_h, sizes.hq, row_tiles, sizes.tq, d // 8, counters.numel(), summed,
        int(dlse is not None), int(not deterministic), divisor, block_d, BLOCK, PADDING,
    )  # fmt: skip
    boxes = ((q, tile.m), (k, tile.n), (v, tile.n), (do, tile.m))
    launches += launches_of(edges_calls(scratch, sizes, mask, tile.n), launches[0].device)
    if deterministic:
        launches += launches_of(last_calls(scratch, sizes, mask, tile.m, tile.n), launches[0].device)
    add(
        _hopper_bwd_kernel,
        (*code, cap == 0.0, sizes.left is None, right is None, pairs_of(mask), *far),
        min(tiles * splits, programs),
        *(_descriptor(x, rows, columns, varlen=varlen) for columns in pieces.columns_of(width) for x, rows in boxes),
        row_descriptor(neg_lse2, tile.m), row_descriptor(delta, tile.m), cu_q, cu_k,
        intervals["intervals"], edges["runs"], last_tiles["runs"],
        rows_descriptor(acc, 64, tile.dq_columns), *(_descriptor(x, 64, dkdv_columns(width), varlen=varlen) for x in (dk, dv)),
        sums, counters[1:] if split else None, semaphores, counters,
        *steps, edges["runs_b"], edges["runs_h"], last_tiles["runs_b"], last_tiles["runs_h"],
        rows_b, rows_h, sizes.batch, sizes.hkv, sizes.batch * sizes.hkv, sizes.group, sizes.tq, sizes.tk,
        sizes.left, right, 1 if varlen else heads_per_section(sizes, programs, deterministic=deterministic),
        splits if split else None, row_tiles, scale, scale_log2, cap * LOG2E if cap else None, scale / cap if cap else None,
        tile.m, tile.n, width, tile.do_stages, tile.do_first, tile.v_in_regs, dq_warps,
        deterministic and (sizes.right is not None or sizes.intervals), pairs_of(mask),
    )  # fmt: skip
    if dq is not None:
        strides = row_strides(dq, varlen=varlen)
        dq_numbers = rows_b, rows_h, sizes.hq, row_tiles, sizes.tq, d // 8, tile.m, dq_warps, scale, block_d, BLOCK
        add(_hopper_postprocess_kernel, code, grid, acc, semaphores, cu_q, dq, *strides, *dq_numbers)
    if dsinks is not None and mask.sinks is not None:
        sinks, key = mask.sinks, (varlen, mask.sinks.dtype, dsinks.dtype)
        dsinks_numbers = sinks.stride(0), dsinks.stride(0), rows_b, rows_h, sizes.batch, sizes.tq, divisor, 1024
        add(_hopper_dsinks_kernel, key, sizes.hq, neg_lse2, delta, sinks, cu_q, dsinks, *dsinks_numbers)
    return tuple(launches)
