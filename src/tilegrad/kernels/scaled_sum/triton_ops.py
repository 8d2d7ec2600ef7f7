"""The scaled sum y = a x + b x0 in Triton: each number is read or written once.       partials (2, P, 1)

    forward    one program per tile
    backward   program p of P has the tiles p, p + P, p + 2P, … and writes partials[:, p] = Σ dy ∘ x, Σ dy ∘ x0 of its tiles.
               Then da (+)= Σ_p partials[0, p], db (+)= Σ_p partials[1, p], in the order of the grid

The arithmetic is float32, and only outputs are rounded.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..column_sum.triton_ops import add_partials
from ..gpu import ceil_div, launch, multiprocessors
from ..scratch import Scratch, Shapes, TensorLike

if TYPE_CHECKING:
    from . import Gradients

TILE, WARPS = 2048, 4
PROGRAMS = 8  # per multiprocessor, in a backward


@triton.jit
def _place(tile, pitch, C: tl.constexpr, TILE: tl.constexpr):
    """Offsets of a tile's elements in a matrix whose rows of C elements begin `pitch` elements apart; C = None: contiguous."""
    start = tl.cast(tile, tl.int64) * TILE
    if C is None:
        place = start + tl.arange(0, TILE)
    else:
        row = start // C
        i = (start - row * C).to(tl.int32) + tl.arange(0, TILE)
        place = (row + i // C) * pitch + i % C
    return place


@triton.jit
def _scaled_sum_fwd_kernel(x, x0, a, b, y, x0_n, y_n, n, C: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    i = _place(tile, 0, None, TILE)
    a_value, b_value = tl.load(a).to(tl.float32), 1.0 if b is None else tl.load(b).to(tl.float32)
    x0_tile = tl.load(x0 + _place(tile, x0_n, C, TILE), i < n, 0.0).to(tl.float32)
    scaled = tl.load(x + i, i < n, 0.0).to(tl.float32) * a_value + x0_tile * b_value
    tl.store(y + _place(tile, y_n, C, TILE), scaled.to(y.dtype.element_ty), i < n)


@triton.jit
def _scaled_sum_bwd_kernel(dy, x, x0, a, b, dx, dx0, partials, dy_n, n, tiles, C: tl.constexpr, TILE: tl.constexpr):
    p, programs = tl.program_id(0), tl.num_programs(0)
    a_value, b_value = tl.load(a).to(tl.float32), 1.0 if b is None else tl.load(b).to(tl.float32)
    da, db = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)

    for tile in range(p, tiles, programs):
        i = _place(tile, 0, None, TILE)
        g = tl.load(dy + _place(tile, dy_n, C, TILE), i < n, 0.0).to(tl.float32)
        if partials is not None:
            da += g * tl.load(x + i, i < n, 0.0).to(tl.float32)
            if x0 is not None:
                db += g * tl.load(x0 + i, i < n, 0.0).to(tl.float32)
        if dx0 is not None:
            old = tl.load(dx0 + i, i < n, 0.0).to(tl.float32)
            tl.store(dx0 + i, (old + g * b_value).to(dx0.dtype.element_ty), i < n)
        tl.store(dx + i, (g * a_value).to(dx.dtype.element_ty), i < n)

    if partials is not None:
        tl.store(partials + p, tl.sum(da, 0))
        tl.store(partials + programs + p, tl.sum(db, 0))


def _programs(x: TensorLike) -> int:
    """The number P of programs. It never decreases with more rows, so scratch for many rows also fits fewer."""
    n, c = x.shape
    return max(1, min(ceil_div(n * c, TILE), PROGRAMS * multiprocessors(x.device)))


def workspace(x: TensorLike, *, backward: bool) -> Shapes:
    return {"partials": ((2, _programs(x), 1), torch.float32)} if backward else {}


def _columns(*rows: Tensor) -> int | None:
    """C, or None if every tensor is contiguous."""
    return None if all(x.is_contiguous() for x in rows) else rows[0].shape[1]


def fwd(x: Tensor, x0: Tensor, a: Tensor, b: Tensor | None, *, y: Tensor, scratch: Scratch) -> None:
    n, constants = x.numel(), {"C": _columns(x0, y), "TILE": TILE, "num_warps": WARPS}
    launch(_scaled_sum_fwd_kernel, (ceil_div(n, TILE),), x, x0, a, b, y, x0.stride(0), y.stride(0), n, **constants)


def bwd(
    dy: Tensor, x: Tensor, x0: Tensor | None, a: Tensor, b: Tensor | None, *, out: Gradients, scratch: Scratch
) -> None:
    dx, dx0, da, db, accumulate = out
    partials = None if da is None and db is None else scratch["partials"]
    n = x.numel()
    tiles, constants = ceil_div(n, TILE), {"C": _columns(dy), "TILE": TILE, "num_warps": WARPS}
    arguments = (dy, x, x0, a, b, dx, dx0, partials, dy.stride(0), n, tiles)
    launch(_scaled_sum_bwd_kernel, (_programs(x),), *arguments, **constants)
    if partials is not None and da is not None:
        add_partials(partials if db is not None else partials[0], da, db, accumulate=accumulate)
    elif partials is not None and db is not None:
        add_partials(partials[1], db, accumulate=accumulate)
