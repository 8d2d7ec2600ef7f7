"""Norms as torch ops on blocks of rows that stay in cache: any device and dtype, computed in the accumulation dtype.

bfloat16 rows are copied into scratch of the accumulation dtype, because only a copy converts without allocating. The backward's
sums are matrix × vector products (Σ_n dy ∘ x̂ = (dy ∘ (x − mean))ᵀ rstd), which read the matrix once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..column_sum import torch_ops as column_sum
from ..column_sum.torch_ops import add_weighted_rows
from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, below, blocks, of, rows_of, rows_per_block

if TYPE_CHECKING:
    from . import Gradients, Outputs, Statistics

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 23}  # elements of a block of rows


def workspace(x: TensorLike, *, backward: bool) -> Shapes:
    c, rows, acc = x.shape[1], rows_per_block(x, BLOCK), accumulation_dtype(x.dtype)
    converted = x.dtype != acc
    if not backward:
        return _converted(rows, c, acc, "x", "y") if converted else {}
    shapes: Shapes = {"centred": ((rows, c), acc), "work": ((rows, c), acc), "sum": ((c,), acc)}
    shapes |= dict.fromkeys(("sum_g", "sum_gx", "ones"), ((rows,), acc))
    shapes |= below("column_sum", column_sum.workspace(x))
    return shapes | (_converted(rows, c, acc, "dy") if converted else {})


def _converted(rows: int, c: int, acc: torch.dtype, *names: str) -> Shapes:
    return dict.fromkeys(names, ((rows, c), acc)) | dict.fromkeys(("w", "b"), ((c,), acc))


def _load(x: Tensor, name: str, scratch: Scratch) -> Tensor:
    """x itself if it has the accumulation dtype, otherwise a copy in the scratch."""
    return scratch[name][: x.shape[0]].copy_(x) if name in scratch else x


def _load_params(w: Tensor, b: Tensor | None, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
    if "w" not in scratch:
        return w, b
    return scratch["w"].copy_(w), None if b is None else scratch["b"].copy_(b)


def _scale(centred: Tensor, rstd: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor) -> None:
    """y = centred ∘ rstd ∘ w + b"""
    torch.mul(centred, rstd.unsqueeze(1), out=y)
    if b is None:
        y.mul_(w)
    else:
        torch.addcmul(b, y, w, out=y)


def fwd(
    x: Tensor, f: Tensor | None, w: Tensor, b: Tensor | None, eps: float, *, out: Outputs, scratch: Scratch
) -> None:
    x1, y, mean, rstd = out
    n, c = x.shape
    if f is not None and x1 is not None:
        x = torch.add(x, f, out=x1)
    w_acc, b_acc = _load_params(w, b, scratch)
    for i in blocks(n, rows_per_block(x, BLOCK)):
        xi, ri = _load(rows_of(x, i), "x", scratch), rows_of(rstd, i)
        yi = scratch["y"][: xi.shape[0]] if "y" in scratch else rows_of(y, i)
        centred = xi
        if mean is not None:
            mi = torch.mean(xi, -1, out=rows_of(mean, i))
            centred = torch.sub(xi, mi.unsqueeze(1), out=yi)
        torch.linalg.vector_norm(centred, dim=-1, out=ri).square_().div_(c).add_(eps).rsqrt_()
        _scale(centred, ri, w_acc, b_acc, y=yi)
        if "y" in scratch:
            rows_of(y, i).copy_(yi)


def bwd(
    dy: Tensor, x: Tensor, w: Tensor, b: Tensor | None, statistics: Statistics, *, out: Gradients, scratch: Scratch
) -> None:
    (mean, rstd), (dx, dw, db, dx_sum, y, accumulate) = statistics, out
    (n, c), acc = x.shape, accumulation_dtype(x.dtype)
    for grad in (dw, db):
        if grad is not None and not accumulate:
            grad.zero_()
    (w_acc, b_acc), part = _load_params(w, b, scratch), scratch["sum"]
    for i in blocks(n, rows_per_block(x, BLOCK)):
        m = i.stop - i.start
        centred, work, sum_g, sum_gx, ones = (
            rows_of(scratch[name], slice(0, m)) for name in ("centred", "work", "sum_g", "sum_gx", "ones")
        )
        dyi, ri = _load(rows_of(dy, i), "dy", scratch), rows_of(rstd, i)
        if db is not None:
            add_weighted_rows(dyi, ones.fill_(1.0), sums=db, part=part)
        if dw is None and dx is None and y is None:
            continue
        xi = centred.copy_(rows_of(x, i)) if x.dtype != acc else rows_of(x, i)
        if mean is not None:
            xi = torch.sub(xi, rows_of(mean, i).unsqueeze(1), out=centred)
        torch.mul(dyi, xi, out=work)
        if dw is not None:
            add_weighted_rows(work, ri, sums=dw, part=part)
        if dx is not None:
            torch.mv(work, w_acc, out=sum_gx).mul_(ri).mul_(ri).div_(-c)
            step = torch.mul(xi, sum_gx.unsqueeze(1), out=work).addcmul_(dyi, w_acc)
            if mean is not None:
                step.sub_(torch.mv(dyi, w_acc, out=sum_g).div_(c).unsqueeze(1))
            dxi = rows_of(dx, i)
            if dx.dtype == acc:
                dxi.addcmul_(step, ri.unsqueeze(1))
            else:  # dyi is scratch that is no longer needed
                dxi.copy_(dyi.copy_(dxi).addcmul_(step, ri.unsqueeze(1)))
        if y is not None:
            yi = rows_of(y, i)
            _scale(xi, ri, w_acc, b_acc, y=yi if y.dtype == acc else work)
            if y.dtype != acc:
                yi.copy_(work)
    if dx is not None and dx_sum is not None:
        column_sum.fwd(dx, sums=dx_sum, accumulate=accumulate, scratch=of("column_sum", scratch))
