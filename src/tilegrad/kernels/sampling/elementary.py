"""exp and log from additions, products and quotients that are each rounded once: the same bits on every device.

    exp(x), x ≤ 0:   n = floor(x · log2(e) + ½)    r = (x − n · LN2_HIGH) − n · LN2_LOW
                     exp(x) = 2ⁿ Σ rⁱ / i!    by Horner's rule; 0 if x < least
    log(x), x > 0:   x = 2ᵏ m, √½ ≤ m < √2    s = (m − 1) / (m + 1)    q = s²
                     log(x) = ((2 s · (q (1/3 + q (1/5 + …))) + k · LN2_LOW) + 2 s) + k · LN2_HIGH

log takes only normal numbers. k · LN2_HIGH and n · LN2_HIGH are exact. The last bit of torch's exp and log depends on the
device, and on whether vector instructions compute the element. triton_ops.py and cpu/csrc/rows/sampling.cpp have the same
functions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2E = math.log2(math.e)


class Constants(NamedTuple):
    """exp_terms and log_terms: 1/i! and 1/(2 i + 1), from the highest i down. root: the bits of √½. least: the smallest x whose
    exp is not set to 0. mantissa: the number of mantissa bits; bias: the exponent bias."""

    integer: torch.dtype
    mantissa: int
    bias: int
    root: int
    least: float
    ln2_high: float
    ln2_low: float
    exp_terms: tuple[float, ...]
    log_terms: tuple[float, ...]


def _terms(exp: int, log: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(1 / math.factorial(i) for i in range(exp, -1, -1)), tuple(1 / (2 * i + 1) for i in range(log, 0, -1))


CONSTANTS = {
    torch.float32: Constants(torch.int32, 23, 127, 0x3F3504F3, -87.0, 0.693359375, -2.12194440e-4, *_terms(7, 4)),
    torch.float64: Constants(
        torch.int64,
        52,
        1023,
        0x3FE6A09E667F3BCD,
        -708.0,
        6.93147180369123816490e-01,
        1.90821492927058770002e-10,
        *_terms(13, 11),
    ),
}


def mass_bits(v: int) -> int:
    """s, with which v masses floor(e · 2ˢ + ½), e ≤ 1, have a sum below 2⁶³."""
    return 62 - (v - 1).bit_length()


def exp_(x: Tensor, work: Tensor, bits: Tensor, small: Tensor) -> Tensor:
    """x ← exp(x), x ≤ 0.       work (2, …) of x's dtype   bits (…) of its integer dtype   small (…) bool"""
    c, (n, r) = CONSTANTS[x.dtype], work
    torch.lt(x, c.least, out=small)
    x.clamp_(min=c.least)
    torch.mul(x, LOG2E, out=n).add_(0.5).floor_()
    torch.sub(x, torch.mul(n, c.ln2_high, out=r), out=r)
    bits.copy_(n).add_(c.bias).bitwise_left_shift_(c.mantissa)
    r.sub_(n.mul_(c.ln2_low))
    x.fill_(c.exp_terms[0])
    for term in c.exp_terms[1:]:
        x.mul_(r).add_(term)
    return x.mul_(bits.view(x.dtype)).masked_fill_(small, 0.0)


def log_(x: Tensor, work: Tensor, bits: Tensor) -> Tensor:
    """x ← log(x), x > 0 and normal.       work (2, …) of x's dtype   bits (…) of its integer dtype"""
    c, (k, q) = CONSTANTS[x.dtype], work
    x_bits = x.view(c.integer)
    torch.sub(x_bits, c.root, out=bits).bitwise_right_shift_(c.mantissa)
    k.copy_(bits)
    x_bits.sub_(bits.bitwise_left_shift_(c.mantissa))  # x = m
    torch.add(x, 1.0, out=q)
    s = x.sub_(1.0).div_(q)
    torch.mul(s, s, out=q)
    series = bits.view(x.dtype).fill_(c.log_terms[0])
    for term in c.log_terms[1:]:
        series.mul_(q).add_(term)
    series.mul_(q)
    s.mul_(2.0)
    series.mul_(s).add_(torch.mul(k, c.ln2_low, out=q))
    return s.add_(series).add_(k.mul_(c.ln2_high))
