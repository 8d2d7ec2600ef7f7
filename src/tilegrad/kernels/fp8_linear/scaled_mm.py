"""The product by cuBLAS's float8 one, `torch._scaled_mm`; factors are rounded by a Triton kernel in one pass.

PARTS programs go over a factor, tile by tile, and each keeps the largest magnitude it saw in a place of its own: no atomics.
A NaN counts as infinite there, so that it can't be mistaken for nothing seen.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..scratch import Scratch, Shapes

FIRST_PART, PARTS, TILE = 4, 512, 2048  # where their places begin, programs, and numbers that one rounds at once
PADDED = 1024  # a power of two above PARTS

LARGEST = tl.constexpr(448.0)


@triton.jit
def _quantize_kernel(x, state, x8, x_n, N, C, FIRST_PART: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """x8 = e4m3(clamp(x / s)), rows of C numbers; state = (s, largest magnitude of each program)."""
    part = tl.program_id(0)
    inverse = tl.math.div_rn(1.0, tl.load(state))
    largest = tl.zeros([TILE], tl.float32)
    for k in range(part.to(tl.int64) * TILE, N * C, PARTS * TILE):
        i = k + tl.arange(0, TILE)
        here = i < N * C
        a = tl.load(x + i // C * x_n + i % C, mask=here, other=0.0).to(tl.float32)
        magnitude = tl.abs(a)
        largest = tl.maximum(largest, tl.where(magnitude == magnitude, magnitude, float("inf")))
        scaled = a * inverse
        bounded = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
        tl.store(x8 + i, bounded.to(x8.dtype.element_ty), mask=here)
    seen = state + FIRST_PART + part
    tl.store(seen, tl.maximum(tl.load(seen), tl.max(largest, 0)))


@triton.jit
def _scale_kernel(state, FIRST_PART: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """s = the largest magnitude seen / 448, unless that is 0 or not finite."""
    row = state + tl.program_id(0) * (FIRST_PART + PARTS)
    i = tl.arange(0, PADDED)
    largest = tl.max(tl.load(row + FIRST_PART + i, mask=i < PARTS, other=0.0), 0)
    if (largest > 0.0) & (largest < float("inf")):
        tl.store(row, tl.math.div_rn(largest, LARGEST))
    tl.store(row + FIRST_PART + i, tl.zeros([PADDED], tl.float32), mask=i < PARTS)


def workspace(x: Any, w: Any) -> Shapes:
    return {"x8": (tuple(x.shape), torch.float8_e4m3fn), "w8": (tuple(w.shape), torch.float8_e4m3fn)}


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, state: Tensor, scratch: Scratch) -> None:
    if not x.numel():
        return
    with torch.cuda.device_of(x):
        for i, (a, a8) in enumerate(((x, scratch["x8"]), (w, scratch["w8"]))):
            quantize(a, state=state[i], a8=a8)
        torch._scaled_mm(
            scratch["x8"], scratch["w8"].t(), state[0, :1], state[1, :1], bias=b, out_dtype=y.dtype,
            use_fast_accum=True, out=y,
        )  # fmt: skip


def quantize(a: Tensor, *, state: Tensor, a8: Tensor) -> None:
    _quantize_kernel[(PARTS,)](a, state, a8, a.stride(0), *a.shape, FIRST_PART=FIRST_PART, PARTS=PARTS, TILE=TILE)


def scale_step(*, state: Tensor) -> None:
    with torch.cuda.device_of(state):
        _scale_kernel[(2,)](state, FIRST_PART=FIRST_PART, PARTS=PARTS, PADDED=PADDED)
