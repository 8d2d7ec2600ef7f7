"""Masks of tiles in registers, for both directions.

In a row of an MMA's accumulator, place 8·e + c is the e-th pair of a thread, and c is known from the thread's number. What is
compared is 8·e, a constant of the instruction, with a bound less c, a register for each row: no place needs one of its own.
Compilers would compute them all before the loop, and from CUDA 13 on ptxas keeps them in local memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _eights(x):
    """x (rows, places) as (rows, places / 8, 8)."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 8])


@gluon.jit
def _less_c(bound, x8):
    """A bound of each row less c."""
    L: gl.constexpr = x8.type.layout
    c = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return gl.convert_layout(bound, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None] - c[None, None, :]


@gluon.jit
def _8e(x8):
    L: gl.constexpr = x8.type.layout
    return gl.arange(0, x8.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None] * 8


@gluon.jit
def keep_between(x, first, last):
    """x (rows, places), −inf before place `first` of its row and after place `last`; None: no such bound."""
    x8 = _eights(x)
    if last is not None:
        x8 = gl.where(_8e(x8) <= _less_c(last, x8), x8, float("-inf"))
    if first is not None:
        x8 = gl.where(_8e(x8) >= _less_c(first, x8), x8, float("-inf"))
    return gl.convert_layout(x8.reshape([x.shape[0], x.shape[1]]), x.type.layout, assert_trivial=True)
