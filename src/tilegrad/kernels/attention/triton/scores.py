"""mask.py on the device: where a program stands, which tiles it walks, and what becomes of a tile of scores.

A tile of scores is s (M, N) or its transpose: rows i and columns j come as index tensors that broadcast to it, so every
function here serves both. Scores leave in base 2, x = log2(e) · s, so that exp is one exp2:

    plain                   x = factor · (q·k)            factor = |scale| · log2(e), applied by the caller
    softcap c, bias, ALiBi  x = c₂ tanh(factor/c₂ · q·k) + log2(e) · bias − slope₂ · |i + Tk − Tq − j|        factor = 1
    hidden                  x = −inf                      only in tiles that the band's edge or the end of k crosses

EXACT, for float32 whose products are IEEE's: scores stay in base e, with factor = |scale| and no log2(e) anywhere, and exp,
log, tanh and quotients are rounded like torch's; the device's own exp2, log2 and division miss by two units or more, and an
error of a score or of lse is an error of every p. Below, a "base" is 2, or e where EXACT. On a device that is quick at
float64 the owner's tile and the sums are float64, and so is then all that is computed from them.

A negative scale negates q (or k) on load, which is exact; so factor > 0 and max(factor · s) = factor · max(s).

Tiles of BLOCK columns that a run of rows sees, counted from 0:   [0 … first · full … · full_end … last)
first to full and full_end to last are crossed by an edge and walked with a mask, full to full_end without one. Rows that
see a run of columns are the same with Tq and Tk, left and right exchanged.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E_LOW = tl.constexpr(1.9259629911266175e-08)  # what float32 cuts off
LN2_LOW = tl.constexpr(-1.904654323148236e-09)
LN2_HEAD = tl.constexpr(0.693359375)  # 9 bits of ln 2: its product with an exponent is exact
LN2_TAIL = tl.constexpr(-2.1219444005469057e-04)
LEAST_EXPONENT = tl.constexpr(-87.0)  # exp below it counts as 0
CHAIN = tl.constexpr(32)  # terms that a float32 product adds one after the other
LOWEST = tl.constexpr(-1e38)  # where a running maximum starts: finite, so that a row that sees nothing makes no NaN


class Head(NamedTuple):
    """One query head of one sequence, as a program sees it; None where the call has no such feature."""

    b: Any
    h: Any
    tq: Any
    tk: Any
    left: Any
    right: Any
    factor: Any
    softcap: Any  # c in the base, c · log2(e) or c
    bias: Any  # at this head
    bias_i: Any
    bias_j: Any
    slope: Any  # in the base
    seed: Any
    threshold: Any
    inv_keep: Any  # 1 / (1 − dropout_p)


@triton.jit
def to_base(x, EXACT: tl.constexpr):
    """x · log2(e), rounded once: an error in lse is an error in every p of its row."""
    return x if EXACT else x * LOG2E + x * LOG2E_LOW


@triton.jit
def from_base(x, EXACT: tl.constexpr):
    return x if EXACT else x * LN2 + x * LN2_LOW


@triton.jit
def power(x, EXACT: tl.constexpr):
    """exp2(x); where EXACT exp(x) = 2ⁿ exp(f), |f| ≤ ln 2 / 2, with the polynomial (exp(f) − 1 − f) / f². Error 0.7 units."""
    if EXACT:
        bounded = tl.maximum(x, LEAST_EXPONENT)
        n = tl.floor(bounded * LOG2E + 0.5)
        f = (bounded - n * LN2_HEAD) - n * LN2_TAIL
        y = 0.008368780836462975 + f * 0.001381446490995586
        y = 0.1666651964187622 + f * (0.04166839271783829 + f * y)
        y = 1.0 + (f + f * f * (0.4999999403953552 + f * y))
        y *= ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        return tl.where(x > LEAST_EXPONENT, y, 0.0)
    else:
        return tl.math.exp2(x)


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """`power` of what may be float64."""
    return tl.exp(x) if x.dtype == tl.float64 else power(x, EXACT)


@triton.jit
def log_sum(row_max, row_sum, EXACT: tl.constexpr):
    """lse = log(exp(row_max) row_sum) in base e; where EXACT in float64."""
    if EXACT:
        return row_max.to(tl.float64) + tl.log(row_sum.to(tl.float64))
    else:
        return from_base(row_max + tl.math.log2(row_sum), EXACT)


@triton.jit
def quotient(x, y, EXACT: tl.constexpr):
    return tl.math.div_rn(x, y) if EXACT else x / y


@triton.jit
def ratio(x, y, EXACT: tl.constexpr):
    """`quotient` of what may be float64."""
    return x / y if y.dtype == tl.float64 else quotient(x, y, EXACT)


@triton.jit
def plus(a, b):
    """a + b; of a product written so, Triton makes one that adds to b term by term, and rounds as often."""
    return tl.fma(a, 1.0, b)


@triton.jit
def product(a, b, acc, EXACT: tl.constexpr):
    """acc + a b, with a in b's dtype, or all in float64 where acc is"""
    if acc.dtype == tl.float64:
        return tl.dot(a, b.to(tl.float64), acc, out_dtype=tl.float64)
    elif EXACT:
        return plus(tl.dot(a, b, input_precision="ieee"), acc)
    else:
        return tl.dot(a.to(b.dtype), b, acc)


@triton.jit
def inner(a, b, start, EXACT: tl.constexpr):
    """start + a bᵀ, start None or a row; where EXACT as sums of CHAIN terms, and start must be None."""
    if a.dtype == tl.float64:
        return tl.dot(a, b.to(tl.float64).T, out_dtype=tl.float64)
    elif EXACT and a.shape[1] > CHAIN:
        CHAINS: tl.constexpr = a.shape[1] // CHAIN
        a_chains = tl.permute(tl.reshape(a, [a.shape[0], CHAINS, CHAIN]), [1, 0, 2])
        b_chains = tl.permute(tl.reshape(b, [b.shape[0], CHAINS, CHAIN]), [1, 2, 0])
        return tl.sum(tl.dot(a_chains, b_chains, input_precision="ieee"), 0)
    elif start is None:
        return tl.dot(a, b.T, input_precision="ieee" if EXACT else "tf32")
    else:
        return tl.dot(a, b.T, tl.broadcast_to(start, [a.shape[0], b.shape[0]]))


@triton.jit
def steps(n, stride, ALIGN: tl.constexpr):
    """n · stride in 64 bits, a multiple of ALIGN."""
    return tl.multiple_of(tl.cast(n, tl.int64) * stride, ALIGN)


@triton.jit
def at(x, x_b, x_h, x_t, b, h, t, ALIGN: tl.constexpr):
    """Where row t of head h of sequence b begins."""
    return x + steps(b, x_b, ALIGN) + steps(h, x_h, ALIGN) + steps(t, x_t, ALIGN)


@triton.jit
def tile_offsets(x_t, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of a tile from its first row; WIDE where they leave 32 bits."""
    t = tl.arange(0, ROWS)[:, None]
    if WIDE:
        t = t.to(tl.int64)
    return tl.multiple_of(t * x_t, [ALIGN, ALIGN]) + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(x, offsets, rows, D: tl.constexpr, CHECKED: tl.constexpr):
    """A tile of rows; zeros from row `rows` on (looked at where CHECKED) and from column D on."""
    ROWS: tl.constexpr = offsets.shape[0]
    BLOCK_D: tl.constexpr = offsets.shape[1]
    t = tl.arange(0, ROWS)[:, None] < rows
    d = tl.arange(0, BLOCK_D)[None, :] < D
    if CHECKED and D < BLOCK_D:
        tile = tl.load(x + offsets, mask=t & d, other=0.0)
    elif CHECKED:
        tile = tl.load(x + offsets, mask=t, other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(x + offsets, mask=d, other=0.0)
    else:
        tile = tl.load(x + offsets)
    return tile


@triton.jit
def load_row(x, rows, end, other, COPIES: tl.constexpr):
    """x[rows] as (COPIES, M), one element a thread; `other` from `end` on. Triton takes a load of fewer elements than
    threads for cheap and has every thread read all it needs, 16 words of M = 64, through shared memory."""
    offsets = rows[None, :] + tl.zeros([COPIES, 1], tl.int32)
    return tl.load(x + offsets, mask=offsets < end, other=other)


@triton.jit
def one_of(copies):
    """(COPIES, M) → (1, M)"""
    return tl.max(copies, 0, keep_dims=True) if copies.shape[0] > 1 else copies


@triton.jit
def store_tile(x, offsets, tile, rows, D: tl.constexpr):
    ROWS: tl.constexpr = offsets.shape[0]
    BLOCK_D: tl.constexpr = offsets.shape[1]
    inside = (tl.arange(0, ROWS)[:, None] < rows) & (tl.arange(0, BLOCK_D)[None, :] < D)
    tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def lengths(cu_seqlens_q, cu_seqlens_k, b, tq, tk):
    """(first row of q, first row of k, Tq, Tk) of sequence b; of a dense call (0, 0, tq, tk)."""
    start_q = b * 0
    start_k = b * 0
    if cu_seqlens_q is not None:
        start_q = tl.load(cu_seqlens_q + b)
        start_k = tl.load(cu_seqlens_k + b)
        tq = tl.load(cu_seqlens_q + b + 1) - start_q
        tk = tl.load(cu_seqlens_k + b + 1) - start_k
    return start_q, start_k, tq, tk


@triton.jit
def band_tiles(start, stop, shift, back, ahead, size, BLOCK: tl.constexpr):
    """(first, full, full_end, last) for the run [start, stop): those at start + shift − back … stop + shift + ahead."""
    low = start * 0
    full_low = start * 0
    high = size
    full_high = size
    if back is not None:
        low = tl.maximum(start + shift - back, 0)
        full_low = tl.maximum(stop - 1 + shift - back, 0)
    if ahead is not None:
        high = tl.maximum(tl.minimum(size, stop + shift + ahead), 0)
        full_high = tl.maximum(tl.minimum(size, start + shift + ahead + 1), 0)
    first = low // BLOCK
    last = tl.maximum((high + BLOCK - 1) // BLOCK, first)
    full = tl.minimum(tl.maximum((full_low + BLOCK - 1) // BLOCK, first), last)
    full_end = tl.minimum(tl.maximum(full_high // BLOCK, full), last)
    return first, full, full_end, last


@triton.jit
def nth_tile(n, first, full, full_end, MASKED: tl.constexpr):
    """The n-th tile of a pass: without a mask those of full … full_end, with one those around them."""
    if MASKED:
        return first + n + tl.where(n < full - first, 0, full_end - full)
    else:
        return full + n


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """Odd polynomial near 0, where 1 − 2 / (1 + exp(2x)) would cancel. Relative error 3e-7, 2e-7 where EXACT."""
    y = x * x
    if EXACT:
        near = -0.008262742310762405 + y * 0.0022269717883318663
        near = -0.0539521649479866 + y * (0.021732719615101814 + y * near)
        near = -0.3333333134651184 + y * (0.13333246111869812 + y * near)
    else:
        near = 0.020696379244327545 - 0.005768859293311834 * y
        near = -0.05375746265053749 + y * near
        near = 0.13331660628318787 + y * near
        near = -0.333332896232605 + y * near
    twice = tl.minimum(tl.maximum(x, -20.0), 20.0) * (2.0 if EXACT else 2.0 * LOG2E)
    far = 1.0 - quotient(2.0, 1.0 + power(twice, EXACT), EXACT)
    return tl.where(tl.abs(x) < 0.6, x + x * (y * near), far)


@triton.jit
def capped(s, head, EXACT: tl.constexpr):
    """tanh(factor · s / c)"""
    if s.dtype == tl.float64:
        return 1.0 - 2.0 / (1.0 + tl.exp(s * (2.0 * tl.cast(head.factor, tl.float64) / head.softcap)))
    else:
        return tanh(s * quotient(head.factor, head.softcap, EXACT), EXACT)


@triton.jit
def load_bias(head, i, j, DOUBLE: tl.constexpr):
    """0 outside. Triton 3.6 fails at a product in float64 that depends on a load of 8 bits, but looks no further back than
    to a branch: so a bool mask then stands in one that is always taken."""
    inside = (i < head.tq) & (j < head.tk)
    offsets = i.to(tl.int64) * head.bias_i + j.to(tl.int64) * head.bias_j
    if DOUBLE and head.bias.dtype.element_ty == tl.uint8:
        bias = tl.zeros(offsets.shape, tl.uint8)
        if head.tk > 0:
            bias = tl.load(head.bias + offsets, mask=inside, other=0)
    else:
        bias = tl.load(head.bias + offsets, mask=inside, other=0)
    return bias


@triton.jit
def scores(s, i, j, head, EXACT: tl.constexpr, MASKED: tl.constexpr):
    """(x, factor, tanh): scores in the base are x · factor; tanh is the softcap's."""
    x = s
    t = s
    factor = head.factor
    if head.softcap is not None or head.bias is not None or head.slope is not None:
        factor = head.factor * 0.0 + 1.0
        if head.softcap is not None:
            t = capped(s, head, EXACT)
            x = head.softcap * t
        else:
            x = s * head.factor
        if head.bias is not None:
            bias = load_bias(head, i, j, s.dtype == tl.float64)
            if head.bias.dtype.element_ty == tl.uint8:
                x = tl.where(bias != 0, x, float("-inf"))
            else:
                x += bias.to(tl.float32) if EXACT else bias.to(tl.float32) * LOG2E
        if head.slope is not None:
            x -= head.slope * tl.abs(i + (head.tk - head.tq) - j).to(x.dtype)
    if MASKED:
        seen = j < head.tk
        if head.left is not None:
            seen &= i + (head.tk - head.tq) - j <= head.left
        if head.right is not None:
            seen &= i + (head.tk - head.tq) - j >= -head.right
        x = tl.where(seen, x, float("-inf"))
    return x, factor, t


@triton.jit
def keeps(i, j, head):
    """philox.py's mask: word(b, h, i, j) ≥ floor(p · 2³²)."""
    word, _, _, _ = tl.philox(head.seed, j, i, head.h, head.b)
    return word >= head.threshold


@triton.jit
def probabilities(s, lse2, i, j, head, EXACT: tl.constexpr, MASKED: tl.constexpr):
    """(p, keep, tanh) of a tile in the backward: p = exp(x − lse); keep and tanh only where the call has them."""
    x, factor, t = scores(s, i, j, head, EXACT, MASKED)
    p = exponential(x * factor - lse2, EXACT)
    keep = p >= 0.0
    if head.seed is not None:
        keep = keeps(i, j, head)
    return p, keep, t


@triton.jit
def sink_probability(sink, lse2, EXACT: tl.constexpr):
    """exp(sink − lse); where EXACT in float64, for a gradient is a single sum over them."""
    if EXACT:
        return tl.exp(sink.to(tl.float64) - lse2.to(tl.float64))
    else:
        return power(sink - lse2, EXACT)


@triton.jit
def kept(p, keep, head):
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
def uncapped(ds, t, head):
    """dx = ds ∘ (1 − tanh²)"""
    if head.softcap is not None:
        ds = ds * (1.0 - t * t)
    return ds
