"""Products of rank r next to a linear layer.     x (N, Cin)   w (Cout, Cin)   a (P·r, Cin)   b_i (width_i, r)   u, du (N, P·r)

    u = s x aᵀ           y = x wᵀ + b,  then y_i += u_i b_iᵀ             u_i: r columns of u      y_i: width_i columns of y
    du_i = s dy_i b_i    db_i += dy_iᵀ u_i    dx = dy w + du a    da += duᵀ x          (accumulate=False: db_i = dy_iᵀ u_i)

u and du include the scale s, so no other product applies it. A part says where its columns begin: `Part(0, 16, 128)` has the
columns u[:, 16 : 16 + r], and the columns 128 to 128 + width of output 0. A w (H, D, D) is one matrix per head. `linear`
computes all products except du, db and da, which read all of dy or x for a small result. `LOW_RANK` is the table of kernels for
these: each module offers `workspace`, `bwd` and `bwd_a`.

A product of rank r does few FLOPs but reads and writes all of y. If y is much wider than x, one product of joined matrices
moves less memory, because joining copies only x and w:

    y = [x, u] [w, b_i]ᵀ + b          dx = [dy, du] [w; a]          b_i is in rows y_i and columns u_i; the rest is 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_param, check_tensor
from ..linear import linear_bwd_input, linear_fwd, linear_workspace, per_head_linear_bwd_input, per_head_linear_fwd
from ..op import op
from ..scratch import Form, Scratch, Shapes, TensorLike, accumulation_dtype, larger
from ..table import Where

MOST_RANKS = 64  # the most columns of u in Triton, which keeps a tile of db in registers


class Problem(NamedTuple):
    """A call of the table: (dy, u, b) of one part, or (x, du, a).      wide (N, width)   thin (N, r)"""

    wide: TensorLike
    thin: TensorLike
    w: TensorLike


def _triton_refuses(problem: Problem) -> str | None:
    r = problem.thin.shape[1]
    too_many = f"keeps a tile of db in registers: takes up to {MOST_RANKS} columns of u, not {r}"
    return gpu.refusal(problem.wide) or (too_many if r > MOST_RANKS else None)


LOW_RANK = gpu.triton_else_torch("low_rank", _triton_refuses)


class Part(NamedTuple):
    """The place of a part: the index of its output, and its first column in u and in that output."""

    output: int
    rank_start: int
    start: int


def joins(w: TensorLike, dtype: torch.dtype, inputs: int, outputs: int) -> bool:
    """Whether one product of joined matrices moves less memory than two products. Joining copies the inputs; a second product
    reads and writes the outputs. The number of rows is not considered, so that every batch runs the same ops. On a CPU w may
    have another dtype than x; such matrices are not joined."""
    return len(w.shape) == 2 and w.dtype == dtype and outputs >= 2 * inputs


def low_rank_workspace(
    x: TensorLike, a: TensorLike, bs: Sequence[TensorLike], *, backward: bool, kernel: str | None = None
) -> Shapes:
    """Name → (shape, dtype) of the scratch of the products with a and b_i; base layers have their own scratch."""
    n, dtype, device = x.shape[0], x.dtype, x.device
    if backward:
        forms = [[Form((n, size), dtype, device) for size in b.shape] for b in bs]
        problems = [Problem(dy, u, b) for (dy, u), b in zip(forms, bs, strict=True)]
        problem_a = Problem(x, Form((n, a.shape[0]), dtype, device), a)
        scratch = larger(
            LOW_RANK.workspace(problem_a, kernel=kernel, du=False),
            LOW_RANK.workspace(*problems, kernel=kernel, du=True),
        )
        return linear_workspace(x, a, backward=True, bias=False) | scratch
    shapes = linear_workspace(x, a, backward=False, bias=False)
    for b in bs:
        y, transposed = Form((n, b.shape[0]), dtype, device), Form((b.shape[1], b.shape[0]), b.dtype, device)
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
    check_tensor("u", u, (x.shape[0], u.shape[1]), x.dtype, x.device)
    check_tensor("joined", joined, (x.shape[0], x.shape[1] + u.shape[1]), x.dtype, x.device)
    _copy(x, joined[:, : x.shape[1]])
    _copy(u, joined[:, x.shape[1] :])


@op()
def joined_linear_fwd(
    xu: Tensor, w: Tensor, b: Tensor | None, bs: list[Tensor], parts: tuple[Part, ...], *, y: Tensor, wb: Tensor
) -> None:
    """y = xu · wbᵀ + b with xu = [x, u] and wb = [w, b_i]; overwrites wb"""
    check_tensor("wb", wb, (w.shape[0], xu.shape[1]), w.dtype, w.device)
    inputs = w.shape[1]
    _check(xu[:, inputs:], bs, parts, [y], "y")
    _copy(w, wb[:, :inputs])
    wb[:, inputs:].zero_()
    for at, b_i in zip(parts, bs, strict=True):
        width, r = b_i.shape
        first = inputs + at.rank_start
        wb[at.start : at.start + width, first : first + r].copy_(b_i)
    linear_fwd(xu, wb, b, y=y)


@op()
def joined_linear_bwd_input(
    dy: Tensor, w: Tensor, du: Tensor, a: Tensor, *, dx: Tensor, joined: Tensor, wa: Tensor
) -> None:
    """dx = joined · wa with joined = [dy, du] and wa = [w; a]; overwrites joined and wa"""
    rows = w.shape[0]
    check_tensor("wa", wa, (rows + a.shape[0], w.shape[1]), w.dtype, w.device)
    join_fwd(dy, du, joined=joined)
    wa[:rows].copy_(w)
    wa[rows:].copy_(a)
    linear_bwd_input(joined, wa, dx=dx, accumulate=False)


def _copy(x: Tensor, y: Tensor) -> None:
    """y = x, eight bytes at a time, which is twice as fast on a GPU as two bytes at a time. Rows are contiguous."""
    per_word = 8 // x.element_size()
    sizes = (x.shape[1], x.stride(0), y.stride(0), x.storage_offset(), y.storage_offset())
    if per_word > 1 and not any(size % per_word for size in sizes):
        x, y = x.view(torch.int64), y.view(torch.int64)
    y.copy_(x)


@op(accumulates=("dbs",))
def low_rank_bwd(
    dys: list[Tensor], u: Tensor, bs: list[Tensor], parts: tuple[Part, ...], scale: float, *,
    du: Tensor, dbs: list[Tensor | None], accumulate: bool = True, **where: Unpack[Where],
) -> None:  # fmt: skip
    """du_i = scale · dy_i b_i   db_i += dy_iᵀ u_i; a db_i that is None is not computed"""
    _check(u, bs, parts, dys, "dys")
    check_tensor("du", du, tuple(u.shape), u.dtype, u.device)
    columns = zip(_columns(u, bs, parts, dys), _columns(du, bs, parts, dys), bs, dbs, strict=True)
    for (ui, dy), (dui, _), b, db in columns:
        if db is not None:
            check_tensor("dbs", db, tuple(b.shape), accumulation_dtype(u.dtype), u.device)
        given = dy, ui, b, scale
        writes = {"du": dui, "db": db, "accumulate": accumulate}
        LOW_RANK.run("bwd", Problem(dy, ui, b), *given, options={"du": True}, **writes, **where)


@op(accumulates=("da",))
def low_rank_bwd_a(
    du: Tensor, x: Tensor, a: Tensor, *, da: Tensor, accumulate: bool = True, **where: Unpack[Where]
) -> None:
    """da += duᵀ x; accumulate=False: da = duᵀ x. The values of a are not used."""
    check_tensor("du", du, (x.shape[0], a.shape[0]), x.dtype, x.device)
    check_param("a", a, (a.shape[0], x.shape[1]), x)
    check_tensor("da", da, tuple(a.shape), accumulation_dtype(x.dtype), x.device)
    for name, given in (("du", du), ("x", x), ("da", da)):
        check_columns(name, given)
    options = {"du": False}
    LOW_RANK.run("bwd_a", Problem(x, du, a), du, x, a, options=options, da=da, accumulate=accumulate, **where)


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
    for i, (at, b) in enumerate(zip(parts, bs, strict=True)):
        (width, r), y = b.shape, outputs[at.output]
        check_param(f"bs[{i}]", b, (width, r), u)
        check_columns(f"{name}[{at.output}]", y)
        check_tensor(f"{name}[{at.output}]", y, (u.shape[0], y.shape[1]), u.dtype, u.device)
        if at.rank_start + r > u.shape[1] or at.start + width > y.shape[1]:
            raise ValueError(
                f"parts: got {at} with b {tuple(b.shape)}; accepted: columns inside u {tuple(u.shape)} and "
                f"{name}[{at.output}] {tuple(y.shape)}"
            )
