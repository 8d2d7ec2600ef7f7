"""Norms as a chain of torch ops, on blocks of rows that stay in cache, in the accumulation dtype: any device, any dtype.

bfloat16 is copied into scratch of that dtype: only so is it converted without an allocation. Sums over columns and rows are
matrix × vector products (Σ_n dy ∘ x̂ = (dy ∘ (x − mean))ᵀ rstd), which read memory once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..column_sum.torch_ops import add_weighted_rows
from ..scratch import Scratch, Shapes, accumulation_dtype, blocks, rows_of, rows_per_block

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 23}  # elements of a block of rows


def workspace(x: Any, *, backward: bool) -> Shapes:
    c, rows, acc = x.shape[1], rows_per_block(x, BLOCK), accumulation_dtype(x.dtype)
    converted = x.dtype != acc
    if not backward:
        return {"x": ((rows, c), acc), "y": ((rows, c), acc), "w": ((c,), acc), "b": ((c,), acc)} if converted else {}
    shapes: Shapes = {
        "centred": ((rows, c), acc),
        "work": ((rows, c), acc),
        "sum": ((c,), acc),
    }
    shapes |= dict.fromkeys(("sum_g", "sum_gx", "ones"), ((rows,), acc))
    return shapes | ({"dy": ((rows, c), acc), "w": ((c,), acc)} if converted else {})


def _load(x: Tensor, name: str, scratch: Scratch) -> Tensor:
    """x in the accumulation dtype: itself, or its copy in the scratch."""
    return scratch[name][: x.shape[0]].copy_(x) if name in scratch else x


def fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *,
    y: Tensor, mean: Tensor | None, rstd: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    n, c = x.shape
    w_acc = scratch["w"].copy_(w) if "w" in scratch else w
    b_acc = scratch["b"].copy_(b) if "b" in scratch and b is not None else b
    for i in blocks(n, rows_per_block(x, BLOCK)):
        xi, ri = _load(rows_of(x, i), "x", scratch), rows_of(rstd, i)
        yi = scratch["y"][: xi.shape[0]] if "y" in scratch else rows_of(y, i)
        centred = xi
        if mean is not None:
            mi = torch.mean(xi, -1, out=rows_of(mean, i))
            centred = torch.sub(xi, mi.unsqueeze(1), out=yi)
        torch.linalg.vector_norm(centred, dim=-1, out=ri).square_().div_(c).add_(eps).rsqrt_()
        torch.mul(centred, ri.unsqueeze(1), out=yi)
        if b_acc is None:
            yi.mul_(w_acc)
        else:
            torch.addcmul(b_acc, yi, w_acc, out=yi)
        if "y" in scratch:
            rows_of(y, i).copy_(yi)


def bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor | None, rstd: Tensor, *,
    dx: Tensor | None, dw: Tensor | None, db: Tensor | None, accumulate: bool, scratch: Scratch,
) -> None:  # fmt: skip
    (n, c), acc = x.shape, accumulation_dtype(x.dtype)
    for grad in (dw, db):
        if grad is not None and not accumulate:
            grad.zero_()
    w_acc, part = scratch["w"].copy_(w) if "w" in scratch else w, scratch["sum"]
    for i in blocks(n, rows_per_block(x, BLOCK)):
        m = i.stop - i.start
        centred, work, sum_g, sum_gx, ones = (
            rows_of(scratch[name], slice(0, m)) for name in ("centred", "work", "sum_g", "sum_gx", "ones")
        )
        dyi, ri = _load(rows_of(dy, i), "dy", scratch), rows_of(rstd, i)
        if db is not None:
            add_weighted_rows(dyi, ones.fill_(1.0), sums=db, part=part)
        if dw is None and dx is None:
            continue
        xi = centred.copy_(rows_of(x, i)) if x.dtype != acc else rows_of(x, i)
        if mean is not None:
            xi = torch.sub(xi, rows_of(mean, i).unsqueeze(1), out=centred)
        torch.mul(dyi, xi, out=work)
        if dw is not None:
            add_weighted_rows(work, ri, sums=dw, part=part)
        if dx is None:
            continue
        torch.mv(work, w_acc, out=sum_gx).mul_(ri).mul_(ri).div_(-c)
        step = torch.mul(xi, sum_gx.unsqueeze(1), out=centred).addcmul_(dyi, w_acc)
        if mean is not None:
            step.sub_(torch.mv(dyi, w_acc, out=sum_g).div_(c).unsqueeze(1))
        dxi = rows_of(dx, i)
        if dx.dtype == acc:
            dxi.addcmul_(step, ri.unsqueeze(1))
        else:
            dxi.copy_(work.copy_(dxi).addcmul_(step, ri.unsqueeze(1)))
