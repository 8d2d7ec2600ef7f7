"""Tiles in registers: the mask, row maxima and row sums of an MMA accumulator, and the scalar functions of ../triton.

In a row of an accumulator, a thread's e-th pair of elements is at columns 8·e + c, and its two c depend only on the thread. The
mask compares the immediate 8·e with (bound − c), two registers per row. Comparing column indices would need a register per
column: the compiler hoists the indices out of the loop, and from CUDA 13 on ptxas keeps them in local memory.

Maxima and sums combine a thread's elements one after the other, as gl.max and gl.sum do in Triton 3.6 and 3.7. From 3.8 on
gl.sum builds a tree, whose additions wait for nearly all exponentials of a row, so ptxas schedules the additions later.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton import numerics

LEAST = gl.constexpr(8)  # columns that `_fold` leaves; a thread has two of them in each row

tanh = gluon.jit(numerics.tanh.fn)
tanh_near_zero = gluon.jit(numerics.tanh_near_zero.fn)
NEAR_ZERO = numerics.NEAR_ZERO
to_log2 = gluon.jit(numerics.to_log2.fn)
from_log2 = gluon.jit(numerics.from_log2.fn)


@gluon.jit
def _minus_c(bound, x8):
    L: gl.constexpr = x8.type.layout
    c = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return gl.convert_layout(bound, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None] - c[None, None, :]


@gluon.jit
def _8e(x8):
    L: gl.constexpr = x8.type.layout
    return gl.arange(0, x8.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None] * 8


@gluon.jit
def keep_between(x, first, last):
    """x (rows, columns), −inf before column `first` and after column `last` of each row; None: no such bound."""
    x8 = x.reshape([x.shape[0], x.shape[1] // 8, 8])
    if last is not None:
        x8 = gl.where(_8e(x8) <= _minus_c(last, x8), x8, float("-inf"))
    if first is not None:
        x8 = gl.where(_8e(x8) >= _minus_c(first, x8), x8, float("-inf"))
    return gl.convert_layout(x8.reshape([x.shape[0], x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def drop_between(x, first, end):
    """x (rows, columns), −inf from column `first` to column end − 1 of each row."""
    x8 = x.reshape([x.shape[0], x.shape[1] // 8, 8])
    x8 = gl.where((_8e(x8) >= _minus_c(first, x8)) & (_8e(x8) < _minus_c(end, x8)), float("-inf"), x8)
    return gl.convert_layout(x8.reshape([x.shape[0], x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def _fold(x, acc, MAX: gl.constexpr):
    """Combines the columns of x with acc, (rows, LEAST) or None, LEAST columns at a time."""
    if x.shape[1] > LEAST:
        first, last = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
        return _fold(last, _fold(first, acc, MAX), MAX)
    elif acc is None:
        return x
    elif MAX:
        return gl.maximum(acc, x)
    else:
        return acc + x


@gluon.jit
def max_of_rows(x):
    return gl.convert_layout(gl.max(_fold(x, None, MAX=True), 1), gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def tanh_of_block(x, BRANCH: gl.constexpr):
    """tanh(x). With BRANCH, if all of x is near 0, it is a polynomial, which takes less than half of the time of exp and a
    division."""
    if BRANCH:
        if gl.max(gl.max(_fold(gl.abs(x), None, MAX=True), 1), 0) < NEAR_ZERO:
            y = tanh_near_zero(x, IEEE_FP32=False)
        else:
            y = tanh(x, IEEE_FP32=False)
    else:
        y = tanh(x, IEEE_FP32=False)
    return y


@gluon.jit
def sum_of_rows(x):
    return gl.convert_layout(
        gl.sum(_fold(x, None, MAX=False), 1), gl.SliceLayout(1, x.type.layout), assert_trivial=True
    )
