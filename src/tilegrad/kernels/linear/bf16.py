"""Products of bfloat16 on a CPU with bf16 instructions, by torch.

y and dx are one product each. torch's bf16 product can't write float32, so dw is computed COLS rows at a time in scratch. A
float32 w or b is rounded into scratch at each call. This moves less memory than keeping rounded copies.

On a CPU with AMX, for most row lengths that are not a multiple of 32, oneDNN 3.12 also reads the numbers after a row of x or
dy, and multiplies them by zero. These numbers are the next row, or what follows a strided row. So a NaN in one row may make the
previous row NaN too, and what follows a strided row must be finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks
from .tiled import in_tile, tile_of
from .torch_ops import product

COLS = 1024  # rows of dw per tile


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, backward: bool = False, *, bias: bool) -> Shapes:
    (cout, cin), acc, shapes = w.shape[-2:], accumulation_dtype(x.dtype), Shapes()
    if w.dtype == acc:
        shapes |= {"w16": ((cout, cin), x.dtype)}
        shapes |= {"b16": ((cout,), x.dtype)} if bias and not backward else {}
    if backward:
        cols = min(cout, COLS)
        shapes |= {"dw16": ((cols, cin), x.dtype), "dw32": ((cols, cin), acc)}
    return shapes


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float, scratch: Scratch) -> None:
    product(x, in_tile(scratch, "w16", w).t(), out=y, accumulate=False, scale=scale)
    if b is not None:
        y.add_(in_tile(scratch, "b16", b))  # addmm(b, …) would copy b into y and read it again


def bwd_input(dy: Tensor, w: Tensor, *, dx: Tensor, accumulate: bool, scale: float, scratch: Scratch) -> None:
    product(dy, in_tile(scratch, "w16", w), out=dx, accumulate=accumulate, scale=scale)


def bwd_weight(dy: Tensor, x: Tensor, *, dw: Tensor, accumulate: bool, scratch: Scratch) -> None:
    for j in blocks(dw.shape[0], COLS):
        dw16 = torch.mm(dy[:, j].t(), x, out=tile_of(scratch["dw16"], dw[j]))
        dw[j].add_(in_tile(scratch, "dw32", dw16)) if accumulate else dw[j].copy_(dw16)
