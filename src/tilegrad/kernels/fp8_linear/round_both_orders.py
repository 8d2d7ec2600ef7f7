"""Rounding to float8 by Triton, in one pass and in both orders, and the step of the scales.

PARTS programs loop over the tiles of a tensor. Each program stores the largest magnitude of its tiles in a separate element of
the state, so no atomics are needed. In this maximum a NaN counts as infinite, so that it is not lost. An activation is first
rounded to h's dtype, because the backward recomputes that value. A tile is transposed in shared memory, so the read and both
writes are whole rows of 64 or 128 bytes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import triton
import triton.language as tl
from torch import Tensor

from ..activation.triton_ops import activate, sigmoids_next_to_1
from ..gpu import launch
from ..scratch import Scratch
from . import state as states

BLOCK_N, BLOCK_C, WARPS = 128, 64, 4  # the tile that a program rounds at once
PADDED = 2048  # a power of two above PARTS

FIRST_PART = tl.constexpr(states.FIRST_PART)
PARTS = tl.constexpr(states.PARTS)
JUMP, JUMPS = tl.constexpr(states.JUMP), tl.constexpr(states.JUMPS)
FOLLOWED, FORMAT = tl.constexpr(states.FOLLOWED), tl.constexpr(states.FORMAT)


@triton.jit
def _activated(x, at, here, a, C, KIND: tl.constexpr, EXACT: tl.constexpr):
    """act(h), not rounded. For swiglu, a is up, and gate is C columns after it."""
    if KIND == "swiglu":
        gate = tl.load(x + at + C, mask=here, other=0.0).to(tl.float32)
        of_g, _ = sigmoids_next_to_1(gate, EXACT)
        return gate * of_g * a
    else:
        return activate(a, KIND, EXACT)


@triton.jit
def _quantize_kernel(
    x, state, x8, x8t, x_n, N, C, PITCH, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """x8 = q(x) and x8t = q(x)ᵀ; x is act(h) if KIND is the name of an activation. Rows N … PITCH of x count as 0."""
    part = tl.program_id(0)
    s, bound = tl.load(state), tl.load(state + FORMAT)
    inverse = tl.math.div_rn(1.0, s)
    largest = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    across = tl.cdiv(C, BLOCK_C)
    for tile in range(part, tl.cdiv(PITCH, BLOCK_N) * across, PARTS):
        rows = (tile // across * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        columns = (tile % across * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
        here = (rows[:, None] < N) & (columns[None, :] < C)
        at = rows[:, None] * x_n + columns[None, :]
        a = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        if KIND != "":
            exact: tl.constexpr = x.dtype.element_ty == tl.float32
            a = _activated(x, at, here, a, C, KIND, exact).to(x.dtype.element_ty).to(tl.float32)
        magnitude = tl.abs(a)
        largest = tl.maximum(largest, tl.where(magnitude != magnitude, float("inf"), magnitude))
        scaled = a * inverse
        bounded = tl.where(scaled > bound, bound, tl.where(scaled < -bound, -bound, scaled))
        if x8 is not None:
            tl.store(x8 + rows[:, None] * C + columns[None, :], bounded.to(x8.dtype.element_ty), mask=here)
        if x8t is not None:
            inside = (columns[:, None] < C) & (rows[None, :] < PITCH)
            turned = tl.trans(bounded.to(x8t.dtype.element_ty))
            tl.store(x8t + columns[:, None] * PITCH + rows[None, :], turned, mask=inside)
    seen = state + FIRST_PART + part
    tl.store(seen, tl.maximum(tl.load(seen), tl.max(tl.max(largest, 1), 0)))


@triton.jit
def _scale_kernel(state, jumps, apart, PADDED: tl.constexpr):
    """s = the largest magnitude / L, unless that is 0 or not finite; resets the magnitudes. One program for each state."""
    i = tl.arange(0, PADDED)
    state += tl.program_id(0).to(tl.int64) * apart
    largest = tl.max(tl.load(state + FIRST_PART + i, mask=i < PARTS, other=0.0), 0)
    bound = tl.load(state + FORMAT)
    if (largest > 0.0) & (largest < float("inf")):
        jumped = (tl.load(state + FOLLOWED) > 0.0) & (largest > JUMP * tl.load(state) * bound)
        tl.store(state + JUMPS, tl.load(state + JUMPS) + jumped.to(tl.float32))
        tl.atomic_add(jumps, 1.0, mask=jumped)
        tl.store(state, tl.math.div_rn(largest, bound))
        tl.store(state + FOLLOWED, 1.0)
    tl.store(state + FIRST_PART + i, tl.zeros([PADDED], tl.float32), mask=i < PARTS)


def quantize(x: Tensor, *, x8: Tensor | None, x8t: Tensor | None, state: Tensor, scratch: Scratch) -> None:
    _quantize(x, "", *x.shape, x8=x8, x8t=x8t, state=state)


def activation(h: Tensor, kind: str, *, a8: Tensor | None, a8t: Tensor | None, state: Tensor, scratch: Scratch) -> None:
    n, c = h.shape
    _quantize(h, kind, n, c // 2 if kind == "swiglu" else c, x8=a8, x8t=a8t, state=state)


def _quantize(x: Tensor, kind: str, n: int, c: int, *, x8: Tensor | None, x8t: Tensor | None, state: Tensor) -> None:
    pitch = n if x8t is None else x8t.shape[1]
    constants = {"KIND": kind, "BLOCK_N": BLOCK_N, "BLOCK_C": BLOCK_C, "num_warps": WARPS}
    launch(_quantize_kernel, (states.PARTS,), x, state, x8, x8t, x.stride(0), n, c, pitch, **constants)


def scale_step(*, states: Sequence[Tensor], jumps: Tensor, scratch: Scratch) -> None:
    """Takes one launch if the addresses of the states are equally spaced, as in an arena."""
    jumps.zero_()
    at = [state.data_ptr() for state in states]
    apart = {b - a for a, b in pairwise(at)}
    if len(apart) == 1:
        launch(_scale_kernel, (len(states),), states[0], jumps, apart.pop() // states[0].element_size(), PADDED=PADDED)
    else:
        for state in states:
            launch(_scale_kernel, (1,), state, jumps, 0, PADDED=PADDED)
