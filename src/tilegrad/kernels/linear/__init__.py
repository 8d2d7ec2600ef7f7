"""y = x wᵀ + b, dense and one matrix per head.

    x (N, Cin)   w (Cout, Cin)   b (Cout,)   y (N, Cout)
    dx = dy w    dw += dyᵀ x     db += Σ_n dy              accumulate=False: dw = dyᵀ x, db = Σ_n dy

Rows may be strided, columns not. db is summed in rowwise.py where that takes dy, else as a product with ones. For bfloat16,
dw and db are float32; on a CPU so may w and b be, which are then rounded here, call by call: that moves less memory than to
keep rounded copies. On CUDA y may be float32 (the logits of a loss).
How a product is formed:

    float32, float64   straight. On a CPU as yᵀ = w xᵀ: `addmm(b, x, w.t())` copies w inside on aarch64.
    bfloat16, CUDA     straight, into float32 where the output is.
    bfloat16, CPU      with bf16 instructions straight, but for dw: torch's bf16 product can't write float32, so it goes
                       through tiles of the scratch. Without them it is some hundred times slower than its float32 one,
                       so tiles of the operands are copied into float32; then dw is summed there too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..checks import check_columns, check_param, check_tensor
from ..cpu import rowwise
from ..op import op
from ..scratch import Scratch, Shapes, accumulation_dtype, blocks, rows_of, views

ROWS, COLS = 512, 1024  # of a tile of y, where products go through tiles


@cache
def _has_bf16_products() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _half_on_cpu(x: Any) -> bool:
    return x.dtype == torch.bfloat16 and torch.device(x.device).type == "cpu"


def linear_workspace(x: Any, w: Any, *, backward: bool) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold; nothing for a forward but for bfloat16 on a CPU."""
    return _workspace(x, w, *w.shape, backward=backward)


def _workspace(x: Any, w: Any, cout: int, cin: int, *, backward: bool) -> Shapes:
    n, acc, half = x.shape[0], accumulation_dtype(x.dtype), _half_on_cpu(x)
    sums = backward and not rowwise.takes(x)
    shapes: Shapes = {"db": ((cout,), acc), "ones": ((n,), acc if half else x.dtype)} if sums else {}
    if not half:
        return shapes
    rows, cols, wide = min(n, ROWS), min(cout, COLS), w.dtype == acc
    if not _has_bf16_products():
        shapes |= {"x32": ((rows, cin), acc), "y32": ((rows, cols), acc)}
        shapes |= {} if wide else {"w32": ((cols, cin), acc)}
        return shapes | ({"dx32": ((rows, cin), acc)} if backward else {})
    if wide:
        shapes |= {"w16": ((cout, cin), x.dtype)} | ({} if backward else {"b16": ((cout,), x.dtype)})
    if backward:
        shapes |= {"dw16": ((cols, cin), x.dtype), "dw32": ((cols, cin), acc)}
    return shapes | ({"y32": ((rows, cols), acc)} if sums else {})


@op()
def linear_fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scratch: Scratch | None = None) -> None:
    """y = x wᵀ + b. On CUDA a float32 y of a bfloat16 x takes no b."""
    (n, cin), cout = x.shape, w.shape[0]
    check_param("w", w, (cout, cin), x)
    if b is not None:
        check_param("b", b, (cout,), x)
    wide = b is None and x.device.type != "cpu" and y.dtype == accumulation_dtype(x.dtype)
    check_tensor("y", y, (n, cout), y.dtype if wide else x.dtype, x.device)
    if _half_on_cpu(x):
        _half_fwd(x, w, b, y=y, scratch=views(scratch, linear_workspace(x, w, backward=False), x.device, "linear"))
    elif x.device.type == "cpu":
        if b is None:
            torch.mm(w, x.t(), out=y.t())
        else:
            y.copy_(b).t().addmm_(w, x.t())
    elif y.dtype != x.dtype:
        torch.mm(x, w.t(), out_dtype=y.dtype, out=y)
    elif b is None:
        torch.mm(x, w.t(), out=y)
    else:
        torch.addmm(b, x, w.t(), out=y)


@op(accumulates=("dw", "db"))
def linear_bwd(
    dy: Tensor, x: Tensor, w: Tensor, *,
    dx: Tensor | None = None, dw: Tensor | None = None, db: Tensor | None = None, accumulate: bool = True,
    scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """dx = dy w   dw += dyᵀ x   db += Σ_n dy; accumulate=False: dw and db are overwritten."""
    (n, cin), cout, acc = x.shape, w.shape[0], accumulation_dtype(x.dtype)
    check_param("w", w, (cout, cin), x)
    check_tensor("dy", dy, (n, cout), x.dtype, x.device)
    for name, grad, shape, dtype in (
        ("dx", dx, (n, cin), x.dtype),
        ("dw", dw, (cout, cin), acc),
        ("db", db, (cout,), acc),
    ):
        if grad is not None:
            check_tensor(name, grad, shape, dtype, x.device)
    if db is not None:
        check_columns("dy", dy)
        check_columns("db", db)
    needed = linear_workspace(x, w, backward=True)
    if db is None:
        needed = {name: buffer for name, buffer in needed.items() if name not in ("db", "ones")}
    scratch = views(scratch, needed, x.device, "linear")
    if db is not None:
        _add_bias_gradient(dy, db=db, accumulate=accumulate, scratch=scratch)
    if _half_on_cpu(x):
        _half_bwd(dy, x, w, dx=dx, dw=dw, accumulate=accumulate, scratch=scratch)
        return
    if dx is not None:
        torch.mm(dy, w, out=dx)
    if dw is not None:
        _product(dy.t(), x, out=dw, accumulate=accumulate)


def _add_bias_gradient(dy: Tensor, *, db: Tensor, accumulate: bool, scratch: Scratch) -> None:
    """db += Σ_n dy, or = where accumulate is False."""
    if rowwise.takes(dy):
        rowwise.column_sums(dy, sums=db, accumulate=accumulate)
        return
    if not accumulate:
        db.zero_()
    ones = scratch["ones"].fill_(1.0)
    if not _half_on_cpu(dy):
        add_column_sums(dy, ones, sums=db, part=scratch["db"])
        return
    for i in blocks(dy.shape[0], ROWS):
        for j in blocks(dy.shape[1], COLS):
            dy32 = _in(scratch, "y32", dy[i, j])
            add_column_sums(dy32, ones[: dy32.shape[0]], sums=db[j], part=scratch["db"][j])


def _product(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool) -> None:
    """out += a b, or = a b; a wider out is CUDA's."""
    if out.dtype == a.dtype:
        out.addmm_(a, b) if accumulate else torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _half_fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scratch: Scratch) -> None:
    if _has_bf16_products():
        torch.mm(x, _in(scratch, "w16", w).t(), out=y)
        if b is not None:
            y.add_(_in(scratch, "b16", b))  # addmm(b, …) would copy b into y, and read it again
        return
    for i in blocks(x.shape[0], ROWS):
        x32 = _in(scratch, "x32", x[i])
        for j in blocks(w.shape[0], COLS):
            y32 = _tile(scratch["y32"], y[i, j])
            y32.zero_() if b is None else y32.copy_(b[j])
            y32.t().addmm_(_in(scratch, "w32", w[j]), x32.t())
            y[i, j].copy_(y32)


def _half_bwd(
    dy: Tensor, x: Tensor, w: Tensor, *, dx: Tensor | None, dw: Tensor | None, accumulate: bool, scratch: Scratch
) -> None:
    if _has_bf16_products():
        if dx is not None:
            torch.mm(dy, _in(scratch, "w16", w), out=dx)
        if dw is not None:
            for j in blocks(w.shape[0], COLS):
                dw16 = torch.mm(dy[:, j].t(), x, out=_tile(scratch["dw16"], w[j]))
                dw[j].add_(_in(scratch, "dw32", dw16)) if accumulate else dw[j].copy_(dw16)
        return
    if dw is not None and not accumulate and not dy.shape[0]:
        dw.zero_()
    for i in blocks(dy.shape[0], ROWS):
        x32, dx32 = _in(scratch, "x32", x[i]), _tile(scratch["dx32"], x[i]).zero_()
        for j in blocks(w.shape[0], COLS):
            dy32 = _in(scratch, "y32", dy[i, j])
            if dx is not None:
                dx32.addmm_(dy32, _in(scratch, "w32", w[j]))
            if dw is not None:
                _product(dy32.t(), x32, out=dw[j], accumulate=accumulate or i.start > 0)
        if dx is not None:
            dx[i].copy_(dx32)


def add_column_sums(x: Tensor, factors: Tensor, *, sums: Tensor, part: Tensor) -> None:
    """sums += Σ_n factors[n] x[n].       x (N, C)   factors (N,) of x's dtype   sums, part (C,)

    As a product, for `torch.sum(x, 0)` reads memory more slowly on a CPU, and on CUDA allocates up to half of x's size.
    On a CPU of few rows at a time: long running sums would lose digits.
    """
    if x.device.type == "cpu":
        for i in blocks(x.shape[0], ROWS):
            sums.add_(torch.mv(rows_of(x, i).t(), rows_of(factors, i), out=part))
    elif sums.dtype == x.dtype:
        sums[None].addmm_(factors[None], x)
    else:
        torch.addmm(sums[None], factors[None], x, out_dtype=sums.dtype, out=sums[None])


def _tile(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer.view(-1)[: like.numel()].view(like.shape)


def _in(scratch: Scratch, name: str, x: Tensor) -> Tensor:
    """x in the dtype of a buffer: its copy there, or x itself where the scratch needs no such buffer."""
    return _tile(scratch[name], x).copy_(x) if name in scratch else x


def per_head_linear_workspace(x: Any, w: Any, *, backward: bool) -> Shapes:
    """What `scratch` must hold: a head's, for heads follow one another."""
    return _workspace(x, w, *w.shape[1:], backward=backward)


@op()
def per_head_linear_fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scratch: Scratch | None = None) -> None:
    """y[:, h·D:(h+1)·D] = x[:, h·D:(h+1)·D] w[h]ᵀ + b[h]       x, y (N, H·D)   w (H, D, D) = (head, out, in)   b (H, D)"""
    _check_heads(x, w, b=b, y=y)
    d = w.shape[1]
    for h in range(w.shape[0]):
        own = slice(h * d, (h + 1) * d)
        linear_fwd(x[:, own], w[h], None if b is None else b[h], y=y[:, own], scratch=scratch)


@op(accumulates=("dw", "db"))
def per_head_linear_bwd(
    dy: Tensor, x: Tensor, w: Tensor, *,
    dx: Tensor | None = None, dw: Tensor | None = None, db: Tensor | None = None, accumulate: bool = True,
    scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """Each head's `linear_bwd`: dx overwrites, dw (H, D, D) and db (H, D) accumulate unless accumulate=False."""
    _check_heads(x, w, dy=dy, dx=dx, db=db)
    d = w.shape[1]
    for h in range(w.shape[0]):
        own = slice(h * d, (h + 1) * d)
        linear_bwd(
            dy[:, own], x[:, own], w[h],
            dx=None if dx is None else dx[:, own], dw=None if dw is None else dw[h], db=None if db is None else db[h],
            accumulate=accumulate, scratch=scratch,
        )  # fmt: skip


def _check_heads(x: Tensor, w: Tensor, **others: Tensor | None) -> None:
    if len(w.shape) != 3 or w.shape[1] != w.shape[2] or w.shape[0] * w.shape[1] != x.shape[1]:
        raise ValueError(f"w: got {tuple(w.shape)}; accepted: (H, D, D) with H·D = {x.shape[1]}, the columns of x")
    for name, other in others.items():
        shape = (w.shape[0], w.shape[1]) if name in ("b", "db") else tuple(x.shape)
        if other is not None and tuple(other.shape) != shape:
            raise ValueError(f"{name}: got {tuple(other.shape)}; accepted: {shape}")
