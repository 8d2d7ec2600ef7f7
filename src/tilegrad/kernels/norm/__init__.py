"""Layer norm and RMS norm over the last dimension.       x, y (N, C)   w, b (C,)   mean, rstd (N,)

    layer norm   mean = Σ_c x / C   rstd = 1 / √(Σ_c (x − mean)² / C + eps)   x̂ = (x − mean) ∘ rstd   y = x̂ ∘ w + b
    RMS norm     mean = 0           rstd = 1 / √(Σ_c x² / C + eps)            x̂ = x ∘ rstd            y = x̂ ∘ w

    g = dy ∘ w   dx += rstd ∘ (g − Σ_c g / C − x̂ Σ_c (g ∘ x̂) / C)   (RMS norm: without Σ_c g)
    dw += Σ_n dy ∘ x̂   db += Σ_n dy        (accumulate=False: dw = …, db = …; dx is added to all the same)

Sums over columns and rows are matrix × vector products (Σ_n dy ∘ x̂ = (dy ∘ (x − mean))ᵀ rstd), which read memory once.
dx is added to, for the norm stands on a branch of the residual stream. On a CPU float32 and bfloat16 are in rowwise.py where
there is a native library; else rows are worked on in blocks that stay in cache, in the accumulation dtype; bfloat16 is
copied into the scratch, where alone a dtype changes without an allocation. On a CPU w and b may both have that dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_columns, check_param, check_tensor
from ..cpu import rowwise
from ..linear import add_column_sums
from ..op import op
from ..scratch import Scratch, Shapes, accumulation_dtype, blocks, rows_of, views

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 23}  # elements of a block of rows


def _rows(x: Any) -> int:
    n, c = x.shape
    return int(max(1, min(n, BLOCK[torch.device(x.device).type] // max(c, 1))))


def norm_workspace(x: Any, *, backward: bool) -> Shapes:
    """Of layer norm and RMS norm. Name → (shape, dtype) of what `scratch` must hold."""
    c, rows, acc = x.shape[1], _rows(x), accumulation_dtype(x.dtype)
    half = x.dtype != acc
    if rowwise.takes(x):
        return {}
    if not backward:
        return {"x": ((rows, c), acc), "y": ((rows, c), acc), "w": ((c,), acc), "b": ((c,), acc)} if half else {}
    shapes: Shapes = {
        "centred": ((rows, c), acc),
        "work": ((rows, c), acc),
        "sum": ((c,), acc),
    }
    shapes |= dict.fromkeys(("sum_g", "sum_gx", "ones"), ((rows,), acc))
    return shapes | ({"dy": ((rows, c), acc), "w": ((c,), acc)} if half else {})


def _load(x: Tensor, name: str, scratch: Scratch) -> Tensor:
    """x in the accumulation dtype: itself, or its copy in the scratch."""
    return scratch[name][: x.shape[0]].copy_(x) if name in scratch else x


@op()
def layernorm_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *,
    y: Tensor, mean: Tensor, rstd: Tensor, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """y, mean and rstd. `scratch` is read for bfloat16 without a native library only."""
    _fwd(x, w, b, eps, y=y, mean=mean, rstd=rstd, scratch=scratch)


@op(adds=("dx",), accumulates=("dw", "db"))
def layernorm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, *,
    dx: Tensor | None = None, dw: Tensor | None = None, db: Tensor | None = None, accumulate: bool = True,
    scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """dx += …   dw += Σ_n dy ∘ x̂   db += Σ_n dy"""
    _bwd(dy, x, w, mean, rstd, dx=dx, dw=dw, db=db, accumulate=accumulate, scratch=scratch)


@op()
def rmsnorm_fwd(x: Tensor, w: Tensor, eps: float, *, y: Tensor, rstd: Tensor, scratch: Scratch | None = None) -> None:
    """y and rstd. `scratch` is read for bfloat16 without a native library only."""
    _fwd(x, w, None, eps, y=y, mean=None, rstd=rstd, scratch=scratch)


@op(adds=("dx",), accumulates=("dw",))
def rmsnorm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, *,
    dx: Tensor | None = None, dw: Tensor | None = None, accumulate: bool = True, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """dx += …   dw += Σ_n dy ∘ x̂"""
    _bwd(dy, x, w, None, rstd, dx=dx, dw=dw, db=None, accumulate=accumulate, scratch=scratch)


def _fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *,
    y: Tensor, mean: Tensor | None, rstd: Tensor, scratch: Scratch | None,
) -> None:  # fmt: skip
    n, c = x.shape
    if not eps > 0.0:
        raise ValueError(f"eps: got {eps!r}; accepted: a number > 0")
    _check(x, mean, rstd, w=w, b=b, y=y)
    if b is not None:
        check_tensor("b", b, (c,), w.dtype, x.device)
    if rowwise.takes(x):
        rowwise.norm_fwd(x, w, b, eps, y=y, mean=mean, rstd=rstd)
        return
    scratch = views(scratch, norm_workspace(x, backward=False), x.device, "norm")
    w32 = scratch["w"].copy_(w) if "w" in scratch else w
    b32 = scratch["b"].copy_(b) if "b" in scratch and b is not None else b
    for i in blocks(n, _rows(x)):
        xi, ri = _load(rows_of(x, i), "x", scratch), rows_of(rstd, i)
        yi = scratch["y"][: xi.shape[0]] if "y" in scratch else rows_of(y, i)
        centred = xi
        if mean is not None:
            mi = torch.mean(xi, -1, out=rows_of(mean, i))
            centred = torch.sub(xi, mi.unsqueeze(1), out=yi)
        torch.linalg.vector_norm(centred, dim=-1, out=ri).square_().div_(c).add_(eps).rsqrt_()
        torch.mul(centred, ri.unsqueeze(1), out=yi)
        if b32 is None:
            yi.mul_(w32)
        else:
            torch.addcmul(b32, yi, w32, out=yi)
        if "y" in scratch:
            rows_of(y, i).copy_(yi)


def _bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor | None, rstd: Tensor, *,
    dx: Tensor | None, dw: Tensor | None, db: Tensor | None, accumulate: bool, scratch: Scratch | None,
) -> None:  # fmt: skip
    n, c = x.shape
    acc = accumulation_dtype(x.dtype)
    _check(x, mean, rstd, w=w, dy=dy, dx=dx)
    for name, grad in (("dw", dw), ("db", db)):
        if grad is not None:
            check_tensor(name, grad, (c,), acc, x.device)
            check_columns(name, grad)
    if rowwise.takes(x):
        rowwise.norm_bwd(dy, x, w, mean, rstd, dx=dx, dw=dw, db=db, accumulate=accumulate)
        return
    for grad in (dw, db):
        if grad is not None and not accumulate:
            grad.zero_()
    scratch = views(scratch, norm_workspace(x, backward=True), x.device, "norm")
    w32, total = scratch["w"].copy_(w) if "w" in scratch else w, scratch["sum"]
    for i in blocks(n, _rows(x)):
        m = i.stop - i.start
        centred, work, sum_g, sum_gx, ones = (
            rows_of(scratch[name], slice(0, m)) for name in ("centred", "work", "sum_g", "sum_gx", "ones")
        )
        dyi, ri = _load(rows_of(dy, i), "dy", scratch), rows_of(rstd, i)
        if db is not None:
            add_column_sums(dyi, ones.fill_(1.0), sums=db, part=total)
        if dw is None and dx is None:
            continue
        xi = centred.copy_(rows_of(x, i)) if x.dtype != acc else rows_of(x, i)
        if mean is not None:
            xi = torch.sub(xi, rows_of(mean, i).unsqueeze(1), out=centred)
        torch.mul(dyi, xi, out=work)
        if dw is not None:
            add_column_sums(work, ri, sums=dw, part=total)
        if dx is None:
            continue
        torch.mv(work, w32, out=sum_gx).mul_(ri).mul_(ri).div_(-c)
        step = torch.mul(xi, sum_gx.unsqueeze(1), out=centred).addcmul_(dyi, w32)
        if mean is not None:
            step.sub_(torch.mv(dyi, w32, out=sum_g).div_(c).unsqueeze(1))
        dxi = rows_of(dx, i)
        if dx.dtype == acc:
            dxi.addcmul_(step, ri.unsqueeze(1))
        else:
            dxi.copy_(work.copy_(dxi).addcmul_(step, ri.unsqueeze(1)))


def _check(x: Tensor, mean: Tensor | None, rstd: Tensor, **others: Tensor | None) -> None:
    n, c = x.shape
    for name, other in (("x", x), *others.items()):
        if other is None:
            continue
        if name in ("w", "b"):
            check_param(name, other, (c,), x)
        else:
            check_tensor(name, other, (n, c), x.dtype, x.device)
        check_columns(name, other)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if statistic is not None:
            check_tensor(name, statistic, (n,), accumulation_dtype(x.dtype), x.device)
            check_columns(name, statistic)
