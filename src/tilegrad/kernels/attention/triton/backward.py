"""Attention's backward in Triton, deterministic: each element of a gradient is computed by one program, without atomics.

    delta   delta = rowsum(do ∘ o) − dlse      row_lse = lse
            (a row with lse = −inf has delta = 0 and row_lse = +inf, so p = 0)
    dk, dv  a program has a tile of columns of a kv head and loops over its query heads and the rows that attend to it
              (1) sᵀ = k qᵀ   (2) dpᵀ = v doᵀ   (3) dv += rᵀ do   (4) dk += dxᵀ q
    dq      a program has a tile of rows and loops over the columns that they attend to
              (1) s = q kᵀ    (2) dp = do vᵀ    (5) dq += dx k
    dbias   a program has a tile of the bias and loops over the axes that the bias is broadcast over. If these include the
            columns, the gradient is the sum of a row of ds:
              Σⱼ ds = Σⱼ p ∘ dp − delta Σⱼ p = (delta + dlse) − delta (1 − p_sink) = dlse + p_sink · delta
    dsinks  a program has a head and loops over its rows: dsink −= Σ exp(sink − lse) · delta

scores.py computes r, ds and dx of a tile. dq and dk are multiplied by scale, dv by 1/(1 − dropout_p), once at the end. Scores
are computed twice: 7 GEMMs (8 with separate dk and dv passes) of 2·Tq·Tk·D FLOPs, instead of the 5 of a fused loop. This avoids
atomics and a float32 dq in memory. Scratch is delta and row_lse, float32 (B, Hq, Tq) each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .memory import at, deduplicated, lengths, load_row, load_tile, row_program, steps, store_tile, tile_offsets
from .numerics import dot, dot_transposed
from .scores import (
    Head,
    Visits,
    band_tiles,
    count_tiles,
    drop,
    list_runs,
    listed_tiles,
    nth_tile,
    own_list,
    probabilities,
    score_gradient,
    sink_probability,
    through_softcap,
)

SIZES = [f"{x}_{axis}" for x in ("q", "k", "v", "o", "do", "lse", "dlse", "rows", "dq", "dk", "dv") for axis in "bht"]
SIZES += [f"{x}_{axis}" for x in ("bias", "dbias") for axis in "bhij"]
SIZES += ["intervals_b", "intervals_h", "runs_b", "runs_h"]
SIZES += ["slopes_b", "slopes_h", "sinks_h", "dsinks_h", "b_step", "h_step", "batch", "heads", "row_tiles", "col_tiles"]
SIZES += ["first_b", "group", "tq", "tk", "d_steps", "dv_steps", "left", "right", "threshold", "has_dlse"]


@triton.jit(do_not_specialize=SIZES)
def _delta_kernel(
    o, do, lse, dlse, cu_seqlens_q,
    delta, row_lse,
    o_b, o_h, o_t, do_b, do_h, do_t, lse_b, lse_h, lse_t, dlse_b, dlse_h, dlse_t, rows_b, rows_h, heads, row_tiles, tq,
    dv_steps, has_dlse,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr, ALIGN: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    IEEE_FP32: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) % row_tiles * BLOCK_M
    _, h, b = row_program(row_tiles, heads)
    start_q, _, tq, _ = lengths(cu_seqlens_q, cu_seqlens_q, b, tq, tq)
    if cu_seqlens_q is not None and start >= tq:
        return

    DV = None if dv_steps is None else dv_steps * STEP
    rows = start + tl.arange(0, BLOCK_M)
    inside = rows < tq
    o_offsets = tile_offsets(o_t, BLOCK_M, BLOCK_DV, ALIGN, INT64_OFFSETS)
    do_offsets = tile_offsets(do_t, BLOCK_M, BLOCK_DV, ALIGN, INT64_OFFSETS)
    o_tile = load_tile(at(o, o_b, o_h, o_t, b, h, start_q + start, ALIGN), o_offsets, tq - start, DV, CHECKED=True)
    do_tile = load_tile(
        at(do, do_b, do_h, do_t, b, h, start_q + start, ALIGN), do_offsets, tq - start, DV, CHECKED=True
    )
    lse_row = tl.load(at(lse, lse_b, lse_h, lse_t, b, h, start_q, 1) + steps(rows, lse_t, 1), mask=inside, other=0.0)

    ACC: tl.constexpr = tl.float64 if IEEE_FP32 else tl.float32
    d = tl.sum(o_tile.to(ACC) * do_tile.to(ACC), 1)
    dlse = at(dlse, dlse_b, dlse_h, dlse_t, b, h, start_q, 1)
    d -= tl.load(dlse + steps(rows, dlse_t, 1), mask=inside & (has_dlse != 0), other=0.0)
    valid = lse_row > float("-inf")

    tl.store(at(delta, rows_b, rows_h, 1, b, h, start_q, 1) + rows, tl.where(valid, d.to(tl.float32), 0.0), mask=inside)
    tl.store(
        at(row_lse, rows_b, rows_h, 1, b, h, start_q, 1) + rows,
        tl.where(valid, lse_row, float("inf")),
        mask=inside,
    )


@triton.jit
def _add_rows(
    dk, dv, k, v, q, do, row_lse, delta, q_t, do_t, j, head, visits, D, DV,
    BLOCK_M: tl.constexpr, ALIGN: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    IEEE_FP32: tl.constexpr, DUPLICATES: tl.constexpr, SAME_OFFSETS: tl.constexpr,
    DK_WANTED: tl.constexpr, DV_WANTED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the masked or the unmasked row tiles of one query head to dk and dv.

    The sum dp may start from −delta instead of 0. The sum s must not start from −lse, because every rounded partial sum would
    then contain lse. row_lse and delta are prefetched by hand, because Triton doesn't pipeline such narrow loads. To save
    registers, loop-invariant code motion is off, and the few masked tiles aren't pipelined."""
    q_offsets = tile_offsets(q_t, BLOCK_M, k.shape[1], ALIGN, INT64_OFFSETS)
    do_offsets = q_offsets if SAME_OFFSETS else tile_offsets(do_t, BLOCK_M, v.shape[1], ALIGN, INT64_OFFSETS)
    DP_STARTS: tl.constexpr = not IEEE_FP32 and head.seed is None
    runs = None
    if visits.runs is not None:
        runs = list_runs(visits, MASKED)
    tiles = count_tiles(visits, runs, MASKED)
    rows = nth_tile(0, visits, runs, MASKED) * BLOCK_M + tl.arange(0, BLOCK_M)
    next_lse = load_row(row_lse, rows, head.tq, float("inf"), DUPLICATES)
    next_delta = load_row(delta, rows, head.tq, 0.0, DUPLICATES)
    for m in tl.range(0, tiles, num_stages=1 if MASKED else None, disable_licm=True):
        start = nth_tile(m, visits, runs, MASKED) * BLOCK_M
        rows = start + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q + steps(start, q_t, ALIGN), q_offsets, head.tq - start, D, CHECKED=MASKED)
        do_tile = load_tile(do + steps(start, do_t, ALIGN), do_offsets, head.tq - start, DV, CHECKED=MASKED)
        lse_row = deduplicated(next_lse)
        delta_row = deduplicated(next_delta)
        next_rows = nth_tile(m + 1, visits, runs, MASKED) * BLOCK_M + tl.arange(0, BLOCK_M)
        next_lse = load_row(row_lse, next_rows, head.tq, float("inf"), DUPLICATES)
        next_delta = load_row(delta, next_rows, head.tq, 0.0, DUPLICATES)
        dp_start = None
        if DP_STARTS:
            dp_start = -delta_row
            delta_row = 0.0
        s = dot_transposed(k, q_tile, None, IEEE_FP32)
        dp = dot_transposed(v, do_tile, dp_start, IEEE_FP32)
        p, keep, t = probabilities(s, lse_row, rows[None, :], j, head, IEEE_FP32, MASKED)
        dx = through_softcap(score_gradient(p, dp, delta_row, keep, head), t, head)
        if DV_WANTED:
            dv = dot(drop(p, keep, head), do_tile, dv, IEEE_FP32)
        if DK_WANTED:
            dk = dot(dx, q_tile, dk, IEEE_FP32)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def _dkdv_kernel(
    q, k, v, do, row_lse, delta, cu_seqlens_q, cu_seqlens_k, bias, slopes, seed, intervals, runs,
    dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, rows_b, rows_h,
    bias_b, bias_h, bias_i, bias_j, slopes_b, slopes_h, intervals_b, intervals_h, runs_b, runs_h,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    first_b, group, tq, tk, d_steps, dv_steps, left, right, threshold: tl.uint32, factor, softcap, inv_keep, scale,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEP: tl.constexpr, ALIGN: tl.constexpr, INT64_OFFSETS: tl.constexpr, IEEE_FP32: tl.constexpr,
    FP64: tl.constexpr, PAIRS: tl.constexpr, DUPLICATES: tl.constexpr, SAME_OFFSETS: tl.constexpr,
):  # fmt: skip
    GROUP = 1 if group is None else group  # without a loop over query heads fewer registers spill
    start = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    b = first_b + tl.program_id(2)
    start_q, start_k, tq, tk = lengths(cu_seqlens_q, cu_seqlens_k, b, tq, tk)
    if cu_seqlens_q is not None and start >= tk:
        return

    D = None if d_steps is None else d_steps * STEP
    DV = None if dv_steps is None else dv_steps * STEP
    j = start + tl.arange(0, BLOCK_N)[:, None]
    k_offsets = tile_offsets(k_t, BLOCK_N, BLOCK_D, ALIGN, INT64_OFFSETS)
    v_offsets = tile_offsets(v_t, BLOCK_N, BLOCK_DV, ALIGN, INT64_OFFSETS)
    k_tile = load_tile(at(k, k_b, k_h, k_t, b, kv_head, start_k + start, ALIGN), k_offsets, tk - start, D, CHECKED=True)
    v_tile = load_tile(
        at(v, v_b, v_h, v_t, b, kv_head, start_k + start, ALIGN), v_offsets, tk - start, DV, CHECKED=True
    )
    ACC: tl.constexpr = tl.float64 if FP64 else tl.float32
    if FP64:
        k_tile, v_tile = k_tile.to(ACC), v_tile.to(ACC)
    if seed is not None:
        seed = tl.load(seed)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], ACC)

    stop = tl.minimum(start + BLOCK_N, tk)
    first, unmasked, unmasked_end, last = band_tiles(start, stop, tq - tk, right, left, tq, BLOCK_M)
    if runs is not None:
        runs = own_list(runs, runs_b, runs_h, b, kv_head, tl.program_id(0))
        first = 0
        last = listed_tiles(runs)
    second = None
    if intervals is not None:
        intervals += steps(b, intervals_b, 1) + steps(kv_head, intervals_h, 1)
        if PAIRS == 2:
            second = intervals + 2
    for g in range(0, GROUP):
        h = kv_head * GROUP + g
        q_head = at(q, q_b, q_h, q_t, b, h, start_q, ALIGN)
        do_head = at(do, do_b, do_h, do_t, b, h, start_q, ALIGN)
        lse_head = at(row_lse, rows_b, rows_h, 1, b, h, start_q, 1)
        delta_head = at(delta, rows_b, rows_h, 1, b, h, start_q, 1)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + b * slopes_b + h * slopes_h).to(tl.float32)
        bias_head = None
        if bias is not None:
            bias_head = bias + steps(b, bias_b, 1) + steps(h, bias_h, 1)
        head = Head(
            b, h, tq, tk, left, right, factor, softcap, bias_head, bias_i, bias_j, slope, seed, threshold, inv_keep,
            intervals, second,
        )  # fmt: skip
        for MASKED in tl.static_range(2):
            dk_acc, dv_acc = _add_rows(
                dk_acc, dv_acc, k_tile, v_tile, q_head, do_head, lse_head, delta_head, q_t, do_t,
                j, head, Visits(first, unmasked, unmasked_end, last, runs),
                D, DV, BLOCK_M, ALIGN, INT64_OFFSETS, IEEE_FP32, DUPLICATES, SAME_OFFSETS,
                dk is not None, dv is not None, MASKED,
            )  # fmt: skip

    if dk is not None:
        dk = at(dk, dk_b, dk_h, dk_t, b, kv_head, start_k + start, ALIGN)
        store_tile(dk, tile_offsets(dk_t, BLOCK_N, BLOCK_D, ALIGN, INT64_OFFSETS), dk_acc * scale, tk - start, D)
    if dv is not None:
        dv = at(dv, dv_b, dv_h, dv_t, b, kv_head, start_k + start, ALIGN)
        store_tile(dv, tile_offsets(dv_t, BLOCK_N, BLOCK_DV, ALIGN, INT64_OFFSETS), dv_acc * inv_keep, tk - start, DV)


@triton.jit
def _add_columns(
    dq, q, do, row_lse, delta, k, v, k_offsets, v_offsets, k_t, v_t, i, head, visits, D, DV,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, IEEE_FP32: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the masked or the unmasked column tiles to dq. For heads above 256 it saves registers like `_add_rows`."""
    WIDE: tl.constexpr = q.shape[1] > 256 or do.shape[1] > 256
    runs = None
    if visits.runs is not None:
        runs = list_runs(visits, MASKED)
    tiles = count_tiles(visits, runs, MASKED)
    for n in tl.range(0, tiles, num_stages=1 if MASKED and WIDE else None, disable_licm=WIDE):
        start = nth_tile(n, visits, runs, MASKED) * BLOCK_N
        j = start + tl.arange(0, BLOCK_N)[None, :]
        k_tile = load_tile(k + steps(start, k_t, ALIGN), k_offsets, head.tk - start, D, CHECKED=MASKED)
        v_tile = load_tile(v + steps(start, v_t, ALIGN), v_offsets, head.tk - start, DV, CHECKED=MASKED)
        s = dot_transposed(q, k_tile, None, IEEE_FP32)
        dp = dot_transposed(do, v_tile, None, IEEE_FP32)
        p, keep, t = probabilities(s, row_lse[:, None], i, j, head, IEEE_FP32, MASKED)
        dx = through_softcap(score_gradient(p, dp, delta[:, None], keep, head), t, head)
        dq = dot(dx, k_tile, dq, IEEE_FP32)
    return dq


@triton.jit(do_not_specialize=SIZES)
def _dq_kernel(
    q, k, v, do, row_lse, delta, cu_seqlens_q, cu_seqlens_k, bias, slopes, seed, intervals, runs,
    dq,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, rows_b, rows_h,
    bias_b, bias_h, bias_i, bias_j, slopes_b, slopes_h, intervals_b, intervals_h, runs_b, runs_h,
    dq_b, dq_h, dq_t,
    heads, group, row_tiles, tq, tk, d_steps, dv_steps, left, right, threshold: tl.uint32, factor, softcap, inv_keep,
    scale,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEP: tl.constexpr, ALIGN: tl.constexpr, INT64_OFFSETS: tl.constexpr, IEEE_FP32: tl.constexpr,
    FP64: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    m, h, b = row_program(row_tiles, heads)
    if right is not None:
        m = row_tiles - 1 - m
    start_q, start_k, tq, tk = lengths(cu_seqlens_q, cu_seqlens_k, b, tq, tk)
    start = m * BLOCK_M
    if cu_seqlens_q is not None and start >= tq:
        return

    D = None if d_steps is None else d_steps * STEP
    DV = None if dv_steps is None else dv_steps * STEP
    rows = start + tl.arange(0, BLOCK_M)
    q_offsets = tile_offsets(q_t, BLOCK_M, BLOCK_D, ALIGN, INT64_OFFSETS)
    do_offsets = tile_offsets(do_t, BLOCK_M, BLOCK_DV, ALIGN, INT64_OFFSETS)
    k_offsets = tile_offsets(k_t, BLOCK_N, BLOCK_D, ALIGN, INT64_OFFSETS)
    v_offsets = tile_offsets(v_t, BLOCK_N, BLOCK_DV, ALIGN, INT64_OFFSETS)
    q_tile = load_tile(at(q, q_b, q_h, q_t, b, h, start_q + start, ALIGN), q_offsets, tq - start, D, CHECKED=True)
    do_tile = load_tile(
        at(do, do_b, do_h, do_t, b, h, start_q + start, ALIGN), do_offsets, tq - start, DV, CHECKED=True
    )
    ACC: tl.constexpr = tl.float64 if FP64 else tl.float32
    if FP64:
        q_tile, do_tile = q_tile.to(ACC), do_tile.to(ACC)
    row_lse = tl.load(at(row_lse, rows_b, rows_h, 1, b, h, start_q, 1) + rows, mask=rows < tq, other=float("inf"))
    delta = tl.load(at(delta, rows_b, rows_h, 1, b, h, start_q, 1) + rows, mask=rows < tq, other=0.0)
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
    k = at(k, k_b, k_h, k_t, b, h // group, start_k, ALIGN)
    v = at(v, v_b, v_h, v_t, b, h // group, start_k, ALIGN)
    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)

    stop = tl.minimum(start + BLOCK_M, tq)
    first, unmasked, unmasked_end, last = band_tiles(start, stop, tk - tq, left, right, tk, BLOCK_N)
    if runs is not None:
        runs = own_list(runs, runs_b, runs_h, b, h // group, m)
        first = 0
        last = listed_tiles(runs)
    for MASKED in tl.static_range(2):
        acc = _add_columns(
            acc, q_tile, do_tile, row_lse, delta, k, v, k_offsets, v_offsets, k_t, v_t, rows[:, None], head,
            Visits(first, unmasked, unmasked_end, last, runs), D, DV, BLOCK_N, ALIGN, IEEE_FP32, MASKED,
        )  # fmt: skip

    dq = at(dq, dq_b, dq_h, dq_t, b, h, start_q + start, ALIGN)
    store_tile(dq, tile_offsets(dq_t, BLOCK_M, BLOCK_D, ALIGN, INT64_OFFSETS), acc * scale, tq - start, D)


@triton.jit(do_not_specialize=SIZES)
def _dbias_kernel(
    q, k, v, do, row_lse, delta, bias, slopes, seed, intervals,
    dbias,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, rows_b, rows_h,
    bias_b, bias_h, bias_i, bias_j, slopes_b, slopes_h, intervals_b, intervals_h,
    dbias_b, dbias_h, dbias_i, dbias_j,
    batch, heads, group, row_tiles, col_tiles, b_step, h_step, tq, tk, d_steps, dv_steps, left, right, threshold: tl.uint32,
    factor, softcap, inv_keep,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUM_ROWS: tl.constexpr,
    STEP: tl.constexpr, ALIGN: tl.constexpr, INT64_OFFSETS: tl.constexpr, IEEE_FP32: tl.constexpr,
    FP64: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    D = None if d_steps is None else d_steps * STEP
    DV = None if dv_steps is None else dv_steps * STEP
    own_n = tl.program_id(0) % col_tiles
    own_m = tl.program_id(0) // col_tiles % row_tiles
    own_h = tl.program_id(0) // col_tiles // row_tiles % h_step
    own_b = tl.program_id(0) // col_tiles // row_tiles // h_step
    col = own_n * BLOCK_N
    stop = tl.minimum(col + BLOCK_N, tk)
    first, _unmasked, _unmasked_end, last = band_tiles(col, stop, tq - tk, right, left, tq, BLOCK_M)
    if not SUM_ROWS:
        first = tl.maximum(first, own_m)
        last = tl.minimum(last, own_m + 1)

    ACC: tl.constexpr = tl.float64 if FP64 else tl.float32
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    q_offsets = tile_offsets(q_t, BLOCK_M, BLOCK_D, ALIGN, INT64_OFFSETS)
    do_offsets = tile_offsets(do_t, BLOCK_M, BLOCK_DV, ALIGN, INT64_OFFSETS)
    k_offsets = tile_offsets(k_t, BLOCK_N, BLOCK_D, ALIGN, INT64_OFFSETS)
    v_offsets = tile_offsets(v_t, BLOCK_N, BLOCK_DV, ALIGN, INT64_OFFSETS)
    j = col + tl.arange(0, BLOCK_N)[None, :]
    if seed is not None:
        seed = tl.load(seed)

    for b in range(own_b, batch, b_step):
        for h in range(own_h, heads, h_step):
            slope = None
            if slopes is not None:
                slope = tl.load(slopes + b * slopes_b + h * slopes_h).to(tl.float32)
            bias_head = bias + steps(b, bias_b, 1) + steps(h, bias_h, 1)
            intervals_head = None
            second = None
            if intervals is not None:
                intervals_head = intervals + steps(b, intervals_b, 1) + steps(h // group, intervals_h, 1)
                if PAIRS == 2:
                    second = intervals_head + 2
            head = Head(
                b, h, tq, tk, left, right, factor, softcap, bias_head, bias_i, bias_j, slope, seed, threshold, inv_keep,
                intervals_head, second,
            )  # fmt: skip
            k_tile = load_tile(at(k, k_b, k_h, k_t, b, h // group, col, ALIGN), k_offsets, tk - col, D, CHECKED=True)
            v_tile = load_tile(at(v, v_b, v_h, v_t, b, h // group, col, ALIGN), v_offsets, tk - col, DV, CHECKED=True)
            for m in range(first, last):
                row = m * BLOCK_M
                rows = row + tl.arange(0, BLOCK_M)
                q_tile = load_tile(at(q, q_b, q_h, q_t, b, h, row, ALIGN), q_offsets, tq - row, D, CHECKED=True)
                do_tile = load_tile(at(do, do_b, do_h, do_t, b, h, row, ALIGN), do_offsets, tq - row, DV, CHECKED=True)
                lse_row = tl.load(at(row_lse, rows_b, rows_h, 1, b, h, rows, 1), mask=rows < tq, other=float("inf"))
                delta_row = tl.load(at(delta, rows_b, rows_h, 1, b, h, rows, 1), mask=rows < tq, other=0.0)
                if FP64:
                    q_tile, do_tile = q_tile.to(ACC), do_tile.to(ACC)
                s = dot_transposed(q_tile, k_tile, None, IEEE_FP32)
                dp = dot_transposed(do_tile, v_tile, None, IEEE_FP32)
                p, keep, _tanh = probabilities(s, lse_row[:, None], rows[:, None], j, head, IEEE_FP32, MASKED=True)
                acc += score_gradient(p, dp, delta_row[:, None], keep, head)

    dbias += steps(own_b, dbias_b, 1) + steps(own_h, dbias_h, 1)
    i = own_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    if SUM_ROWS:
        acc = tl.sum(acc, 0, keep_dims=True)
        i = tl.zeros([1, 1], tl.int32)
    inside = ((i < tq) | SUM_ROWS) & (j < tk)
    tl.store(dbias + i.to(tl.int64) * dbias_i + j.to(tl.int64) * dbias_j, acc.to(dbias.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _dbias_rows_kernel(
    row_lse, delta, dlse, sinks,
    dbias,
    rows_b, rows_h, dlse_b, dlse_h, dlse_t, sinks_h, dbias_b, dbias_h, dbias_i,
    batch, heads, row_tiles, b_step, h_step, tq,
    BLOCK: tl.constexpr, SUM_ROWS: tl.constexpr, IEEE_FP32: tl.constexpr,
):  # fmt: skip
    own_m, own_h, own_b = row_program(row_tiles, h_step)
    m_end = own_m + 1
    if SUM_ROWS:
        m_end = (tq + BLOCK - 1) // BLOCK

    acc = tl.zeros([BLOCK], tl.float64 if IEEE_FP32 else tl.float32)
    for b in range(own_b, batch, b_step):
        for h in range(own_h, heads, h_step):
            for m in range(own_m, m_end):
                rows = m * BLOCK + tl.arange(0, BLOCK)
                z = tl.load(at(row_lse, rows_b, rows_h, 1, b, h, rows, 1), mask=rows < tq, other=float("inf"))
                if dlse is not None:
                    valid = z < float("inf")
                    acc += tl.load(at(dlse, dlse_b, dlse_h, dlse_t, b, h, rows, 1), mask=valid, other=0.0)
                if sinks is not None:
                    sink = tl.load(sinks + h * sinks_h).to(tl.float32)
                    d = tl.load(at(delta, rows_b, rows_h, 1, b, h, rows, 1), mask=rows < tq, other=0.0)
                    acc += sink_probability(sink, z, IEEE_FP32) * d

    dbias += steps(own_b, dbias_b, 1) + steps(own_h, dbias_h, 1)
    i = own_m * BLOCK + tl.arange(0, BLOCK)
    if SUM_ROWS:
        acc = tl.sum(acc, 0, keep_dims=True)
        i = tl.zeros([1], tl.int32)
    tl.store(dbias + i.to(tl.int64) * dbias_i, acc.to(dbias.dtype.element_ty), mask=(i < tq) | SUM_ROWS)


@triton.jit(do_not_specialize=SIZES)
def _dsinks_kernel(
    row_lse, delta, sinks, cu_seqlens_q,
    dsinks,
    rows_b, rows_h, sinks_h, dsinks_h, batch, tq,
    BLOCK: tl.constexpr, IEEE_FP32: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    sink = tl.load(sinks + h * sinks_h).to(tl.float32)
    acc = tl.zeros([BLOCK], tl.float64 if IEEE_FP32 else tl.float32)
    for b in range(0, batch):
        start_q, _start_k, t, _tk = lengths(cu_seqlens_q, cu_seqlens_q, b, tq, tq)
        for start in range(0, t, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            z = tl.load(at(row_lse, rows_b, rows_h, 1, b, h, start_q + rows, 1), mask=rows < t, other=float("inf"))
            d = tl.load(at(delta, rows_b, rows_h, 1, b, h, start_q + rows, 1), mask=rows < t, other=0.0)
            acc -= sink_probability(sink, z, IEEE_FP32) * d
    total = tl.load(dsinks + h * dsinks_h).to(acc.dtype) + tl.sum(acc, 0)
    tl.store(dsinks + h * dsinks_h, total.to(dsinks.dtype.element_ty))
