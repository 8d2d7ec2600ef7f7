"""Products of bfloat16 on a CPU without bf16 instructions. On a CPU with AVX-512, torch's bfloat16 product takes about 4 times
as long as its float32 product; without AVX-512, about 100 times. Tiles of the operands are copied to float32, and the float32
kernel that `LINEAR` selects multiplies them. A float32 w is not copied.
"""

from __future__ import annotations

from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks
from . import LINEAR, Problem

ROWS, COLS = 512, 1024  # a tile of y


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, backward: bool = False, *, bias: bool) -> Shapes:
    n, (cout, cin), acc = x.shape[0], w.shape[-2:], accumulation_dtype(x.dtype)
    rows, cols = min(n, ROWS), min(cout, COLS)
    shapes: Shapes = {"x32": ((rows, cin), acc), "y32": ((rows, cols), acc)}
    shapes |= {} if w.dtype == acc else {"w32": ((cols, cin), acc)}
    return shapes | ({"dx32": ((rows, cin), acc)} if backward else {})


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float, scratch: Scratch) -> None:
    for i in blocks(x.shape[0], ROWS):
        x32 = in_tile(scratch, "x32", x[i])
        for j in blocks(w.shape[0], COLS):
            y32 = tile_of(scratch["y32"], y[i, j])
            y32.zero_() if b is None else y32.copy_(b[j])
            _product(in_tile(scratch, "w32", w[j]), x32.t(), out=y32.t(), accumulate=True)
            y[i, j].copy_(y32 if scale == 1.0 else y32.mul_(scale))


def bwd_input(dy: Tensor, w: Tensor, *, dx: Tensor, accumulate: bool, scale: float, scratch: Scratch) -> None:
    for i in blocks(dy.shape[0], ROWS):
        dx32 = tile_of(scratch["dx32"], dx[i])
        dx32.copy_(dx[i]) if accumulate else dx32.zero_()
        for j in blocks(w.shape[0], COLS):
            w32 = in_tile(scratch, "w32", w[j])
            _product(in_tile(scratch, "y32", dy[i, j]), w32, out=dx32, accumulate=True)
        dx[i].copy_(dx32 if scale == 1.0 else dx32.mul_(scale))


def bwd_weight(dy: Tensor, x: Tensor, *, dw: Tensor, accumulate: bool, scratch: Scratch) -> None:
    if not accumulate and not dy.shape[0]:
        dw.zero_()
    for i in blocks(dy.shape[0], ROWS):
        x32 = in_tile(scratch, "x32", x[i])
        for j in blocks(dw.shape[0], COLS):
            _product(in_tile(scratch, "y32", dy[i, j]).t(), x32, out=dw[j], accumulate=accumulate or i.start > 0)


def _product(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool) -> None:
    LINEAR.select(Problem(a, b, backward=True)).load().product(a, b, out=out, accumulate=accumulate)


def tile_of(buffer: Tensor, like: Tensor) -> Tensor:
    """The first elements of a buffer, in the shape of `like`."""
    return buffer.view(-1)[: like.numel()].view(like.shape)


def in_tile(scratch: Scratch, name: str, x: Tensor) -> Tensor:
    """x copied to the buffer of this name, in the buffer's dtype; x itself if the scratch has no such buffer."""
    return tile_of(scratch[name], x).copy_(x) if name in scratch else x
