"""The mix in Triton: a program mixes some rows of a head and reads and writes each number once."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..gpu import ceil_div, launch, padded
from ..scratch import Scratch, Shapes, TensorLike

TILE, WARPS = 4096, 4  # TILE: elements of o per program


@triton.jit
def _mix_kernel(
    part, part_lse,
    o, lse,
    part_b, part_h, part_t, part_lse_b, part_lse_h, part_lse_t, o_b, o_h, o_t, lse_b, lse_h, lse_t, H, T, tiles,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    b, h = n // tiles // H, n // tiles % H
    t = n % tiles * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK_D)[None, :]
    row_inside, inside = t < T, (t < T)[:, None] & (i < D)

    at_lse = lse + b * lse_b + h * lse_h + t * lse_t
    at_o = o + b * o_b + h * o_h + t[:, None] * o_t + i
    old_lse = tl.load(at_lse, mask=row_inside, other=0.0)
    added_lse = tl.load(part_lse + b * part_lse_b + h * part_lse_h + t * part_lse_t, mask=row_inside, other=0.0)
    x = tl.load(at_o, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(part + b * part_b + h * part_h + t[:, None] * part_t + i, mask=inside, other=0.0).to(tl.float32)

    larger = tl.maximum(old_lse, added_lse)
    total_lse = larger + tl.log(tl.exp(old_lse - larger) + tl.exp(added_lse - larger))
    share = tl.exp(old_lse - total_lse)

    tl.store(at_o, (y + (x - y) * share[:, None]).to(o.dtype.element_ty), mask=inside)
    tl.store(at_lse, total_lse, mask=row_inside)


def workspace(part: TensorLike) -> Shapes:
    return {}


def fwd(part: Tensor, part_lse: Tensor, *, o: Tensor, lse: Tensor, scratch: Scratch) -> None:
    b, h, t, d = part.shape
    block_d = padded(d)
    rows = max(1, TILE // block_d)
    tiles = ceil_div(t, rows)
    strides = (*part.stride()[:3], *part_lse.stride(), *o.stride()[:3], *lse.stride())
    constants = {"D": d, "ROWS": rows, "BLOCK_D": block_d, "num_warps": WARPS}
    if d:
        launch(_mix_kernel, (b * h * tiles,), part, part_lse, o, lse, *strides, h, t, tiles, **constants)
