"""Embeddings in Triton, and their gradient without atomics: rows are added in the order of the sorted tokens.

    forward    one program per row of x
    dwpe       one program per position adds its rows, sequence after sequence; packed rows are added as in dwte, by `positions`
    sort       ordered = token[order], a stable sort by torch, which allocates about 50 bytes per token
    runs       one program per RUN entries of `order`. Whenever the token changes, the program adds its sum to dwte. If these
               equal tokens began in an earlier program, it writes the sum to parts instead
    join       the program in which equal tokens begin adds the parts that later programs wrote for them

The order of every sum depends only on the tokens, so the bits are the same each time. Scratch: 16 bytes per token, and N / RUN
rows of float32 for N tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import ceil_div, launch, padded
from ..scratch import Scratch, Shapes, TensorLike

if TYPE_CHECKING:
    from . import Gradients, Inputs

RUN = 32  # sorted tokens per program
WARPS = 4


@triton.jit
def _embedding_kernel(tokens, wte, wpe, positions, x, scale, wte_v, wpe_t, x_n, T, C, BLOCK_C: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    y = tl.load(wte + tl.load(tokens + n) * wte_v + c, mask=c < C, other=0.0).to(tl.float32) * scale
    if wpe is not None:
        t = n % T
        if positions is not None:
            t = tl.load(positions + n)
        y += tl.load(wpe + t * wpe_t + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(x + n * x_n + c, y.to(x.dtype.element_ty), mask=c < C)


@triton.jit
def _dwpe_kernel(dx, dwpe, dx_n, dwpe_t, B, T, C, ACCUMULATE: tl.constexpr, BLOCK_C: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    inside, pointers = c < C, dwpe + t * dwpe_t + c
    total = tl.zeros([BLOCK_C], tl.float32)
    if t < T:
        for b in range(0, B):
            total += tl.load(dx + (b * T + t) * dx_n + c, mask=inside, other=0.0).to(tl.float32)
    if ACCUMULATE:
        total += tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, total, mask=inside)


@triton.jit
def _runs_kernel(dx, order, ordered, dwte, parts, scale, dx_n, dwte_v, N, C, RUN: tl.constexpr, BLOCK_C: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, first = c < C, tile * RUN
    end = tl.minimum(first + RUN, N)
    token = tl.load(ordered + first)
    continued = (tl.load(ordered + first - 1, mask=first > 0, other=-1) == token).to(tl.int32)
    total = tl.zeros([BLOCK_C], tl.float32)

    for place in range(first, end):
        n = tl.load(order + place).to(tl.int64)
        total += tl.load(dx + n * dx_n + c, mask=inside, other=0.0).to(tl.float32)
        following = tl.load(ordered + place + 1, mask=place + 1 < end, other=-1)
        if following != token:
            if continued != 0:
                tl.store(parts + tile * C + c, total, mask=inside)
            else:
                pointers = dwte + token.to(tl.int64) * dwte_v + c
                tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + total * scale, mask=inside)
            total = tl.zeros([BLOCK_C], tl.float32)
            token = following
            continued *= 0


@triton.jit
def _join_kernel(ordered, parts, dwte, scale, dwte_v, N, C, RUN: tl.constexpr, BLOCK_C: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, first, last = c < C, tile * RUN, tile * RUN + RUN - 1
    if last + 1 < N:
        token = tl.load(ordered + last)
        begun_before = tl.load(ordered + first - 1, mask=first > 0, other=-1) == token
        continues = tl.load(ordered + last + 1) == token
        if continues and not begun_before:
            total = tl.zeros([BLOCK_C], tl.float32)
            place = last + 1
            while continues:
                total += tl.load(parts + place // RUN * C + c, mask=inside, other=0.0)
                place += RUN
                continues = tl.load(ordered + place, mask=place < N, other=-1) == token
            pointers = dwte + token.to(tl.int64) * dwte_v + c
            tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + total * scale, mask=inside)


def workspace(x: TensorLike, *, converts: bool = True, packed: bool = False, scaled: bool = False) -> Shapes:
    """Buffers of the backward. A forward needs none: on a GPU its tables have x's dtype, so `converts` is False."""
    if not converts:
        return {}
    n, c = x.shape
    shapes: Shapes = dict.fromkeys(("order", "ordered"), ((n,), torch.int64))
    return shapes | {"parts": ((ceil_div(n, RUN), c), torch.float32)}


def fwd(inputs: Inputs, *, x: Tensor, scratch: Scratch) -> None:
    tokens, wte, wpe, positions, scale = inputs
    n, c = x.shape
    numbers = (scale, wte.stride(0), 0 if wpe is None else wpe.stride(0), x.stride(0), tokens.shape[1], c)
    launch(_embedding_kernel, (n,), tokens, wte, wpe, positions, x, *numbers, BLOCK_C=padded(c), num_warps=WARPS)


def bwd(
    dx: Tensor, tokens: Tensor, positions: Tensor | None, scale: float, *, out: Gradients, scratch: Scratch
) -> None:
    dwte, dwpe, accumulate = out
    (b, t), c = tokens.shape, dx.shape[1]
    if dwpe is not None and positions is not None:
        _add_all(dx, positions.view(-1), dwpe, 1.0, scratch, accumulate=accumulate)
    elif dwpe is not None:
        rows = t if accumulate else dwpe.shape[0]
        constants = {"ACCUMULATE": accumulate, "BLOCK_C": padded(c), "num_warps": WARPS}
        launch(_dwpe_kernel, (rows,), dx, dwpe, dx.stride(0), dwpe.stride(0), b, t, c, **constants)
    if dwte is not None:
        _add_all(dx, tokens.view(-1), dwte, scale, scratch, accumulate=accumulate)


def _add_all(dx: Tensor, tokens: Tensor, dwte: Tensor, scale: float, scratch: Scratch, *, accumulate: bool) -> None:
    """dwte[tokens[n]] += scale · dx[n], in the order of the sorted tokens"""
    if not accumulate:
        dwte.zero_()
    if not dx.shape[0]:
        return
    (n, c), (order, ordered, parts) = dx.shape, (scratch[x] for x in ("order", "ordered", "parts"))
    tiles = (ceil_div(n, RUN), ceil_div(c, 1024))
    constants = {"RUN": RUN, "BLOCK_C": min(padded(c), 1024), "num_warps": WARPS}
    torch.sort(tokens, stable=True, out=(ordered, order))
    launch(_runs_kernel, tiles, dx, order, ordered, dwte, parts, scale, dx.stride(0), dwte.stride(0), n, c, **constants)
    launch(_join_kernel, tiles, ordered, parts, dwte, scale, dwte.stride(0), n, c, **constants)
