"""Sampling in Triton: three kernels, the first two with several programs for each row, one for each chunk of its logits.

    maxima    for each chunk    max l, max y, and the largest y of every segment of logits
    gather    for each chunk    Σ exp(l − max l), and one of these three:
                                T = 0           the first y that is the largest
                                no filter       argmax of z + g, which may also apply min_p
                                top_k, top_p    the candidates, y ≥ bound, appended to the row's list; for top_p also Σ e
    choose    for each row      from the list: the smallest y that top_k keeps, the smallest e that top_p keeps, argmax of z + g

The bound of top_k is at most the k-th largest maximum of a segment. So at least k tokens are candidates, among them every token
that top_k keeps. With top_p but no top_k, the bound is at most the median of these maxima. The list is then enough if the
smallest kept e is larger than the e of every token below the bound. A token with y < max y − 88 T has e = 0, so it is not a
candidate.

If there are too many candidates for the list, or the list is not enough, `choose` reads the row several times, TILE logits at a
time:

    top_k     a pass that writes y to scratch, then 16 passes, each for two bits of the smallest kept y
    top_p     a pass that writes e to scratch, then 15 passes, each for two bits of the smallest kept e
    pass      argmax of z + g over the kept tokens

This is much slower. It happens if top_k is more than about a thousand, if more than LISTED tokens are equal, or if top_p keeps
more than about a thousand tokens. The programs append candidates in any order, but the token does not depend on this order:
masses are integers, and the smallest index of equal scores is taken. Fused multiply-adds are off, so the results have the bits
of the other kernels.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import dependent, start_next, wait_for_previous
from ..gpu import ceil_div, launch, multiprocessors, padded
from ..scratch import Scratch, Shapes, TensorLike
from .elementary import mass_bits
from .triton_numerics import (
    INFINITY,
    LARGEST,
    LEAST_KEY,
    exp_,
    gumbel,
    kth_largest,
    log_of_total,
    mass_of,
    number_of,
    order_key,
    penalised,
    smallest_kept,
    smallest_kept_mass,
    total_mass,
)

if TYPE_CHECKING:
    from . import Draws

TILE = 1 << 12  # most logits that a program for a whole row loads at once
WARPS = 16
CHUNK_TILE = 1 << 9  # most logits that a program for a chunk loads at once
CHUNK_WARPS = 8
PROGRAMS = 8  # most programs for each multiprocessor, because every program of a row searches its maxima
SEGMENTS = 1 << 11  # most segments of a row
FEW = 1 << 9  # a list of at most FEW candidates takes fewer registers and less time
LISTED = 1 << 11  # most candidates of a list

NO_EXPONENT = tl.constexpr(88.0)  # exp(−x) is 0 if x is more than 87
LEAST_FINITE_KEY = tl.constexpr(-2139095040)  # the key of −LARGEST
MARGIN = tl.constexpr(1.000001)  # more than the relative error of two exp


@triton.jit
def _logprobs_kernel(logits, targets, logprobs, logits_n, V, scale, TILE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    row, cols = logits + n * logits_n, tl.arange(0, TILE)
    target = tl.load(targets + n)
    if target < 0:
        tl.store(logprobs + n, 0.0)
    else:
        tops = tl.full([TILE], -INFINITY, tl.float32)
        bad = tl.zeros([TILE], tl.int32)
        for k in range(0, V, TILE):
            l = tl.load(row + k + cols, mask=k + cols < V, other=-INFINITY)
            tops = tl.maximum(tops, l)
            bad |= ((l != l) | (l == INFINITY)).to(tl.int32)
        top = tl.max(tops, 0)
        if (tl.max(bad, 0) != 0) | (top == -INFINITY):
            tl.store(logprobs + n, float("nan"))
        else:
            total = log_of_total(total_mass(row, V, top, scale, TILE), scale)
            of_target = tl.load(row + target).to(tl.float64)
            tl.store(logprobs + n, ((of_target - top.to(tl.float64)) - total).to(tl.float32))


@triton.jit
def _settings(settings, b, V):
    """(T > 0; T, or 1 if T = 0; top_k, or 0 if it removes no token; top_p; min_p; the penalty)"""
    row = settings + b * 5
    temperature, top_k = tl.load(row), tl.load(row + 1)
    random = temperature > 0.0
    k = tl.where(random & (top_k < V), top_k, 0.0).to(tl.int32)
    return random, tl.where(random, temperature, 1.0), k, tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def _top(maxima, b, P, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    return tl.max(tl.load(maxima + b * P + parts, mask=parts < P, other=-INFINITY), 0)


@triton.jit
def _first_of_largest(score, index, V):
    """(the largest score, the smallest index that has it)"""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, index, V), 0)


@triton.jit
def _maxima_kernel(
    logits, settings, drawn, seen,
    raw_tops, tops, segments, counts,
    logits_n, seen_n, V, P, chunk, segments_n,
    SEEN: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The maximum of l is +inf for a chunk with a NaN."""
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    b, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(drawn + b) < 0:
        return
    cols, row, row_seen = tl.arange(0, TILE), logits + b * logits_n, seen + b * seen_n
    penalty = tl.load(settings + b * 5 + 4)
    chunk_tops = tl.full([TILE], -INFINITY, tl.float32)
    chunk_raw_tops = tl.full([TILE], -INFINITY, tl.float32)
    for k in range(p * chunk, tl.minimum((p + 1) * chunk, V), TILE):
        i = k + cols
        l = tl.load(row + i, mask=i < V, other=-INFINITY)
        y = penalised(l, row_seen, i, i < V, penalty, SEEN)
        chunk_raw_tops = tl.maximum(chunk_raw_tops, tl.where(l != l, INFINITY, l))
        chunk_tops = tl.maximum(chunk_tops, y)
        if SEGMENT > 0:
            tile_segments: tl.constexpr = TILE // SEGMENT
            largest = tl.max(tl.reshape(y, [tile_segments, SEGMENT]), 1)
            tl.store(segments + b * segments_n + k // SEGMENT + tl.arange(0, tile_segments), largest)
    tl.store(raw_tops + b * P + p, tl.max(chunk_raw_tops, 0))
    tl.store(tops + b * P + p, tl.max(chunk_tops, 0))
    if p == 0:
        tl.store(counts + b, 0)


@triton.jit
def _gather_kernel(
    logits, settings, seeds, sequences, drawn, seen, raw_tops, tops, segments,
    totals, tempered, best, index, counts, bounds, list_y, list_index,
    logits_n, seen_n, V, P, chunk, segments_n, scale,
    SEEN: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, LISTED: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    b, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    before, raw_top, top = tl.load(drawn + b), _top(raw_tops, b, P, PARTS), _top(tops, b, P, PARTS)
    if (before < 0) | (tl.abs(raw_top) == INFINITY):
        return
    cols, row, row_seen = tl.arange(0, TILE), logits + b * logits_n, seen + b * seen_n
    random, divisor, top_k, top_p, min_p, penalty = _settings(settings, b, V)
    seed, sequence = tl.load(seeds + b), tl.load(sequences + b)
    listed = random & ((top_k > 0) | (top_p < 1.0))

    bound = tl.maximum(top - NO_EXPONENT * divisor, -LARGEST)  # y − top < −88 T: e = 0
    if SEGMENT > 0:
        rank = tl.where(top_k > 0, top_k, (segments_n + 1) // 2)
        if listed & (rank <= segments_n):
            s = tl.arange(0, SEGMENTS)
            maxima = tl.load(segments + b * segments_n + s, mask=s < segments_n, other=-INFINITY)
            keys = tl.where(s < segments_n, order_key(maxima), LEAST_KEY)
            key = kth_largest(keys, segments_n, rank, rank + rank // 8)
            bound = tl.maximum(bound, number_of(tl.maximum(key, LEAST_FINITE_KEY)))
    if p == 0:
        tl.store(bounds + b, bound)

    start, stop = p * chunk, tl.minimum((p + 1) * chunk, V)
    masses = tl.zeros([TILE], tl.int64)
    tempered_masses = tl.zeros([TILE], tl.int64)
    candidates = tl.zeros([TILE], tl.int32)
    scores = tl.full([TILE], -INFINITY, tl.float32)
    indices = tl.zeros([TILE], tl.int32)
    for k in range(start, stop, TILE):
        i = k + cols
        l = tl.load(row + i, mask=i < V, other=-INFINITY)
        masses += mass_of(exp_(l - raw_top), scale)
        y = penalised(l, row_seen, i, i < V, penalty, SEEN)
        if listed:
            candidates += (y >= bound).to(tl.int32)
            if top_k == 0:
                tempered_masses += mass_of(exp_(tl.div_rn(y - top, divisor)), scale)
        else:
            score = tl.div_rn(y - top, divisor)
            if random:
                kept = exp_(score) >= min_p
                score = tl.where(kept, score + gumbel(seed, i, before, sequence), -INFINITY)
            better = score > scores
            scores, indices = tl.where(better, score, scores), tl.where(better, i, indices)
    tl.store(totals + b * P + p, tl.sum(masses, 0))

    if listed:
        if top_k == 0:
            tl.store(tempered + b * P + p, tl.sum(tempered_masses, 0))
        n = tl.sum(candidates, 0)
        if n > 0:
            place = tl.atomic_add(counts + b, n, sem="relaxed") + tl.cumsum(candidates, 0) - candidates
            for k in range(start, stop, TILE):
                i = k + cols
                l = tl.load(row + i, mask=i < V, other=-INFINITY)
                y = penalised(l, row_seen, i, i < V, penalty, SEEN)
                tl.store(list_y + b * LISTED + place, y, mask=(y >= bound) & (place < LISTED))
                tl.store(list_index + b * LISTED + place, i, mask=(y >= bound) & (place < LISTED))
                place += (y >= bound).to(tl.int32)
    else:
        largest, first = _first_of_largest(scores, indices, V)
        tl.store(best + b * P + p, largest)
        tl.store(index + b * P + p, first)


@triton.jit
def _choose_from_list(
    list_y, list_index, n, top, total, limit, divisor, top_k, top_p, min_p, seed, before, sequence, V, scale,
    LISTED: tl.constexpr,
):  # fmt: skip
    """(token, whether the list was enough). `total` is Σ of the masses of e over the row. Without a top_k, the e of tokens that
    are not in the list are at most `limit`."""
    j = tl.arange(0, LISTED)
    y = tl.load(list_y + j, mask=j < n, other=-INFINITY)
    i = tl.load(list_index + j, mask=j < n, other=0)
    key, score = order_key(y), tl.div_rn(y - top, divisor)
    e, kept, enough = exp_(score), j < n, tl.full([], 1, tl.int32)
    if top_k > 0:
        kept = kept & (key >= kth_largest(tl.where(kept, key, LEAST_KEY), n, top_k, top_k))
    if top_p < 1.0:
        mass = tl.where(kept, mass_of(e, scale), 0)
        if top_k > 0:
            total = tl.sum(mass, 0)
        share = total.to(tl.float64) * top_p.to(tl.float64)
        least = smallest_kept_mass(e, mass, share)
        enough = ((top_k > 0) | (least > limit)).to(tl.int32)
        min_p = tl.maximum(min_p, tl.minimum(least, 1.0))
    score = tl.where(kept & (e >= min_p), score + gumbel(seed, i, before, sequence), -INFINITY)
    _, token = _first_of_largest(score, i, V)
    return token, enough


@triton.jit
def _choose_from_row(
    row, row_seen, row_scratch, top, divisor, top_k, top_p, min_p, penalty, seed, before, sequence, V, scale,
    SEEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, TILE)
    smallest_y, smallest_e = tl.full([], LEAST_KEY, tl.int32), min_p
    if top_k > 0:
        for k in range(0, V, TILE):
            i = k + cols
            l = tl.load(row + i, mask=i < V, other=-INFINITY)
            tl.store(row_scratch + i, penalised(l, row_seen, i, i < V, penalty, SEEN), mask=i < V)
        tl.debug_barrier()
        smallest_y = smallest_kept(row_scratch, V, top_k.to(tl.float64), scale, MASSES=False, TILE=TILE)
        tl.debug_barrier()
    if top_p < 1.0:
        masses = tl.zeros([TILE], tl.int64)
        for k in range(0, V, TILE):
            i = k + cols
            l = tl.load(row + i, mask=i < V, other=-INFINITY)
            y = penalised(l, row_seen, i, i < V, penalty, SEEN)
            e = tl.where(order_key(y) >= smallest_y, exp_(tl.div_rn(y - top, divisor)), 0.0)
            masses += tl.where(i < V, mass_of(e, scale), 0)
            tl.store(row_scratch + i, e, mask=i < V)
        bound = tl.sum(masses, 0).to(tl.float64) * top_p.to(tl.float64)
        tl.debug_barrier()
        least = smallest_kept(row_scratch, V, bound, scale, MASSES=True, TILE=TILE).to(tl.float32, bitcast=True)
        smallest_e = tl.maximum(smallest_e, tl.minimum(least, 1.0))
    scores = tl.full([TILE], -INFINITY, tl.float32)
    indices = tl.zeros([TILE], tl.int32)
    for k in range(0, V, TILE):
        i = k + cols
        l = tl.load(row + i, mask=i < V, other=-INFINITY)
        y = penalised(l, row_seen, i, i < V, penalty, SEEN)
        score = tl.div_rn(y - top, divisor)
        kept = (order_key(y) >= smallest_y) & (exp_(score) >= smallest_e)
        score = tl.where(kept, score + gumbel(seed, i, before, sequence), -INFINITY)
        better = score > scores
        scores, indices = tl.where(better, score, scores), tl.where(better, i, indices)
    _, token = _first_of_largest(scores, indices, V)
    return token


@triton.jit
def _choose_kernel(
    logits, settings, seeds, sequences, drawn, raw_tops, tops,
    totals, tempered, best, index, counts, bounds, list_y, list_index,
    tokens, logprobs, seen, scratch,
    logits_n, seen_n, V, P, scale,
    SEEN: tl.constexpr, FEW: tl.constexpr, LISTED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    b, parts = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    before, raw_top, top = tl.load(drawn + b), _top(raw_tops, b, P, PARTS), _top(tops, b, P, PARTS)
    if before < 0:
        return
    row, row_seen = logits + b * logits_n, seen + b * seen_n
    random, divisor, top_k, top_p, min_p, penalty = _settings(settings, b, V)
    seed, sequence = tl.load(seeds + b), tl.load(sequences + b)

    if tl.abs(raw_top) == INFINITY:
        tl.store(tokens + b, tl.full([], -1, tl.int64))
        tl.store(logprobs + b, 0.0)
    else:
        token = tl.full([], 0, tl.int32)
        if random & ((top_k > 0) | (top_p < 1.0)):
            n, enough = tl.load(counts + b), tl.full([], 0, tl.int32)
            limit = exp_(tl.div_rn(tl.load(bounds + b) - top, divisor)) * MARGIN
            total = tl.full([], 0, tl.int64)
            if top_k == 0:
                total = tl.sum(tl.load(tempered + b * P + parts, mask=parts < P, other=0), 0)
            row_y, row_index = list_y + b * LISTED, list_index + b * LISTED
            if n <= FEW:
                token, enough = _choose_from_list(
                    row_y, row_index, n, top, total, limit, divisor, top_k, top_p, min_p, seed, before, sequence, V, scale,
                    LISTED=FEW,
                )  # fmt: skip
            elif n <= LISTED:
                token, enough = _choose_from_list(
                    row_y, row_index, n, top, total, limit, divisor, top_k, top_p, min_p, seed, before, sequence, V, scale,
                    LISTED=LISTED,
                )  # fmt: skip
            if enough == 0:
                token = _choose_from_row(
                    row, row_seen, scratch + b * V, top, divisor, top_k, top_p, min_p, penalty, seed, before, sequence,
                    V, scale, SEEN=SEEN, TILE=TILE,
                )  # fmt: skip
        else:
            scores = tl.load(best + b * P + parts, mask=parts < P, other=-INFINITY)
            indices = tl.load(index + b * P + parts, mask=parts < P, other=0)
            _, token = _first_of_largest(scores, indices, V)

        masses = tl.sum(tl.load(totals + b * P + parts, mask=parts < P, other=0), 0)
        of_token = tl.load(row + token).to(tl.float64)
        logprob = (of_token - raw_top.to(tl.float64)) - log_of_total(masses, scale)
        tl.store(tokens + b, token.to(tl.int64))
        tl.store(logprobs + b, logprob.to(tl.float32))
        if SEEN:
            tl.store(row_seen + token, tl.full([], 1, tl.uint8))


def _tile(v: int) -> int:
    return min(padded(v), max(CHUNK_TILE, padded(v) // SEGMENTS))


def _segment(v: int) -> int:
    """Logits of a segment; 0 if all of a row's logits fit in the list, so there is no bound."""
    return 0 if v <= LISTED else max(1, padded(v) // SEGMENTS)


def workspace(logits: TensorLike, *, draw: bool) -> Shapes:
    if not draw:
        return {}
    (b, v), listed = logits.shape, min(padded(logits.shape[1]), LISTED)
    parts = ceil_div(v, _tile(v))
    maxima = parts * _tile(v) // _segment(v) if _segment(v) else 0
    return {
        "row": ((b, v), torch.float32),
        "segments": ((b, maxima), torch.float32),
        "list_y": ((b, listed), torch.float32),
        "list_index": ((b, listed), torch.int32),
        "raw_tops": ((b, parts), torch.float32),
        "tops": ((b, parts), torch.float32),
        "totals": ((b, parts), torch.int64),
        "tempered": ((b, parts), torch.int64),
        "best": ((b, parts), torch.float32),
        "index": ((b, parts), torch.int32),
        "counts": ((b,), torch.int32),
        "bounds": ((b,), torch.float32),
    }


def _options(v: int) -> dict[str, object]:
    tile = min(padded(v), TILE)
    return {"TILE": tile, "num_warps": min(WARPS, max(1, tile // 32)), "enable_fp_fusion": False}


def logprobs(logits: Tensor, targets: Tensor, *, logprobs: Tensor, scratch: Scratch) -> None:
    n, v = logits.shape
    numbers = (logits.stride(0), v, 2.0 ** mass_bits(v))
    launch(_logprobs_kernel, (n,), logits, targets, logprobs, *numbers, **_options(v))


def fwd(
    logits: Tensor, draws: Draws, *, tokens: Tensor, logprobs: Tensor, seen: Tensor | None, scratch: Scratch
) -> None:
    (b, v), s, scale = logits.shape, scratch, 2.0 ** mass_bits(logits.shape[1])
    tile, segment, listed = _tile(v), _segment(v), s["list_y"].shape[1]
    parts, segments = ceil_div(v, tile), s["segments"].shape[1]
    most = max(1, PROGRAMS * multiprocessors(logits.device) // max(b, 1))
    chunk = tile * ceil_div(parts, min(parts, most))
    p = ceil_div(v, chunk)
    flags = tokens if seen is None else seen  # any address: without seen it is not read
    strides = logits.stride(0), 0 if seen is None else seen.stride(0)
    seeing: dict[str, object] = {"SEEN": seen is not None, **dependent(logits, b)}
    warps = min(CHUNK_WARPS, max(1, tile // 32))
    options = {"SEGMENT": segment, "TILE": tile, "num_warps": warps, "enable_fp_fusion": False, **seeing}

    tops, totals = (s["raw_tops"], s["tops"]), (s["totals"], s["tempered"], s["best"], s["index"])
    lists = s["counts"], s["bounds"], s["list_y"], s["list_index"]
    sizes = *strides, v, p, chunk, segments
    reads = logits, *draws
    maxima = *tops, s["segments"], s["counts"]
    launch(_maxima_kernel, (b, p), logits, draws.settings, draws.drawn, flags, *maxima, *sizes, **options)
    gathered, listing = (*totals, *lists), {"LISTED": listed, "PARTS": padded(parts)}
    options |= {"SEGMENTS": padded(segments), **listing}
    launch(_gather_kernel, (b, p), *reads, flags, *tops, s["segments"], *gathered, *sizes, scale, **options)
    options = {"FEW": min(FEW, listed), **listing, **_options(v), **seeing}
    chosen = tokens, logprobs, flags, s["row"]
    launch(_choose_kernel, (b,), *reads, *tops, *gathered, *chosen, *strides, v, p, scale, **options)
