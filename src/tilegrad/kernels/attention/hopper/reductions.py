"""Maxima and sums of rows, a thread's numbers one after the other.

gl.max and gl.sum take them so in Triton 3.6 and 3.7. From 3.8 on they take them in a tree, which has no sum before all
exponentials of a row are there, and with it ptxas begins the exponentials later.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LEAST = gl.constexpr(8)  # columns of which each thread has two, in results of MMAs


@gluon.jit
def _fold(x, acc, MAX: gl.constexpr):
    """acc (rows, LEAST), or None, and the columns of x, LEAST after LEAST."""
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
    most = gl.max(_fold(x, None, MAX=True), 1)
    return gl.convert_layout(most, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def sum_of_rows(x):
    total = gl.sum(_fold(x, None, MAX=False), 1)
    return gl.convert_layout(total, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
