"""Attention over a cache in Triton. A program attends from all query heads of one kv head to one split of the columns.

    _attend_kernel   for each tile of the split:   s = scores   new_max = max(row_max, max s)   p = exp(s − new_max)
                                                   row_sum = alpha · row_sum + Σ p              acc = alpha · acc + p v
                     then the new column: the program whose split contains it also writes it to the cache
    _merge_kernel    top = max(row_max of the splits, sink)   w = exp(row_max − top)
                     o = Σ w · acc / (Σ w · row_sum + exp(sink − top))

Splits depend only on the capacity, the dtype and the head dimension, so a row has the same bits in any batch. A program reads
its position on the device, so the launches can be captured. The cache is read once, up to the position. Sums are float32; for
float32 inputs on devices with fast float64 (attention/triton/fit.py) they are float64. p is rounded to v's dtype, except for
the new column and where sums are float64.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.mask import Mask
from ..attention.problem import LEAST_BLOCK, LEAST_FACTOR
from ..attention.triton.arguments import ieee_fp32
from ..attention.triton.fit import product_bits
from ..attention.triton.numerics import LOWEST, dot, dot_transposed, exponential, ratio, rounded_product
from ..attention.triton.scores import Head, scores
from ..gpu import ceil_div, launch, padded
from ..scratch import Scratch, Shapes, TensorLike

MOST_SPLITS = 32
LEAST_ROWS = 16  # fewest rows of a tile of queries that tl.dot takes
COPIED, WARPS = 1024, 4  # COPIED: a program of `_write_kernel` copies at most so many elements of a row


@triton.jit
def _scores(s, i, j, head, IEEE_FP32: tl.constexpr):
    x, _tanh = scores(s, i, j, head, IEEE_FP32, MASKED=False)
    if head.softcap is None and head.slope is None:
        x = rounded_product(x, head.factor)
    return x


@triton.jit
def _attend_kernel(
    q, k, v, positions, slopes,
    acc_parts, max_parts, sum_parts, k_cache, v_cache,
    q_b, q_h, k_b, k_h, v_b, v_h, slopes_b, slopes_h, kv_heads, capacity, share, splits, left, factor, softcap,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    NEGATIVE: tl.constexpr, IEEE_FP32: tl.constexpr, FP64: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    b, h = n // kv_heads, n % kv_heads
    split = tl.program_id(1)
    position = tl.load(positions + b)
    inside = (position >= 0) & (position < capacity)
    position = tl.where(inside, position, -1).to(tl.int32)
    begin = split * share
    end = tl.minimum(begin + share, position)
    owner = inside & (position >= begin) & (position < begin + share)

    ACC: tl.constexpr = tl.float64 if FP64 else tl.float32
    rows = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query_head = h * GROUP + rows
    here = (rows < GROUP)[:, None] & (d < D)[None, :]
    wide_b = b.to(tl.int64)
    q_tile = tl.load(q + wide_b * q_b + query_head[:, None] * q_h + d[None, :], mask=here, other=0.0)
    if FP64:
        q_tile = q_tile.to(ACC)
    if NEGATIVE:
        q_tile = -q_tile
    slope = None
    if slopes is not None:
        at_slopes = slopes + wide_b * slopes_b + query_head * slopes_h
        slope = tl.load(at_slopes, mask=rows < GROUP, other=0.0).to(tl.float32)[:, None]
    head = Head(b, h, 1, position + 1, left, 0, factor, softcap, None, 0, 0, slope, None, 0, 1.0)
    i = tl.zeros([BLOCK_M, 1], tl.int32)
    of_head = n.to(tl.int64) * capacity * D
    k_cache += of_head
    v_cache += of_head
    row_max = tl.full([BLOCK_M], LOWEST, ACC)
    row_sum = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)

    first = begin
    if left is not None:
        first = tl.maximum(begin, (position - left) // BLOCK_N * BLOCK_N)
    for t in tl.range(0, (end - first + BLOCK_N - 1) // BLOCK_N):
        start = first + t * BLOCK_N
        j = start + tl.arange(0, BLOCK_N)
        tile = start.to(tl.int64) * D + tl.arange(0, BLOCK_N)[:, None] * D + d[None, :]
        there = (j < end)[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_cache + tile, mask=there, other=0.0)
        x = _scores(dot_transposed(q_tile, k_tile, None, IEEE_FP32), i, j[None, :], head, IEEE_FP32)
        attends = j < end
        if left is not None:
            attends &= position - j <= left
        x = tl.where(attends[None, :], x, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, 1))
        p = exponential(x - new_max[:, None], IEEE_FP32)
        alpha = exponential(row_max - new_max, IEEE_FP32)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = tl.load(v_cache + tile, mask=there, other=0.0)
        acc = dot(p, v_tile, acc * alpha[:, None], IEEE_FP32)
        row_max = new_max

    own = owner & (d < D)
    k_new = tl.load(k + wide_b * k_b + h * k_h + d, mask=own, other=0.0)
    v_new = tl.load(v + wide_b * v_b + h * v_h + d, mask=own, other=0.0)
    row = position.to(tl.int64) * D + d
    tl.store(k_cache + row, k_new, mask=own)
    tl.store(v_cache + row, v_new, mask=own)
    s = tl.sum(q_tile.to(ACC) * k_new.to(ACC)[None, :], 1)[:, None]
    x = tl.where(owner, _scores(s, i, i + position, head, IEEE_FP32), float("-inf"))
    new_max = tl.maximum(row_max, tl.max(x, 1))
    p = exponential(x - new_max[:, None], IEEE_FP32)
    alpha = exponential(row_max - new_max, IEEE_FP32)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + p * v_new.to(ACC)[None, :]

    part = (wide_b * kv_heads * GROUP + query_head) * splits + split
    some = row_sum > 0.0
    tl.store(max_parts + part, tl.where(some, new_max, float("-inf")), mask=rows < GROUP)
    tl.store(sum_parts + part, row_sum, mask=rows < GROUP)
    tl.store(acc_parts + part[:, None] * D + d[None, :], acc, mask=here & some[:, None])


@triton.jit
def _merge_kernel(
    acc_parts, max_parts, sum_parts, sinks,
    o,
    o_b, o_h, sinks_h, heads, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, IEEE_FP32: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    b, h = n // heads, n % heads
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    part = n.to(tl.int64) * splits + s

    row_max = tl.load(max_parts + part, mask=s < splits, other=float("-inf"))
    some = row_max > float("-inf")
    sums = tl.load(sum_parts + part, mask=some, other=0.0)
    at_acc = acc_parts + part[:, None] * D + d[None, :]
    acc = tl.load(at_acc, mask=some[:, None] & (d < D)[None, :], other=0.0)
    top = tl.maximum(tl.max(row_max, 0), LOWEST)
    if sinks is not None:
        sink = tl.load(sinks + h * sinks_h).to(tl.float32)
        top = tl.maximum(top, sink)
    w = exponential(row_max - top, IEEE_FP32)
    total = tl.sum(w * sums, 0)
    if sinks is not None:
        total += exponential(sink - top, IEEE_FP32)
    total = tl.where(total > 0.0, total, 1.0)

    y = ratio(tl.sum(acc * w[:, None], 0), total, IEEE_FP32)
    tl.store(o + b.to(tl.int64) * o_b + h * o_h + d, y.to(o.dtype.element_ty), mask=d < D)


@triton.jit
def _write_kernel(
    k, v, slots,
    k_cache, v_cache,
    k_n, v_n, limit, capacity, kv_heads,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + n)
    here = (slot >= 0) & (slot < limit) & (c < kv_heads * D)
    to = ((slot // capacity * kv_heads + c // D) * capacity + slot % capacity) * D + c % D

    tl.store(k_cache + to, tl.load(k + n * k_n + c, mask=here, other=0.0), mask=here)
    tl.store(v_cache + to, tl.load(v + n * v_n + c, mask=here, other=0.0), mask=here)


def _columns(dtype: torch.dtype, head_dim: int) -> int:
    """Columns of a tile."""
    wide = padded(head_dim) > 128
    if dtype == torch.float32:
        return 16 if wide else 32
    return 32 if wide else 64


def _share(cache: TensorLike) -> int:
    """Columns of a split, a multiple of those of a tile."""
    _, _, capacity, d = cache.shape
    tile = _columns(cache.dtype, d)
    return tile * ceil_div(capacity, tile * MOST_SPLITS)


def workspace(cache: TensorLike, n_head: int, rows: int | None = None) -> Shapes:
    if rows is not None:
        return {}
    b, _, capacity, d = cache.shape
    acc = torch.float64 if product_bits(cache.dtype, cache.device) == 64 else torch.float32
    parts = b, n_head, ceil_div(capacity, _share(cache))
    return {"acc": ((*parts, d), acc), "row_max": (parts, acc), "row_sum": (parts, acc)}


def fwd(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Mask, *,
    o: Tensor, k_cache: Tensor, v_cache: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    (b, hq, d), (_, hkv, capacity, _) = q.shape, k_cache.shape
    share, scale, slopes, sinks = _share(k_cache), mask.scale_for(d), mask.alibi_slopes, mask.sinks
    parts = scratch["acc"], scratch["row_max"], scratch["row_sum"]
    splits = parts[1].shape[2]
    left = mask.band[0]
    strides: tuple[int, ...] = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    strides += (0, 0) if slopes is None else (slopes.stride(0) if slopes.ndim == 2 else 0, slopes.stride(-1))
    numbers = (hkv, capacity, share, splits, left, max(abs(scale), LEAST_FACTOR), mask.softcap or None)
    ieee = ieee_fp32(q.dtype)
    shared = {"D": d, "BLOCK_D": max(LEAST_BLOCK, padded(d)), "IEEE_FP32": ieee, "num_warps": WARPS}
    launch(
        _attend_kernel, (b * hkv, splits), q, k, v, positions, slopes, *parts, k_cache, v_cache, *strides, *numbers,
        GROUP=hq // hkv, BLOCK_M=max(LEAST_ROWS, padded(hq // hkv)), BLOCK_N=_columns(q.dtype, d), NEGATIVE=scale < 0.0,
        FP64=product_bits(q.dtype, q.device) == 64, **shared,
    )  # fmt: skip
    strides = (*o.stride()[:2], 0 if sinks is None else sinks.stride(0))
    launch(_merge_kernel, (b * hq,), *parts, sinks, o, *strides, hq, splits, BLOCK_S=padded(splits), **shared)


def write(k: Tensor, v: Tensor, slots: Tensor, *, k_cache: Tensor, v_cache: Tensor, scratch: Scratch) -> None:
    b, hkv, capacity, d = k_cache.shape
    block = min(padded(hkv * d), COPIED)
    numbers = k.stride(0), v.stride(0), b * capacity, capacity, hkv
    grid = len(k), ceil_div(hkv * d, block)
    launch(_write_kernel, grid, k, v, slots, k_cache, v_cache, *numbers, D=d, BLOCK=block, num_warps=WARPS)
