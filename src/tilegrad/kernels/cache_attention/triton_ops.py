"""Attention over a cache in Triton. A program computes the query heads of one kv head on one split of the columns.

    _attend_kernel   for each tile of the split, as in attention's forward:   x = scores   p, alpha, new_max = softmax_step(x)
                                                     row_sum = alpha · row_sum + Σ p       acc = alpha · acc + p v
    _merge_kernel    combines the splits in their order, after the sink, then o = acc / row_sum

`scores` and `softmax_step` are in attention/triton (scores.py, softmax.py). A split has SPLIT columns, and `tiles.ordered`
gives its tile, so a row has the same bits in any batch and for any capacity. Half-precision rows of q, k and v that do not
start at multiples of 16 bytes use another tile, so their bits differ. A program whose split has no column of its row returns.

The tile with the new column loads this column from k and v instead of the cache. Its program writes the column to the cache.

A program reads its position on the device, so the launches can be captured. The cache is read once, up to the position. Sums
are float32. For float32 inputs on devices with fast float64 (attention/triton/fit.py) they are float64. p is rounded to v's
dtype, unless the sums are float64.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.mask import Mask
from ..attention.problem import LEAST_BLOCK, LEAST_FACTOR
from ..attention.triton.arguments import alignment, exponent_arguments, ieee_fp32
from ..attention.triton.fit import product_bits
from ..attention.triton.memory import steps
from ..attention.triton.numerics import dot, dot_transposed, ratio
from ..attention.triton.scores import Head, scores
from ..attention.triton.softmax import combine, no_column, softmax_step, with_sink
from ..attention.triton.tiles import SPLIT, UNALIGNED, ordered
from ..dependent_launch import dependent, start_next, wait_for_previous
from ..gpu import ceil_div, launch, padded
from ..scratch import Scratch, Shapes, TensorLike

if TYPE_CHECKING:
    from . import Caches

AHEAD = 4  # splits whose loads a program of `_merge_kernel` starts together
MERGE_WARPS = 1  # for one row of D columns
COPIED, WARPS = 1024, 4  # COPIED: most elements of a row that a program of `_write_kernel` copies


@triton.jit
def _columns_of(positions, b, capacity, left):
    """The first and the last column that the new token of sequence b attends to; (0, −1) if its position is outside the
    cache."""
    position = tl.load(positions + b)
    position = tl.where((position >= 0) & (position < capacity), position, -1).to(tl.int32)
    first = position * 0
    if left is not None:
        first = tl.maximum(position - left, 0)
    return first, position


@triton.jit
def _attend_kernel(
    q, k, v, positions, slopes,
    acc_parts, max_parts, sum_parts, k_cache, v_cache,
    q_b, q_h, k_b, k_h, v_b, v_h, slopes_b, slopes_h, heads, kv_heads, capacity, splits, left,
    factor, log2_factor, coarse_factor, softcap,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, NEGATIVE: tl.constexpr, IEEE_FP32: tl.constexpr, FP64: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    n = tl.program_id(0) % heads
    split = tl.program_id(0) // heads
    b, h = n // kv_heads, n % kv_heads
    first, position = _columns_of(positions, b, capacity, left)
    begin = split * SPLIT
    if begin > position or begin + SPLIT <= first:
        return

    ACC: tl.constexpr = tl.float64 if FP64 else tl.float32
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query_head = h * GROUP + rows
    inside = (rows < GROUP)[:, None] & (d < D)[None, :]
    b64 = b.to(tl.int64)
    head_offsets = tl.multiple_of(query_head[:, None] * q_h, [ALIGN, ALIGN])
    q_tile = tl.load(q + steps(b, q_b, ALIGN) + head_offsets + d[None, :], mask=inside, other=0.0)
    if FP64:
        q_tile = q_tile.to(ACC)
    if NEGATIVE:
        q_tile = -q_tile
    slope = None
    if slopes is not None:
        at_slopes = slopes + b64 * slopes_b + query_head * slopes_h
        slope = tl.load(at_slopes, mask=rows < GROUP, other=0.0).to(tl.float32)[:, None]
    head = Head(b, h, 1, position + 1, left, None, factor, softcap, None, 0, 0, slope, None, 0, 1.0, None, None)
    PLAIN: tl.constexpr = head.softcap is None and head.slope is None
    i = tl.zeros([BLOCK_M, 1], tl.int32)
    k += steps(b, k_b, ALIGN) + steps(h, k_h, ALIGN)
    v += steps(b, v_b, ALIGN) + steps(h, v_h, ALIGN)
    k_cache += steps(n.to(tl.int64) * capacity, D, ALIGN)
    v_cache += steps(n.to(tl.int64) * capacity, D, ALIGN)
    row_sum = tl.zeros([BLOCK_M], ACC)
    row_max = no_column(row_sum, coarse_factor, PLAIN)
    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)

    first = tl.maximum(begin, first // BLOCK_N * BLOCK_N)
    last = tl.minimum(begin + SPLIT, position + 1)
    for t in tl.range(0, (last - first + BLOCK_N - 1) // BLOCK_N):
        start = first + t * BLOCK_N
        j = start + tl.arange(0, BLOCK_N)
        tile = start.to(tl.int64) * D + tl.arange(0, BLOCK_N)[:, None] * D + d[None, :]
        attended = (j <= position)[:, None] & (d < D)[None, :]
        new = (j == position)[:, None]
        k_tile = tl.load(tl.where(new, k + d[None, :], k_cache + tile), mask=attended, other=0.0)
        v_tile = tl.load(tl.where(new, v + d[None, :], v_cache + tile), mask=attended, other=0.0)
        s = dot_transposed(q_tile, k_tile, None, IEEE_FP32)
        x, _tanh = scores(s, i, j[None, :], head, IEEE_FP32, MASKED=True)
        p, alpha, row_max = softmax_step(x, row_max, log2_factor, coarse_factor, PLAIN, IEEE_FP32)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = dot(p, v_tile, acc * alpha[:, None], IEEE_FP32)

    part = (b64 * kv_heads * GROUP + query_head) * splits + split
    tl.store(max_parts + part, row_max, mask=rows < GROUP)
    tl.store(sum_parts + part, row_sum, mask=rows < GROUP)
    tl.store(acc_parts + part[:, None] * D + d[None, :], acc, mask=inside)
    appends = (position < begin + SPLIT) & (d < D)
    row = position.to(tl.int64) * D + d
    tl.store(k_cache + row, tl.load(k + d, mask=appends, other=0.0), mask=appends)
    tl.store(v_cache + row, tl.load(v + d, mask=appends, other=0.0), mask=appends)


@triton.jit
def _merge_kernel(
    acc_parts, max_parts, sum_parts, sinks, positions,
    o,
    o_b, o_h, sinks_h, heads, capacity, splits, left, factor, log2_factor, coarse_factor, inv_keep,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr, PLAIN: tl.constexpr,
    IEEE_FP32: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    n = tl.program_id(0)
    b, h = n // heads, n % heads
    zero = tl.arange(0, 1)
    d = tl.arange(0, BLOCK_D)[None, :]
    first, position = _columns_of(positions, b, capacity, left)
    part = n.to(tl.int64) * splits + zero
    row_sum = tl.zeros([1], sum_parts.dtype.element_ty)
    row_max = no_column(row_sum, coarse_factor, PLAIN)
    empty = row_max
    if sinks is not None:
        sink = tl.load(sinks + h * sinks_h).to(tl.float32)
        row_max, row_sum = with_sink(row_max, sink, factor, log2_factor, coarse_factor, PLAIN, IEEE_FP32)
        row_sum = row_sum.to(sum_parts.dtype.element_ty)
    acc = tl.zeros([1, BLOCK_D], row_sum.dtype)

    first = first // SPLIT
    for t in tl.range(0, (position // SPLIT - first + AHEAD) // AHEAD):
        for ahead in tl.static_range(AHEAD):
            split = first + t * AHEAD + ahead
            computed = split * SPLIT + zero <= position
            part_max = tl.load(max_parts + part + split, mask=computed, other=0.0)
            part_max = tl.where(computed, part_max, empty)
            part_sum = tl.load(sum_parts + part + split, mask=computed, other=0.0)
            at_acc = acc_parts + (part + split)[:, None] * D + d
            part_acc = tl.load(at_acc, mask=computed[:, None] & (d < D), other=0.0)
            acc, row_max, row_sum = combine(
                acc, row_max, row_sum, part_acc, part_max, part_sum, log2_factor, coarse_factor, PLAIN, IEEE_FP32
            )

    row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    y = acc * ratio(inv_keep, row_sum, IEEE_FP32)[:, None]
    tl.store(o + b.to(tl.int64) * o_b + h * o_h + d, y.to(o.dtype.element_ty), mask=d < D)


@triton.jit
def _write_kernel(
    k, v, slots, k_cache, v_cache, k_n, v_n, limit, capacity, kv_heads, D: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + n)
    inside = (slot >= 0) & (slot < limit) & (c < kv_heads * D)
    destination = ((slot // capacity * kv_heads + c // D) * capacity + slot % capacity) * D + c % D

    tl.store(k_cache + destination, tl.load(k + n * k_n + c, mask=inside, other=0.0), mask=inside)
    tl.store(v_cache + destination, tl.load(v + n * v_n + c, mask=inside, other=0.0), mask=inside)


def workspace(cache: TensorLike, n_head: int, rows: int | None = None) -> Shapes:
    if rows is not None:
        return {}
    b, _, capacity, d = cache.shape
    acc = torch.float64 if product_bits(cache.dtype, cache.device) == 64 else torch.float32
    parts = b, n_head, ceil_div(capacity, SPLIT)
    return {"acc": ((*parts, d), acc), "row_max": (parts, acc), "row_sum": (parts, acc)}


def fwd(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Mask, *, o: Tensor, caches: Caches, scratch: Scratch
) -> None:
    k_cache, v_cache = caches
    (b, hq, d), (_, hkv, capacity, _) = q.shape, k_cache.shape
    scale, slopes, sinks, left, group = mask.scale_for(d), mask.alibi_slopes, mask.sinks, mask.band[0], hq // hkv
    parts = scratch["acc"], scratch["row_max"], scratch["row_sum"]
    splits, bits, softcap = parts[1].shape[2], product_bits(q.dtype, q.device), mask.softcap or None
    align, factor = alignment(q, k, v, k_cache.flatten(0, 1), varlen=True), max(abs(scale), LEAST_FACTOR)
    tile = ordered(bits, d, d) if align > 1 or bits > 16 else UNALIGNED[0]
    factors = (factor, *exponent_arguments(factor, q.dtype).values())
    strides: tuple[int, ...] = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    strides += (0, 0) if slopes is None else (slopes.stride(0) if slopes.ndim == 2 else 0, slopes.stride(-1))
    numbers = (b * hkv, hkv, capacity, splits, left, *factors, softcap)
    shared = {"D": d, "BLOCK_D": max(LEAST_BLOCK, padded(d)), "SPLIT": SPLIT, "IEEE_FP32": ieee_fp32(q.dtype)}
    shared |= dependent(q, b)
    tensors, grid = (q, k, v, positions, slopes, *parts, k_cache, v_cache), (b * hkv * splits, ceil_div(group, tile.m))
    sizes = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "num_warps": tile.warps, "num_stages": tile.stages}
    constants = {"GROUP": group, "ALIGN": align, "NEGATIVE": scale < 0.0, "FP64": bits == 64, **sizes, **shared}
    launch(_attend_kernel, grid, *tensors, *strides, *numbers, **constants)
    strides = (*o.stride()[:2], 0 if sinks is None else sinks.stride(0))
    numbers = (hq, capacity, splits, left, *factors, 1.0)
    constants = {"AHEAD": AHEAD, "PLAIN": softcap is None and slopes is None, "num_warps": MERGE_WARPS, **shared}
    launch(_merge_kernel, (b * hq,), *parts, sinks, positions, o, *strides, *numbers, **constants)


def write(k: Tensor, v: Tensor, slots: Tensor, *, k_cache: Tensor, v_cache: Tensor, scratch: Scratch) -> None:
    b, hkv, capacity, d = k_cache.shape
    block = min(padded(hkv * d), COPIED)
    numbers = k.stride(0), v.stride(0), b * capacity, capacity, hkv
    grid = len(k), ceil_div(hkv * d, block)
    launch(_write_kernel, grid, k, v, slots, k_cache, v_cache, *numbers, D=d, BLOCK=block, num_warps=WARPS)
