"""Attention's forward in Triton: one program computes a tile of rows of one head and loops over the columns they attend to.

    row_max = sink, row_sum = 1 (or lowest, 0)
    for each column tile, first the unmasked ones, then those that an edge of the band crosses:
      x = scores (scores.py)
      new_max = max(row_max, max x)      p = exp(x − new_max)       alpha = exp(row_max − new_max)
      row_sum = alpha · row_sum + Σ p    acc = alpha · acc + (p ∘ keep) v
    o = acc / row_sum / (1 − dropout_p)          lse = row_max + log row_sum

In a call without softcap, bias and slopes (PLAIN) x is q·k, and p = exp2(c x − c row_max) with c = factor · log2(e) is one fma
and one exp2. The fma subtracts a rounded c · row_max from an exact c · x. The rounding error is the same for the whole row: it
cancels in o, and `product_lse` removes it from lse. But the rounding error of a very large |c · row_max| would make p overflow.
So if |c · row_max| ≥ 2²⁶, c is replaced by the next power of two, and c · row_max is exact. Distinct scores then differ by at
least 4 in the log2 domain, and nearly every p is 0 or 1.

If SPLIT > 0, the order of a row's sums does not depend on its tile of rows. The columns SPLIT·n … SPLIT·(n + 1) − 1 are one
part of the softmax, summed tile by tile from the first, and the parts are combined in their order (softmax.py). Every tile
applies the mask. A tile or part that only other rows attend to changes no bit of a row: its p is 0, its alpha 1.
cache_attention sums in the same order.

Split-K: with few rows and many columns, `splits` programs share the columns of a row tile. Each writes its own o and lse, in
the dtype of the accumulators, and `_combine_kernel` reduces them in a fixed order: o = Σ exp(lse_s − lse) o_s.

A call reads q once, k and v once per row tile (mostly from L2), and costs 4·Tq·Tk·D FLOPs per head, half if causal. Causal
calls start with the last rows, whose programs take longest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .memory import at, lengths, load_tile, row_program, steps, store_tile, tile_offsets
from .numerics import (
    LOWEST,
    dot,
    dot_transposed,
    exponential,
    logarithm,
    product_lse,
    ratio,
    scaled_max,
)
from .scores import (
    Head,
    Visits,
    band_tiles,
    count_tiles,
    dropout_mask,
    list_runs,
    listed_tiles,
    nth_tile,
    own_list,
    scores,
)
from .softmax import combine, no_column, softmax_step, with_sink

SIZES = [f"{x}_{axis}" for x in ("q", "k", "v", "o", "lse", "parts", "lse_parts") for axis in "bhts"]
SIZES += ["bias_b", "bias_h", "bias_i", "bias_j", "slopes_b", "slopes_h", "sinks_h"]
SIZES += ["intervals_b", "intervals_h", "runs_b", "runs_h"]
SIZES += ["heads", "group", "sink_heads", "row_tiles", "tq", "tk", "left", "right", "threshold", "splits"]
SIZES += ["d_steps", "dv_steps"]


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k, v, k_offsets, v_offsets, k_t, v_t, i, head, log2_factor, coarse_factor,
    visits, D, DV,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, IEEE_FP32: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the masked or the unmasked column tiles. For heads above 256, loop-invariant code motion is off and the masked tiles
    are not pipelined, to save registers."""
    PLAIN: tl.constexpr = head.softcap is None and head.bias is None and head.slope is None
    WIDE: tl.constexpr = q.shape[1] > 256 or acc.shape[1] > 256
    runs = None
    if visits.runs is not None:
        runs = list_runs(visits, MASKED)
    tiles = count_tiles(visits, runs, MASKED)
    for n in tl.range(0, tiles, num_stages=1 if MASKED and WIDE else None, disable_licm=WIDE):
        start = nth_tile(n, visits, runs, MASKED) * BLOCK_N
        j = start + tl.arange(0, BLOCK_N)[None, :]
        k_tile = load_tile(k + steps(start, k_t, ALIGN), k_offsets, head.tk - start, D, CHECKED=MASKED)
        s = dot_transposed(q, k_tile, None, IEEE_FP32)
        x, _tanh = scores(s, i, j, head, IEEE_FP32, MASKED)
        p, alpha, new_max = softmax_step(x, row_max, log2_factor, coarse_factor, PLAIN, IEEE_FP32)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if head.seed is not None:
            p = tl.where(dropout_mask(i, j, head), p, 0.0)
        v_tile = load_tile(v + steps(start, v_t, ALIGN), v_offsets, head.tk - start, DV, CHECKED=MASKED)
        acc = dot(p, v_tile, acc, IEEE_FP32)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=SIZES)
def _attention_fwd_kernel(
    q, k, v, cu_seqlens_q, cu_seqlens_k, bias, slopes, sinks, seed, intervals, runs,
    o, lse,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bias_b, bias_h, bias_i, bias_j, slopes_b, slopes_h,
    intervals_b, intervals_h, runs_b, runs_h,
    o_b, o_h, o_t, o_s, lse_b, lse_h, lse_t, lse_s,
    sinks_h, sink_heads, heads, group, row_tiles, tq, tk, d_steps, dv_steps, left, right, threshold: tl.uint32, splits,
    factor, log2_factor, coarse_factor, softcap, inv_keep,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEP: tl.constexpr, ALIGN: tl.constexpr, INT64_OFFSETS: tl.constexpr, IEEE_FP32: tl.constexpr,
    FP64: tl.constexpr, PAIRS: tl.constexpr, NEGATIVE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    m, h, b = row_program(row_tiles, heads)
    split = tl.program_id(1)
    if right is not None:
        m = row_tiles - 1 - m
    start_q, start_k, tq, tk = lengths(cu_seqlens_q, cu_seqlens_k, b, tq, tk)
    start = m * BLOCK_M
    if cu_seqlens_q is not None and start >= tq:
        return

    D = None if d_steps is None else d_steps * STEP
    DV = None if dv_steps is None else dv_steps * STEP
    i = start + tl.arange(0, BLOCK_M)[:, None]
    q_offsets = tile_offsets(q_t, BLOCK_M, BLOCK_D, ALIGN, INT64_OFFSETS)
    k_offsets = tile_offsets(k_t, BLOCK_N, BLOCK_D, ALIGN, INT64_OFFSETS)
    v_offsets = tile_offsets(v_t, BLOCK_N, BLOCK_DV, ALIGN, INT64_OFFSETS)
    q_tile = load_tile(at(q, q_b, q_h, q_t, b, h, start_q + start, ALIGN), q_offsets, tq - start, D, CHECKED=True)
    ACC: tl.constexpr = tl.float64 if FP64 else tl.float32
    if FP64:
        q_tile = q_tile.to(ACC)
    if NEGATIVE:
        q_tile = -q_tile
    k = at(k, k_b, k_h, k_t, b, h // group, start_k, ALIGN)
    v = at(v, v_b, v_h, v_t, b, h // group, start_k, ALIGN)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + b * slopes_b + h * slopes_h).to(tl.float32)
    if bias is not None:
        bias += steps(b, bias_b, 1) + steps(h, bias_h, 1)
    if seed is not None:
        seed = tl.load(seed)
    second = None
    if intervals is not None:
        intervals += steps(b, intervals_b, 1) + steps(h // group, intervals_h, 1)
        if PAIRS == 2:
            second = intervals + 2
    head = Head(
        b, h, tq, tk, left, right, factor, softcap, bias, bias_i, bias_j, slope, seed, threshold, inv_keep, intervals, second
    )  # fmt: skip
    PLAIN: tl.constexpr = head.softcap is None and head.bias is None and head.slope is None
    row_sum = tl.zeros([BLOCK_M], ACC)
    row_max = no_column(row_sum, coarse_factor, PLAIN)
    if sinks is not None:
        sink = tl.load(sinks + h * sinks_h, mask=(h < sink_heads) & (split == 0), other=float("-inf")).to(tl.float32)
        row_max, row_sum = with_sink(row_max, sink, factor, log2_factor, coarse_factor, PLAIN, IEEE_FP32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], ACC)

    stop = tl.minimum(start + BLOCK_M, tq)
    first, unmasked, unmasked_end, last = band_tiles(start, stop, tk - tq, left, right, tk, BLOCK_N)
    if SPLIT > 0:
        TILES: tl.constexpr = SPLIT // BLOCK_N
        for n in tl.range(first // TILES, (last + TILES - 1) // TILES):
            begin = tl.maximum(n * TILES, first)
            end = tl.minimum(n * TILES + TILES, last)
            part = tl.zeros([BLOCK_M, BLOCK_DV], ACC)
            part_sum = tl.zeros([BLOCK_M], ACC)
            part_max = no_column(part_sum, coarse_factor, PLAIN)
            part, part_max, part_sum = _attend(
                part, part_max, part_sum, q_tile, k, v, k_offsets, v_offsets, k_t, v_t, i, head, log2_factor, coarse_factor,
                Visits(begin, end, end, end, None), D, DV, BLOCK_N, ALIGN, IEEE_FP32, MASKED=True,
            )  # fmt: skip
            acc, row_max, row_sum = combine(
                acc, row_max, row_sum, part, part_max, part_sum, log2_factor, coarse_factor, PLAIN, IEEE_FP32
            )
    else:
        if runs is not None:
            runs = own_list(runs, runs_b, runs_h, b, h // group, m)
            first = 0
            last = listed_tiles(runs)
        share = (last - first + splits - 1) // splits
        begin = tl.minimum(first + split * share, last)
        end = tl.minimum(begin + share, last)
        first, last = begin, end
        unmasked = tl.minimum(tl.maximum(unmasked, begin), end)
        unmasked_end = tl.minimum(tl.maximum(unmasked_end, begin), end)
        for MASKED in tl.static_range(2):
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q_tile, k, v, k_offsets, v_offsets, k_t, v_t, i, head, log2_factor, coarse_factor,
                Visits(first, unmasked, unmasked_end, last, runs), D, DV, BLOCK_N, ALIGN, IEEE_FP32, MASKED,
            )  # fmt: skip

    nonzero = row_sum > 0.0
    row_sum = tl.where(nonzero, row_sum, 1.0)
    if o is not None:
        o_offsets = tile_offsets(o_t, BLOCK_M, BLOCK_DV, ALIGN, INT64_OFFSETS)
        o = at(o, o_b, o_h, o_t, b, h, start_q + start, ALIGN) + steps(split, o_s, ALIGN)
        store_tile(o, o_offsets, acc * ratio(inv_keep, row_sum, IEEE_FP32)[:, None], tq - start, DV)
    if lse is not None:
        rows = start + tl.arange(0, BLOCK_M)
        lse = at(lse, lse_b, lse_h, lse_t, b, h, start_q, 1) + steps(split, lse_s, 1)
        value = logarithm(row_sum, IEEE_FP32)
        if PLAIN:
            c, _ = scaled_max(row_max, log2_factor, coarse_factor)
            value = product_lse(row_max, value, factor, c, IEEE_FP32)
        if not PLAIN:
            value += row_max
        tl.store(lse + steps(rows, lse_t, 1), tl.where(nonzero, value, float("-inf")), mask=rows < tq)


@triton.jit(do_not_specialize=SIZES)
def _combine_kernel(
    parts, lse_parts, cu_seqlens_q,
    o, lse,
    parts_b, parts_h, parts_t, parts_s, lse_parts_b, lse_parts_h, lse_parts_t, lse_parts_s, o_b, o_h, o_t, lse_b, lse_h, lse_t,
    heads, row_tiles, tq, dv_steps, splits,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr, IEEE_FP32: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) % row_tiles * BLOCK_M
    _, h, b = row_program(row_tiles, heads)
    start_q, _, tq, _ = lengths(cu_seqlens_q, cu_seqlens_q, b, tq, tq)
    if cu_seqlens_q is not None and start >= tq:
        return

    DV = None if dv_steps is None else dv_steps * STEP
    rows = start + tl.arange(0, BLOCK_M)
    inside = rows < tq
    part_offsets = tile_offsets(parts_t, BLOCK_M, BLOCK_DV, 1, INT64_OFFSETS=True)
    parts = at(parts, parts_b, parts_h, parts_t, b, h, start_q + start, 1)
    lse_parts = at(lse_parts, lse_parts_b, lse_parts_h, lse_parts_t, b, h, start_q, 1) + steps(rows, lse_parts_t, 1)
    row_max = tl.full([BLOCK_M], LOWEST, lse_parts.dtype.element_ty)
    row_sum = tl.zeros([BLOCK_M], row_max.dtype)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], row_max.dtype)

    for split in tl.range(0, splits):
        x = tl.load(lse_parts + steps(split, lse_parts_s, 1), mask=inside, other=float("-inf"))
        part = load_tile(parts + steps(split, parts_s, 1), part_offsets, tq - start, DV, CHECKED=True)
        new_max = tl.maximum(row_max, x)
        alpha = exponential(row_max - new_max, IEEE_FP32)
        share_of_part = exponential(x - new_max, IEEE_FP32)
        row_sum = row_sum * alpha + share_of_part
        acc = acc * alpha[:, None] + part * share_of_part[:, None]
        row_max = new_max

    nonzero = row_sum > 0.0
    row_sum = tl.where(nonzero, row_sum, 1.0)
    if o is not None:
        o = at(o, o_b, o_h, o_t, b, h, start_q + start, 1)
        offsets = tile_offsets(o_t, BLOCK_M, BLOCK_DV, 1, INT64_OFFSETS=True)
        store_tile(o, offsets, ratio(acc, row_sum[:, None], IEEE_FP32), tq - start, DV)
    if lse is not None:
        lse = at(lse, lse_b, lse_h, lse_t, b, h, start_q, 1)
        value = tl.where(nonzero, row_max + logarithm(row_sum, IEEE_FP32), float("-inf"))
        tl.store(lse + steps(rows, lse_t, 1), value, mask=inside)
