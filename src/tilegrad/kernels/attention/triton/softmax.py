"""The running softmax of rows: p of a tile of scores, and the combination of a row's sums over two parts of its columns.

    tile      new_max = max(row_max, max x)   p = exp(x − new_max)      alpha = exp(row_max − new_max)
    combine   new_max = max(row_max, part_max)   alpha = exp(row_max − new_max)   w = exp(part_max − new_max)
              row_sum = alpha · row_sum + w · part_sum   acc = alpha · acc + w · part

forward.py and cache_attention/triton_ops.py both use these functions, so a row has the same bits in both. The fma of `combine`
is explicit, because the compiler could fuse either product into the sum.

PLAIN, log2_factor and coarse_factor are explained in forward.py: with PLAIN, x is q·k, and row_max is in the same units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import LOWEST, exponential, power, scaled_max, to_log2


@triton.jit
def softmax_step(x, row_max, log2_factor, coarse_factor, PLAIN: tl.constexpr, IEEE_FP32: tl.constexpr):
    """(p, alpha, new_max) of a tile"""
    new_max = tl.maximum(row_max, tl.max(x, 1))
    if PLAIN:
        _, old = scaled_max(row_max, log2_factor, coarse_factor)
        c, new = scaled_max(new_max, log2_factor, coarse_factor)
        p = power(tl.fma(x, c[:, None], -new[:, None]), IEEE_FP32)
        alpha = power(old - new, IEEE_FP32)
    else:
        p = exponential(x - new_max[:, None], IEEE_FP32)
        alpha = exponential(row_max - new_max, IEEE_FP32)
    return p, alpha, new_max


@triton.jit
def no_column(row_sum, coarse_factor, PLAIN: tl.constexpr):
    """row_max of rows before their first column"""
    row_max = tl.full(row_sum.shape, LOWEST, row_sum.dtype)
    if PLAIN:
        row_max = row_max / tl.maximum(coarse_factor, 1.0)
    return row_max


@triton.jit
def with_sink(row_max, sink, factor, log2_factor, coarse_factor, PLAIN: tl.constexpr, IEEE_FP32: tl.constexpr):
    """(row_max, row_sum) of rows with a sink, before their first column. A sink of −inf is no sink."""
    if PLAIN:
        row_max = tl.maximum(row_max, sink / factor)
        _, largest = scaled_max(row_max, log2_factor, coarse_factor)
        row_sum = power(to_log2(sink, IEEE_FP32) - largest, IEEE_FP32)
    else:
        row_max = tl.maximum(row_max, sink)
        row_sum = exponential(sink - row_max, IEEE_FP32)
    return row_max, row_sum


@triton.jit
def combine(
    acc, row_max, row_sum, part, part_max, part_sum, log2_factor, coarse_factor, PLAIN: tl.constexpr, IEEE_FP32: tl.constexpr
):  # fmt: skip
    """(acc, row_max, row_sum) of both parts. A part without columns changes no bit."""
    new_max = tl.maximum(row_max, part_max)
    if PLAIN:
        _, old = scaled_max(row_max, log2_factor, coarse_factor)
        _, part_scaled = scaled_max(part_max, log2_factor, coarse_factor)
        _, new = scaled_max(new_max, log2_factor, coarse_factor)
        alpha = power(old - new, IEEE_FP32)
        w = power(part_scaled - new, IEEE_FP32)
    else:
        alpha = exponential(row_max - new_max, IEEE_FP32)
        w = exponential(part_max - new_max, IEEE_FP32)
    row_sum = tl.fma(part_sum, w, row_sum * alpha)
    acc = tl.fma(part, tl.broadcast_to(w[:, None], part.shape), acc * alpha[:, None])
    return acc, new_max, row_sum
