"""Sampling in Triton: one program for each row, which reads the row several times, TILE logits at a time.

    pass      max l, max y, whether a logit is NaN or +inf; writes y to scratch
    pass      Σ exp(l − max l)
    top_k     16 passes, each for two bits of the smallest kept y
    top_p     a pass that replaces y by e in scratch, then 15 passes, each for two bits of the smallest kept e
    pass      argmax of z + g over the kept tokens

A row of GPT-2's logits takes 200 KB and stays in the L2 cache. A pass computes three sums to find two bits. Fused multiply-adds
are off, so the results have the bits of the other kernels.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch, padded
from ..scratch import Scratch, Shapes, TensorLike
from .elementary import mass_bits

TILE = 1 << 12  # most logits that a program loads at once
WARPS = 16

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _exp(x):
    """exp(x) for x ≤ 0, as in elementary.py."""
    inside = tl.maximum(x, -87.0)
    n = tl.floor(inside * LOG2E + 0.5)
    r = (inside - n * 0.693359375) - n * -2.12194440e-4
    p = tl.full(x.shape, 1 / 5040, tl.float32)
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, p * power)


@triton.jit
def _log(x):
    """log(x) for a normal x > 0, as in elementary.py."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(m - 1.0, m + 1.0)
    q = s * s
    p = tl.full(x.shape, 1 / 9, tl.float32)
    p = p * q + 1 / 7
    p = p * q + 1 / 5
    p = p * q + 1 / 3
    k = exponent.to(tl.float32)
    return ((p * q * (2.0 * s) + k * -2.12194440e-4) + 2.0 * s) + k * 0.693359375


@triton.jit
def _log_of_total(total, scale):
    """log(total / scale) in float64; `scale` is a power of 2."""
    x = total.to(tl.float64) / scale
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    p = tl.full([], 1 / 23, tl.float64)
    for n in tl.static_range(10):
        p = p * q + tl.full([], 1 / (21 - 2 * n), tl.float64)
    k = exponent.to(tl.float64)
    low = tl.full([], 1.90821492927058770002e-10, tl.float64)
    high = tl.full([], 6.93147180369123816490e-01, tl.float64)
    return ((p * q * (2.0 * s) + k * low) + 2.0 * s) + k * high


@triton.jit
def _mass(e, scale):
    return (e * scale + 0.5).to(tl.int64)


@triton.jit
def _penalised(l, row_seen, i, inside, penalty, SEEN: tl.constexpr):
    y = l
    if SEEN:
        seen = tl.load(row_seen + i, mask=inside, other=0)
        y = tl.where(l < 0.0, l * penalty, tl.div_rn(l, penalty))
        y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
        y = tl.where((seen == 0) | (l == -INFINITY), l, y)
    return y


@triton.jit
def _ordered(y):
    """Integers in the order of the numbers y; −0 and 0 are equal."""
    bits = tl.where(y == 0.0, 0.0, y).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _smallest(row, V, bound, scale, MASSES: tl.constexpr, TILE: tl.constexpr):
    """The smallest t such that the keys above t have a total mass below `bound`. `row` has e, each with its mass, or y, each of
    mass 1. t is found two bits at a time, the highest first. For y the first of them is the sign, which is reversed."""
    cols = tl.arange(0, TILE)
    t = tl.full([], 0 if MASSES else -2147483648, tl.int32)
    passes: tl.constexpr = 15 if MASSES else 16
    for step in range(passes):
        shift = 2 * (passes - 1 - step)
        one = tl.full([], 1, tl.int32) << shift
        above0 = tl.zeros([TILE], tl.int64)
        above1 = tl.zeros([TILE], tl.int64)
        above2 = tl.zeros([TILE], tl.int64)
        for k in range(0, V, TILE):
            x = tl.load(row + k + cols, mask=k + cols < V, other=0.0)
            if MASSES:
                key, mass = x.to(tl.int32, bitcast=True), _mass(x, scale)
            else:
                key, mass = _ordered(x), (k + cols < V).to(tl.int64)
            above0 += tl.where(key > (t | (one - 1)), mass, 0)
            above1 += tl.where(key > ((t ^ one) | (one - 1)), mass, 0)
            above2 += tl.where(key > ((t ^ (one << 1)) | (one - 1)), mass, 0)
        digit = (tl.sum(above0, 0).to(tl.float64) >= bound).to(tl.int32)
        digit += (tl.sum(above1, 0).to(tl.float64) >= bound).to(tl.int32)
        digit += (tl.sum(above2, 0).to(tl.float64) >= bound).to(tl.int32)
        t = t ^ (digit << shift)
    return t


@triton.jit
def _gumbel(seed, i, drawn, sequence):
    zero = tl.zeros(i.shape, tl.uint32)
    low, high = (sequence & 0xFFFFFFFF).to(tl.uint32), ((sequence >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, i.to(tl.uint32), zero + drawn.to(tl.uint32), zero + low, zero + high)
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    u = 1.0 - v
    lost = tl.div_rn(v - (1.0 - u), u)
    return -_log(lost - _log(u))


@triton.jit
def _total(row, V, top, scale, TILE: tl.constexpr):
    """Σ of the masses of exp(l − top)."""
    cols = tl.arange(0, TILE)
    masses = tl.zeros([TILE], tl.int64)
    for k in range(0, V, TILE):
        l = tl.load(row + k + cols, mask=k + cols < V, other=-INFINITY)
        masses += _mass(_exp(l - top), scale)
    return tl.sum(masses, 0)


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
            total = _log_of_total(_total(row, V, top, scale, TILE), scale)
            at = tl.load(row + target).to(tl.float64)
            tl.store(logprobs + n, ((at - top.to(tl.float64)) - total).to(tl.float32))


@triton.jit
def _sample_kernel(
    logits, settings, seeds, sequences, drawn,
    tokens, logprobs, seen, scratch,
    logits_n, seen_n, V, scale,
    SEEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    seed, sequence, before = tl.load(seeds + b), tl.load(sequences + b), tl.load(drawn + b)
    if before < 0:
        return
    cols, row, row_seen, row_scratch = tl.arange(0, TILE), logits + b * logits_n, seen + b * seen_n, scratch + b * V
    temperature, top_k = tl.load(settings + b * 5), tl.load(settings + b * 5 + 1)
    top_p, min_p, penalty = tl.load(settings + b * 5 + 2), tl.load(settings + b * 5 + 3), tl.load(settings + b * 5 + 4)

    tops = tl.full([TILE], -INFINITY, tl.float32)
    raw_tops = tl.full([TILE], -INFINITY, tl.float32)
    bad = tl.zeros([TILE], tl.int32)
    for k in range(0, V, TILE):
        i = k + cols
        l = tl.load(row + i, mask=i < V, other=-INFINITY)
        y = _penalised(l, row_seen, i, i < V, penalty, SEEN)
        raw_tops, tops = tl.maximum(raw_tops, l), tl.maximum(tops, y)
        bad |= ((l != l) | (l == INFINITY)).to(tl.int32)
        tl.store(row_scratch + i, y, mask=i < V)
    raw_top, top = tl.max(raw_tops, 0), tl.max(tops, 0)

    if (tl.max(bad, 0) != 0) | (raw_top == -INFINITY):
        tl.store(tokens + b, tl.full([], -1, tl.int64))
        tl.store(logprobs + b, 0.0)
    else:
        random = temperature > 0.0
        divisor = tl.where(random, temperature, 1.0)
        smallest_y = tl.full([], -2147483648, tl.int32)
        smallest_e = min_p
        if random & (top_k > 0.0) & (top_k < V):
            tl.debug_barrier()
            smallest_y = _smallest(row_scratch, V, top_k.to(tl.float64), scale, MASSES=False, TILE=TILE)
        if random & (top_p < 1.0):
            masses = tl.zeros([TILE], tl.int64)
            for k in range(0, V, TILE):
                i = k + cols
                l = tl.load(row + i, mask=i < V, other=-INFINITY)
                y = _penalised(l, row_seen, i, i < V, penalty, SEEN)
                e = tl.where(_ordered(y) >= smallest_y, _exp(tl.div_rn(y - top, divisor)), 0.0)
                masses += tl.where(i < V, _mass(e, scale), 0)
                tl.store(row_scratch + i, e, mask=i < V)
            bound = tl.sum(masses, 0).to(tl.float64) * top_p.to(tl.float64)
            tl.debug_barrier()
            least = _smallest(row_scratch, V, bound, scale, MASSES=True, TILE=TILE).to(tl.float32, bitcast=True)
            smallest_e = tl.maximum(smallest_e, tl.minimum(least, 1.0))

        best = tl.full([TILE], -INFINITY, tl.float32)
        index = tl.zeros([TILE], tl.int32)
        for k in range(0, V, TILE):
            i = k + cols
            l = tl.load(row + i, mask=i < V, other=-INFINITY)
            y = _penalised(l, row_seen, i, i < V, penalty, SEEN)
            score = tl.div_rn(y - top, divisor)
            if random:
                kept = (_ordered(y) >= smallest_y) & (_exp(score) >= smallest_e)
                score = tl.where(kept, score + _gumbel(seed, i, before, sequence), -INFINITY)
            better = score > best
            best, index = tl.where(better, score, best), tl.where(better, i, index)
        token = tl.min(tl.where(best == tl.max(best, 0), index, V), 0)

        total = _log_of_total(_total(row, V, raw_top, scale, TILE), scale)
        at = tl.load(row + token).to(tl.float64)
        tl.store(tokens + b, token.to(tl.int64))
        tl.store(logprobs + b, ((at - raw_top.to(tl.float64)) - total).to(tl.float32))
        if SEEN:
            tl.store(row_seen + token, tl.full([], 1, tl.uint8))


def workspace(logits: TensorLike, *, draw: bool) -> Shapes:
    return {"row": (tuple(logits.shape), torch.float32)} if draw else {}


def _options(v: int) -> dict[str, object]:
    tile = min(padded(v), TILE)
    return {"TILE": tile, "num_warps": min(WARPS, max(1, tile // 32)), "enable_fp_fusion": False}


def logprobs(logits: Tensor, targets: Tensor, *, logprobs: Tensor, scratch: Scratch) -> None:
    n, v = logits.shape
    numbers = (logits.stride(0), v, 2.0 ** mass_bits(v))
    launch(_logprobs_kernel, (n,), logits, targets, logprobs, *numbers, **_options(v))


def fwd(
    logits: Tensor, settings: Tensor, seeds: Tensor, sequences: Tensor, drawn: Tensor, *,
    tokens: Tensor, logprobs: Tensor, seen: Tensor | None, scratch: Scratch,
) -> None:  # fmt: skip
    b, v = logits.shape
    tensors = (logits, settings, seeds, sequences, drawn, tokens, logprobs, seen, scratch["row"])
    if seen is None:
        tensors = (*tensors[:7], tokens, scratch["row"])  # tokens in place of seen, which is not read
    numbers = (logits.stride(0), 0 if seen is None else seen.stride(0), v, 2.0 ** mass_bits(v))
    launch(_sample_kernel, (b,), *tensors, *numbers, SEEN=seen is not None, **_options(v))
