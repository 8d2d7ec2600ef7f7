"""mask.py on the device: which column tiles a range of rows attends to, and the scores of a tile.

A tile of scores is s (M, N) or its transpose: row indices i and column indices j are tensors that broadcast to it, so every
function here works for both.

    plain                   x = q·k                       the caller multiplies by factor
    softcap c, bias, ALiBi  x = c tanh(factor/c · q·k) + bias − slope · |i + Tk − Tq − j|
    masked                  x = −inf                      only in tiles that an edge of the band, of an interval or of k crosses

factor has the sign of the scale, except in the forward of PLAIN calls, which negates q on load if the scale is negative. This
is exact. So factor > 0 there, and max(factor · x) = factor · max(x).

Every kernel rounds a score at the same steps. So the backward subtracts lse from the very bits that lse was computed from, and
the largest score of a row has p = 1 / row_sum, however large the score is.

A range of rows attends to the tiles [first, last) of BLOCK columns. Tiles [first, unmasked) and [unmasked_end, last) need a
mask, tiles [unmasked, unmasked_end) don't. For the rows that attend to a range of columns, Tq and Tk, left and right are
exchanged. Intervals leave several runs of tiles: intervals.py lists them in memory, and the main loops read the list.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from .memory import steps
from .numerics import exponential, quotient, rounded_product, tanh

# One query head of one sequence. A field is None if the call lacks the feature. bias points to this head, slope is for ALiBi,
# inv_keep is 1 / (1 − dropout_p). intervals points to the first interval of column 0 of this kv head, second to the second
# interval. Kernels build a Head themselves, because a device function can't return None.
Head = namedtuple(
    "Head",
    "b h tq tk left right factor softcap bias bias_i bias_j slope seed threshold inv_keep intervals second",
)

# The tiles that a program visits: the tiles of the band or, if `runs` is not None, tiles `first` to `last` of a list, unmasked
# tiles before masked ones.
Visits = namedtuple("Visits", "first unmasked unmasked_end last runs")

# The unmasked or the masked tiles of a list, as runs of neighbours. Entry n of the list is tile n + shift, with the shift of
# the last run that has `before` ≤ n; the program visits `count` entries from entry `begin` on.
Runs = namedtuple("Runs", "begin count before shift")

# A list in memory, int32: before (MOST_RUNS), shift (MOST_RUNS) of the unmasked tiles, the same of the masked ones, then the
# number of unmasked and of masked tiles.
MOST_RUNS = tl.constexpr(32)


@triton.jit
def band_tiles(start, stop, shift, back, ahead, size, BLOCK: tl.constexpr):
    """Tiles (first, unmasked, unmasked_end, last) of an axis of `size` indices for the indices [start, stop) of the other axis.

    Index i attends to i + shift − back … i + shift + ahead. back or ahead is None if that side has no bound."""
    low = start * 0
    unmasked_low = start * 0
    high = size
    unmasked_high = size
    if back is not None:
        low = tl.maximum(start + shift - back, 0)
        unmasked_low = tl.maximum(stop - 1 + shift - back, 0)
    if ahead is not None:
        high = tl.maximum(tl.minimum(size, stop + shift + ahead), 0)
        unmasked_high = tl.maximum(tl.minimum(size, start + shift + ahead + 1), 0)
    first = low // BLOCK
    last = tl.maximum((high + BLOCK - 1) // BLOCK, first)
    unmasked = tl.minimum(tl.maximum((unmasked_low + BLOCK - 1) // BLOCK, first), last)
    unmasked_end = tl.minimum(tl.maximum(unmasked_high // BLOCK, unmasked), last)
    return first, unmasked, unmasked_end, last


@triton.jit
def list_runs(visits, MASKED: tl.constexpr):
    """The unmasked or the masked tiles of a program's list."""
    r = tl.arange(0, MOST_RUNS)
    unmasked = tl.load(visits.runs + 4 * MOST_RUNS)
    low = unmasked * MASKED
    size = tl.load(visits.runs + 4 * MOST_RUNS + 1) if MASKED else unmasked
    begin = tl.minimum(tl.maximum(visits.first - low, 0), size)
    end = tl.minimum(tl.maximum(visits.last - low, 0), size)
    before = tl.load(visits.runs + 2 * MOST_RUNS * MASKED + r)
    shift = tl.load(visits.runs + 2 * MOST_RUNS * MASKED + MOST_RUNS + r)
    return Runs(begin, end - begin, before, shift)


@triton.jit
def own_list(runs, runs_b, runs_h, b, kv_head, tile):
    """The list of a tile. runs_b and runs_h are the numbers of lists per sequence and per kv head, or 0 if these share
    lists."""
    return runs + steps(b * runs_b + kv_head * runs_h + tile, 4 * MOST_RUNS + 2, 1)


@triton.jit
def listed_tiles(runs):
    """The number of tiles of a list."""
    return tl.load(runs + 4 * MOST_RUNS) + tl.load(runs + 4 * MOST_RUNS + 1)


@triton.jit
def count_tiles(visits, runs, MASKED: tl.constexpr):
    """The number of masked or unmasked tiles."""
    if runs is not None:
        return runs.count
    elif MASKED:
        return visits.unmasked - visits.first + visits.last - visits.unmasked_end
    else:
        return visits.unmasked_end - visits.unmasked


@triton.jit
def nth_tile(n, visits, runs, MASKED: tl.constexpr):
    """The index of the n-th masked or unmasked tile."""
    if runs is not None:
        n += runs.begin
        return n + tl.max(tl.where(runs.before <= n, runs.shift, 0), 0)
    elif MASKED:
        return visits.first + n + tl.where(n < visits.unmasked - visits.first, 0, visits.unmasked_end - visits.unmasked)
    else:
        return visits.unmasked + n


@triton.jit
def softcap_tanh(s, head, IEEE_FP32: tl.constexpr):
    """tanh(factor · s / c)"""
    if s.dtype == tl.float64:
        return 1.0 - 2.0 / (1.0 + tl.exp(s * (2.0 * tl.cast(head.factor, tl.float64) / head.softcap)))
    else:
        return tanh(rounded_product(s, quotient(head.factor, head.softcap, IEEE_FP32)), IEEE_FP32)


@triton.jit
def load_bias(head, i, j, FP64: tl.constexpr):
    """The bias tile, 0 outside. Triton 3.6 can't compile a float64 dot that depends on an 8-bit load in the same basic block,
    so a bool mask of float64 scores is loaded in a branch that is always taken."""
    inside = (i < head.tq) & (j < head.tk)
    offsets = i.to(tl.int64) * head.bias_i + j.to(tl.int64) * head.bias_j
    if FP64 and head.bias.dtype.element_ty == tl.uint8:
        bias = tl.zeros(offsets.shape, tl.uint8)
        if head.tk > 0:
            bias = tl.load(head.bias + offsets, mask=inside, other=0)
    else:
        bias = tl.load(head.bias + offsets, mask=inside, other=0)
    return bias


@triton.jit
def outside(interval, i, inside):
    """Whether rows i are outside of the interval that begins at interval[0] and ends before interval[1]."""
    return (i < tl.load(interval, mask=inside, other=0)) | (i >= tl.load(interval + 1, mask=inside, other=0))


@triton.jit
def scores(s, i, j, head, IEEE_FP32: tl.constexpr, MASKED: tl.constexpr):
    """(x, tanh). x are the scores, or with PLAIN (forward.py) the scores divided by factor. tanh is the tanh of the softcap."""
    x = s
    t = s
    PLAIN: tl.constexpr = head.softcap is None and head.bias is None and head.slope is None
    if not PLAIN:
        if head.softcap is not None:
            t = softcap_tanh(s, head, IEEE_FP32)
            x = rounded_product(t, head.softcap)
        else:
            x = rounded_product(s, head.factor)
        if head.bias is not None:
            bias = load_bias(head, i, j, s.dtype == tl.float64)
            if head.bias.dtype.element_ty == tl.uint8:
                x = tl.where(bias != 0, x, float("-inf"))
            else:
                x += bias.to(tl.float32)
        if head.slope is not None:
            x -= rounded_product(tl.abs(i + (head.tk - head.tq) - j).to(x.dtype), head.slope)
    if MASKED:
        attends = j < head.tk
        if head.left is not None:
            attends &= i + (head.tk - head.tq) - j <= head.left
        if head.right is not None:
            attends &= i + (head.tk - head.tq) - j >= -head.right
        if head.intervals is not None:
            NUMBERS: tl.constexpr = 2 if head.second is None else 4  # numbers of a column
            attends &= outside(head.intervals + j * NUMBERS, i, j < head.tk)
            if head.second is not None:
                attends &= outside(head.second + j * NUMBERS, i, j < head.tk)
        x = tl.where(attends, x, float("-inf"))
    return x, t


@triton.jit
def dropout_mask(i, j, head):
    """philox.py's mask: word(b, h, i, j) ≥ floor(p · 2³²)."""
    word, _, _, _ = tl.philox(head.seed, j, i, head.h, head.b)
    return word >= head.threshold


@triton.jit
def probabilities(s, lse, i, j, head, IEEE_FP32: tl.constexpr, MASKED: tl.constexpr):
    """(p, keep, tanh) of a tile in the backward: p = exp(x − lse). keep is valid only with dropout, tanh only with a softcap.
    A float64 score is rounded to float32, as for lse."""
    x, t = scores(s, i, j, head, IEEE_FP32, MASKED)
    PLAIN: tl.constexpr = head.softcap is None and head.bias is None and head.slope is None
    if PLAIN:
        x = rounded_product(x, head.factor)
    if x.dtype == tl.float64:
        x = x.to(tl.float32).to(tl.float64)
    p = exponential(x - lse, IEEE_FP32)
    keep = p >= 0.0
    if head.seed is not None:
        keep = dropout_mask(i, j, head)
    return p, keep, t


@triton.jit
def sink_probability(sink, lse, IEEE_FP32: tl.constexpr):
    """exp(sink − lse); with IEEE_FP32 in float64, because dsinks is one sum over all rows."""
    if IEEE_FP32:
        return tl.exp(sink.to(tl.float64) - lse.to(tl.float64))
    else:
        return exponential(sink - lse, IEEE_FP32)


@triton.jit
def drop(p, keep, head):
    """r = p ∘ keep"""
    if head.seed is not None:
        p = tl.where(keep, p, 0.0)
    return p


@triton.jit
def score_gradient(p, dp, delta, keep, head):
    """ds = p ∘ (dp ∘ keep / (1 − dropout_p) − delta)"""
    if head.seed is not None:
        dp = tl.where(keep, dp * head.inv_keep, 0.0)
    return p * (dp - delta)


@triton.jit
def through_softcap(ds, t, head):
    """dx = ds ∘ (1 − tanh²)"""
    if head.softcap is not None:
        ds = ds * (1.0 - t * t)
    return ds
