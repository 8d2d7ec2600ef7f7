"""The scaled sum y = a x + b x0 by torch ops on blocks of rows, in the accumulation dtype, on any device.

Products and their sum are separate ops in the forward, because torch may use fused multiply-adds for only some elements. A row
is summed by one thread, so the sums do not depend on the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks, rows_of, rows_per_block

if TYPE_CHECKING:
    from . import Gradients

BLOCK = {"cpu": 1 << 17, "cuda": 1 << 23}  # elements of a block of rows


def workspace(x: TensorLike, *, backward: bool) -> Shapes:
    rows, acc = rows_per_block(x, BLOCK), accumulation_dtype(x.dtype)
    block = ((rows, x.shape[1]), acc)
    shapes: Shapes = {"work": block, "a": ((1,), acc), "b": ((1,), acc)}
    if x.dtype != acc:
        shapes["wide"] = block
    if backward:
        shapes |= {"row_sums": ((rows,), acc), "sum": ((1,), acc)}
        if x.dtype != acc:
            shapes["dy"] = block
    return shapes


def _in_accumulation_dtype(x: Tensor, name: str, scratch: Scratch) -> Tensor:
    """x itself if it has the accumulation dtype, otherwise a copy in the scratch."""
    return scratch[name][: x.shape[0]].copy_(x) if name in scratch else x


def _scalars(a: Tensor, b: Tensor | None, scratch: Scratch) -> tuple[Tensor, Tensor]:
    b_copy = scratch["b"]
    return scratch["a"].copy_(a), b_copy.fill_(1.0) if b is None else b_copy.copy_(b)


def fwd(x: Tensor, x0: Tensor, a: Tensor, b: Tensor | None, *, y: Tensor, scratch: Scratch) -> None:
    a, b = _scalars(a, b, scratch)
    for i in blocks(x.shape[0], rows_per_block(x, BLOCK)):
        work = scratch["work"][: i.stop - i.start]
        torch.mul(_in_accumulation_dtype(rows_of(x, i), "wide", scratch), a, out=work)
        scaled = _in_accumulation_dtype(rows_of(x0, i), "wide", scratch)
        into = scaled if "wide" in scratch else rows_of(y, i)
        torch.mul(scaled, b, out=into).add_(work)
        if "wide" in scratch:
            rows_of(y, i).copy_(into)


def bwd(
    dy: Tensor, x: Tensor, x0: Tensor | None, a: Tensor, b: Tensor | None, *, out: Gradients, scratch: Scratch
) -> None:
    dx, dx0, da, db, accumulate = out
    a, b = _scalars(a, b, scratch)
    for total in (da, db):
        if total is not None and not accumulate:
            total.zero_()
    for i in blocks(x.shape[0], rows_per_block(x, BLOCK)):
        g, work = _in_accumulation_dtype(rows_of(dy, i), "dy", scratch), scratch["work"][: i.stop - i.start]
        for total, factor in ((da, x), (db, x0)):
            if total is not None and factor is not None:
                torch.mul(g, _in_accumulation_dtype(rows_of(factor, i), "wide", scratch), out=work)
                row_sums = torch.sum(work, -1, out=scratch["row_sums"][: len(work)])
                total.add_(torch.sum(row_sums, 0, keepdim=True, out=scratch["sum"]))
        if dx0 is not None and "wide" in scratch:
            rows_of(dx0, i).copy_(_in_accumulation_dtype(rows_of(dx0, i), "wide", scratch).addcmul_(g, b))
        elif dx0 is not None:
            rows_of(dx0, i).addcmul_(g, b)
        if "wide" in scratch:
            rows_of(dx, i).copy_(g.mul_(a))
        else:
            torch.mul(g, a, out=rows_of(dx, i))
