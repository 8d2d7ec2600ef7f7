"""Products of rank r next to a linear layer.     x (N, Cin)   w (Cout, Cin)   a (P·r, Cin)   b_i (width_i, r)   u, du (N, P·r)

    u = s x aᵀ           y = x wᵀ + b,  then y_i += u_i b_iᵀ             u_i: r columns of u      y_i: width_i columns of y
    du_i = s dy_i b_i    db_i += dy_iᵀ u_i    dx = dy w + du a    da += duᵀ x          (accumulate=False: db_i = dy_iᵀ u_i)

The scale s is in u and in du, so no other product has it. u, du a and da are ops of `linear`. A part says where its columns
begin: `Part(0, 16, 128)` is u[:, 16 : 16 + r], and columns 128 to 128 + width of the first of several outputs.
All products are those of `linear`; a w (H, D, D) is one matrix per head.

A product of rank r does few FLOPs and reads and writes all of y. Where y is much wider than x, one product of joined matrices
moves less memory, because only x and w are copied:

    y = [x, u] [w, b_i]ᵀ + b          dx = [dy, du] [w; a]          b_i is in the columns of u_i, and 0 is in the others'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_tensor
from .linear import (
    linear_bwd_input,
    linear_bwd_weight,
    linear_fwd,
    linear_workspace,
    per_head_linear_bwd_input,
    per_head_linear_fwd,
)
from .op import op
from .scratch import Form, Scratch, Shapes, TensorLike, larger


class Part(NamedTuple):
    """Where a part is: the index of its output, and the first of its columns in u and in that output."""

    output: int
    rank_start: int
    start: int


def joins(x: TensorLike, w: TensorLike, outputs: int) -> bool:
    """Whether joined matrices move less memory, in a product of x and w with so many columns: the copies read and write x and
    w, and a second product reads and writes the output. On a CPU w may have another dtype than x, and then it is not copied."""
    n, inputs = x.shape
    return len(w.shape) == 2 and w.dtype == x.dtype and (n + outputs) * inputs < n * outputs


def low_rank_workspace(x: TensorLike, a: TensorLike, bs: Sequence[TensorLike], *, backward: bool) -> Shapes:
    """Name → (shape, dtype) of the scratch of the products with a and b_i; a base layer has its own."""
    shapes = linear_workspace(x, a, backward=backward, bias=False)
    if backward:
        shapes = larger(shapes, linear_workspace(x, a, backward=False, bias=False))
    for b in bs:
        width, r = b.shape
        shapes = larger(
            shapes, linear_workspace(Form((x.shape[0], r), x.dtype, x.device), b, backward=True, bias=False)
        )
        y, transposed = Form((x.shape[0], width), x.dtype, x.device), Form((r, width), b.dtype, x.device)
        shapes = larger(shapes, linear_workspace(y, transposed, backward=True, bias=False))
    return shapes


@op(adds=("ys",))
def low_rank_add_fwd(
    u: Tensor, bs: list[Tensor], parts: tuple[Part, ...], *, ys: list[Tensor], scratch: Scratch | None = None
) -> None:
    """y_i += u_i b_iᵀ"""
    _check(u, bs, parts, ys, "ys")
    for (ui, y), b in zip(_columns(u, bs, parts, ys), bs, strict=True):
        linear_bwd_input(ui, b.t(), dx=y, accumulate=True, scratch=scratch)


@op()
def low_rank_linear_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, u: Tensor, bs: list[Tensor], parts: tuple[Part, ...], *,
    y: Tensor, base_scratch: Scratch | None = None, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """y = x wᵀ + b, then y_i += u_i b_iᵀ"""
    (linear_fwd if len(w.shape) == 2 else per_head_linear_fwd)(x, w, b, y=y, scratch=base_scratch)
    low_rank_add_fwd(u, bs, parts, ys=[y], scratch=scratch)


@op()
def join_fwd(x: Tensor, u: Tensor, *, joined: Tensor) -> None:
    """joined = [x, u]"""
    check_tensor("joined", joined, (x.shape[0], x.shape[1] + u.shape[1]), x.dtype, x.device)
    _copy(x, joined[:, : x.shape[1]])
    _copy(u, joined[:, x.shape[1] :])


@op()
def joined_linear_fwd(
    xu: Tensor, w: Tensor, b: Tensor | None, bs: list[Tensor], parts: tuple[Part, ...], *, y: Tensor, wb: Tensor
) -> None:
    """y = [x, u] [w, b_i]ᵀ + b; overwrites wb with the second matrix"""
    check_tensor("wb", wb, (w.shape[0], xu.shape[1]), w.dtype, w.device)
    inputs = w.shape[1]
    _copy(w, wb[:, :inputs])
    wb[:, inputs:].zero_()
    for at, own in zip(parts, bs, strict=True):
        width, r = own.shape
        first = inputs + at.rank_start
        wb[at.start : at.start + width, first : first + r].copy_(own)
    linear_fwd(xu, wb, b, y=y)


@op()
def joined_linear_bwd_input(
    dy: Tensor, w: Tensor, du: Tensor, a: Tensor, *, dx: Tensor, joined: Tensor, wa: Tensor
) -> None:
    """dx = [dy, du] [w; a]; overwrites joined and wa with these matrices"""
    rows = w.shape[0]
    check_tensor("wa", wa, (rows + a.shape[0], w.shape[1]), w.dtype, w.device)
    join_fwd(dy, du, joined=joined)
    wa[:rows].copy_(w)
    wa[rows:].copy_(a)
    linear_bwd_input(joined, wa, dx=dx, accumulate=False)


def _copy(x: Tensor, y: Tensor) -> None:
    """y = x, whose rows are contiguous: eight bytes at a time, which is twice as fast on a GPU as two."""
    wide = 8 // x.element_size()
    sizes = (x.shape[1], x.stride(0), y.stride(0), x.storage_offset(), y.storage_offset())
    if wide > 1 and not any(size % wide for size in sizes):
        x, y = x.view(torch.int64), y.view(torch.int64)
    y.copy_(x)


@op(accumulates=("dbs",))
def low_rank_bwd(
    dys: list[Tensor], u: Tensor, bs: list[Tensor], parts: tuple[Part, ...], scale: float, *,
    du: Tensor, dbs: list[Tensor | None], accumulate: bool = True, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """du_i = scale · dy_i b_i   db_i += dy_iᵀ u_i; a db_i that is None is not computed"""
    _check(u, bs, parts, dys, "dys")
    check_tensor("du", du, tuple(u.shape), u.dtype, u.device)
    for (ui, dy), (dui, _), b, db in zip(
        _columns(u, bs, parts, dys), _columns(du, bs, parts, dys), bs, dbs, strict=True
    ):
        linear_bwd_input(dy, b, dx=dui, accumulate=False, scale=scale, scratch=scratch)
        if db is not None:
            linear_bwd_weight(dy, ui, b, dw=db, accumulate=accumulate, scratch=scratch)


@op(accumulates=("dx",))
def low_rank_linear_bwd_input(
    dy: Tensor, w: Tensor, du: Tensor, a: Tensor, *,
    dx: Tensor, accumulate: bool, base_scratch: Scratch | None = None, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """dx = dy w + du a, or dx += dy w + du a if accumulate is True"""
    base = linear_bwd_input if len(w.shape) == 2 else per_head_linear_bwd_input
    base(dy, w, dx=dx, accumulate=accumulate, scratch=base_scratch)
    linear_bwd_input(du, a, dx=dx, accumulate=True, scratch=scratch)


def _columns(
    u: Tensor, bs: list[Tensor], parts: tuple[Part, ...], outputs: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """(u_i, y_i) of each part."""
    return [
        (u[:, at.rank_start : at.rank_start + b.shape[1]], outputs[at.output][:, at.start : at.start + b.shape[0]])
        for at, b in zip(parts, bs, strict=True)
    ]


def _check(u: Tensor, bs: list[Tensor], parts: tuple[Part, ...], outputs: list[Tensor], name: str) -> None:
    for at, b in zip(parts, bs, strict=True):
        (width, r), y = b.shape, outputs[at.output]
        check_tensor(f"{name}[{at.output}]", y, (u.shape[0], y.shape[1]), u.dtype, u.device)
        if at.rank_start + r > u.shape[1] or at.start + width > y.shape[1]:
            raise ValueError(
                f"parts: got {at} with b {tuple(b.shape)}; accepted: columns inside u {tuple(u.shape)} and "
                f"{name}[{at.output}] {tuple(y.shape)}"
            )
