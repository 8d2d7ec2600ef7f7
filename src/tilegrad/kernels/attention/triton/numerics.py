"""Arithmetic on the device: exp, log, tanh, division and matrix products, each in two precisions.

By default exp(x) is the device's exp2(log2(e) · x). IEEE_FP32 is for float32 inputs whose GEMMs may not use tf32: exp, log,
tanh and division are then as accurate as in torch. The device's own exp2, log2 and division have errors of 2 ulp or more, and
an error of lse changes every p. On devices with fast float64, GEMMs with IEEE_FP32 are in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E_LOW = tl.constexpr(1.9259629911266175e-08)  # log2(e) − float32(log2(e))
LN2_HEAD = tl.constexpr(0.693359375)  # the first 9 bits of ln 2: its product with an exponent is exact
LN2_TAIL = tl.constexpr(-2.1219444005469057e-04)
LEAST_EXPONENT = tl.constexpr(-87.0)  # exp below it is 0
CHAIN = tl.constexpr(32)  # terms that an IEEE float32 dot product sums sequentially
LARGE = tl.constexpr(2.0**26)
NEAR_ZERO = tl.constexpr(0.6)
LOWEST = tl.constexpr(-1e38)  # start of a running maximum; finite, so that a row without keys yields no NaN


@triton.jit
def to_log2(x, IEEE_FP32: tl.constexpr):
    """The argument of `power` for exp(x): x · log2(e), rounded once; with IEEE_FP32, x itself."""
    return x if IEEE_FP32 else x * LOG2E + x * LOG2E_LOW


@triton.jit
def rounded_product(x, y):
    """x · y, rounded before anything is added. The compiler would turn x · y − lse into one fma, which subtracts a
    rounded lse from an exact product: p would err by |lse| · eps. The compiler does not change an explicit fma."""
    return tl.fma(x, y, 0.0)


@triton.jit
def from_log2(x, IEEE_FP32: tl.constexpr):
    """The inverse of to_log2."""
    return x if IEEE_FP32 else x * LN2


@triton.jit
def power(x, IEEE_FP32: tl.constexpr):
    """exp2(x); with IEEE_FP32, exp(x). For float64 this is tl.exp; for float32 it is 2ⁿ exp(f), |f| ≤ ln 2 / 2, with a
    polynomial for (exp(f) − 1 − f) / f² and an error of 0.7 ulp."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    elif IEEE_FP32:
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
def exponential(x, IEEE_FP32: tl.constexpr):
    """exp(x)"""
    return power(x if IEEE_FP32 else x * LOG2E, IEEE_FP32)


@triton.jit
def scaled_max(row_max, log2_factor, coarse_factor):
    """(c, c · row_max) for rows of PLAIN scores q·k. c is log2_factor, or coarse_factor if c · row_max would exceed
    LARGE (forward.py)."""
    c = tl.where(tl.abs(row_max) * log2_factor < LARGE, log2_factor, coarse_factor)
    return c, rounded_product(row_max, c)


@triton.jit
def product_lse(row_max, log_sum, factor, c, IEEE_FP32: tl.constexpr):
    """lse of rows of PLAIN scores q·k with maximum row_max. It is factor · row_max, rounded as in the backward, plus log_sum
    without the rounding error of c · row_max."""
    lost = tl.fma(row_max, c, -rounded_product(row_max, c))
    return rounded_product(row_max, factor) + (log_sum - from_log2(lost, IEEE_FP32))


@triton.jit
def logarithm(x, IEEE_FP32: tl.constexpr):
    """log(x); with IEEE_FP32 in float64."""
    if IEEE_FP32:
        return tl.log(x.to(tl.float64))
    else:
        return tl.math.log2(x) * LN2


@triton.jit
def quotient(x, y, IEEE_FP32: tl.constexpr):
    return tl.math.div_rn(x, y) if IEEE_FP32 else x / y


@triton.jit
def ratio(x, y, IEEE_FP32: tl.constexpr):
    """`quotient` for a y that may be float64."""
    return x / y if y.dtype == tl.float64 else quotient(x, y, IEEE_FP32)


@triton.jit
def add_unfused(a, b):
    """a + b as an fma. Triton would fuse a plain + into tl.dot, whose MMAs would accumulate onto b and round at each term."""
    return tl.fma(a, 1.0, b)


@triton.jit
def dot(a, b, acc, IEEE_FP32: tl.constexpr):
    """acc + a b, with a converted to b's dtype. If acc is float64, everything is in float64."""
    if acc.dtype == tl.float64:
        return tl.dot(a, b.to(tl.float64), acc, out_dtype=tl.float64)
    elif IEEE_FP32:
        return add_unfused(tl.dot(a, b, input_precision="ieee"), acc)
    else:
        return tl.dot(a.to(b.dtype), b, acc)


@triton.jit
def dot_transposed(a, b, start, IEEE_FP32: tl.constexpr):
    """start + a bᵀ; start is None or a row. With IEEE_FP32 partial sums of CHAIN terms are added, and start must be None."""
    if a.dtype == tl.float64:
        return tl.dot(a, b.to(tl.float64).T, out_dtype=tl.float64)
    elif IEEE_FP32 and a.shape[1] > CHAIN:
        CHAINS: tl.constexpr = a.shape[1] // CHAIN
        a_chains = tl.permute(tl.reshape(a, [a.shape[0], CHAINS, CHAIN]), [1, 0, 2])
        b_chains = tl.permute(tl.reshape(b, [b.shape[0], CHAINS, CHAIN]), [1, 2, 0])
        return tl.sum(tl.dot(a_chains, b_chains, input_precision="ieee"), 0)
    elif start is None:
        return tl.dot(a, b.T, input_precision="ieee" if IEEE_FP32 else "tf32")
    else:
        return tl.dot(a, b.T, tl.broadcast_to(start, [a.shape[0], b.shape[0]]))


@triton.jit
def tanh_near_zero(x, IEEE_FP32: tl.constexpr):
    """tanh(x) for |x| < NEAR_ZERO by an odd polynomial, with a relative error of 3e-7; with IEEE_FP32, 2e-7."""
    y = x * x
    if IEEE_FP32:
        near = -0.008262742310762405 + y * 0.0022269717883318663
        near = -0.0539521649479866 + y * (0.021732719615101814 + y * near)
        near = -0.3333333134651184 + y * (0.13333246111869812 + y * near)
    else:
        near = 0.020696379244327545 - 0.005768859293311834 * y
        near = -0.05375746265053749 + y * near
        near = 0.13331660628318787 + y * near
        near = -0.333332896232605 + y * near
    return x + x * (y * near)


@triton.jit
def tanh(x, IEEE_FP32: tl.constexpr):
    """tanh(x) = 1 − 2 / (1 + exp(2x)), but near 0 these terms cancel. The relative error is as in `tanh_near_zero`."""
    twice = tl.minimum(tl.maximum(x, -20.0), 20.0) * 2.0 if IEEE_FP32 else x * (2.0 * LOG2E)
    far = 1.0 - quotient(2.0, 1.0 + power(twice, IEEE_FP32), IEEE_FP32)
    return tl.where(tl.abs(x) < NEAR_ZERO, tanh_near_zero(x, IEEE_FP32), far)
