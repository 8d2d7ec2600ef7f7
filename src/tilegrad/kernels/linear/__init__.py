"""y = x wᵀ + b, with one matrix for all columns or one matrix per head.

    x (N, Cin)   w (Cout, Cin)   b (Cout,)   y (N, Cout)
    dx = dy w    dw += dyᵀ x     db += Σ_n dy              accumulate=False: dw = dyᵀ x, db = Σ_n dy
    scale=s: y = s x wᵀ, dx = s dy w                       only without b, and with accumulate=False

`linear_bwd_input` computes dx, and may add to it. `linear_bwd_weight` computes dw and db. Rows may be strided, columns must be
contiguous. For bfloat16, dw and db are float32. On a CPU w and b may be float32 too. On CUDA y may be float32 (the logits of a
loss). db is computed by `column_sum`, which has its own table.

invariant=True: the bits of a row of y depend only on that row of x, on w and on b, not on the other rows, their number or the
number of threads. The order in which a BLAS adds depends on the number of rows, so only kernels with a fixed order take such a
problem.

`LINEAR` is the table of kernels: each module offers `workspace` and `fwd` and, if it takes a problem with backward=True,
`bwd_input` and `bwd_weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_given, check_param, check_tensor
from ..column_sum import COLUMN_SUM, column_sum_workspace
from ..cpu import library, rows
from ..op import op
from ..scratch import Form, Shapes, TensorLike, accumulation_dtype, below, of
from ..table import Kernel, Table, Where
from ..table import Problem as SumProblem

NO_BIAS, BIAS = {"bias": False}, {"bias": True}  # options of a `workspace`
FEW_ROWS = 12  # up to this many rows fixed_order is faster than a BLAS, which copies w, or reads it slowly for one row
FEW_ROWS_BFLOAT16 = 64  # the limit instead if BLAS needs float32 copies of bfloat16 tiles; measured on x86 only
FEW_ROWS_ELEMENTS = 1 << 16  # both limits hold only if w has this many elements: a smaller w is in the caches
FEW_ROWS_ON_CUDA = 4  # up to this many rows few_rows is faster than cuBLAS


class Problem(NamedTuple):
    """The properties of a product that decide which kernels accept it: shapes, dtypes, and the device of x. invariant: the bits
    of a row of y must not depend on other rows of x. backward: the product is dx or dw."""

    x: TensorLike
    w: TensorLike
    invariant: bool = False
    backward: bool = False


@cache
def _has_bf16_products() -> bool:
    """Whether the CPU has bf16 instructions. oneDNN multiplies bfloat16 with AVX-512 alone too, but 2.5 times slower than
    `tiled`."""
    without = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not without


def _bf16_on_cpu(x: TensorLike) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu"


def _by_rows(problem: Problem) -> str | None:
    other_order = "adds in an order that depends on the number of rows, and the problem is invariant"
    return other_order if problem.invariant else None


def _native_refuses(problem: Problem) -> str | None:
    x, w, *_ = problem
    if x.dtype != torch.float32:
        return "takes float32 only"
    if min(*x.shape, *w.shape[-2:]) < 2:
        return "takes matrices, not vectors: BLAS multiplies vectors by another function"
    reason_or_blas = rows.refusal(x) or library.blas()
    return reason_or_blas if isinstance(reason_or_blas, str) else _by_rows(problem)


def _torch_refuses(problem: Problem) -> str | None:
    reason = "does not take bfloat16 on a CPU: torch's product there can't write float32"
    return reason if _bf16_on_cpu(problem.x) else _by_rows(problem)


def _tiled_refuses(problem: Problem) -> str | None:
    return _by_rows(problem) if _bf16_on_cpu(problem.x) else "is for bfloat16 on a CPU"


def _bf16_refuses(problem: Problem) -> str | None:
    without = "needs a CPU with bf16 instructions: without them torch's product is 2 to 100 times slower"
    return _tiled_refuses(problem) or (None if _has_bf16_products() else without)


def _few_rows(x: TensorLike, w: TensorLike) -> bool:
    """Whether fixed_order is the fastest kernel."""
    large = w.shape[-2] * w.shape[-1] >= FEW_ROWS_ELEMENTS
    return x.shape[0] <= _most_few_rows(x) and large and w.dtype == x.dtype


def _most_few_rows(x: TensorLike) -> int:
    return FEW_ROWS_BFLOAT16 if _bf16_on_cpu(x) and not _has_bf16_products() else FEW_ROWS


def _fixed_order_refuses(problem: Problem) -> str | None:
    x, w, invariant, backward = problem
    if backward:
        return "has the forward only"
    if not invariant and not _few_rows(x, w):
        return f"is for invariant problems, and for up to {_most_few_rows(x)} rows with a large w of x's dtype"
    return _strided_columns(x, w) or rows.refusal(x)


def _strided_columns(*matrices: TensorLike) -> str | None:
    strided = any(isinstance(each, Tensor) and each.stride(-1) != 1 and each.shape[-1] > 1 for each in matrices)
    return "takes x and w with contiguous columns" if strided else None


def _few_rows_refuses(problem: Problem) -> str | None:
    x, w, _, backward = problem
    if backward:
        return "has the forward only"
    if not 1 <= x.shape[0] <= FEW_ROWS_ON_CUDA:
        return f"is for up to {FEW_ROWS_ON_CUDA} rows"
    if w.dtype != x.dtype:
        return f"takes a w of x's dtype, {x.dtype}, not {w.dtype}"
    return _by_rows(problem) or _strided_columns(x, w) or gpu.refusal(x)


def _triton_refuses(problem: Problem) -> str | None:
    x, w, invariant, backward = problem
    if backward or not invariant:
        return "is for invariant problems only, which have no backward"
    if w.dtype != x.dtype:
        return f"takes a w of x's dtype, {x.dtype}, not {w.dtype}"
    return _strided_columns(x, w) or gpu.refusal(x)


def _torch_fixed_order_refuses(problem: Problem) -> str | None:
    if problem.backward or not problem.invariant:
        return "is for invariant problems only, which have no backward"
    if problem.x.device.type != "cpu":
        return f"runs on the CPU, not on {problem.x.device.type}"
    return None


LINEAR = Table(
    "linear",
    (
        Kernel("fixed_order", "linear.fixed_order", _fixed_order_refuses),
        Kernel("native", "linear.cpu", _native_refuses),
        Kernel("few_rows", "linear.few_rows", _few_rows_refuses),
        Kernel("torch", "linear.torch_ops", _torch_refuses),
        Kernel("bf16", "linear.bf16", _bf16_refuses),
        Kernel("tiled", "linear.tiled", _tiled_refuses),
        Kernel("triton", "linear.triton_ops", _triton_refuses),
        Kernel("torch_fixed_order", "linear.torch_fixed_order", _torch_fixed_order_refuses),
    ),
)


def linear_workspace(
    x: TensorLike,
    w: TensorLike,
    *,
    backward: bool,
    bias: bool = True,
    invariant: bool = False,
    kernel: str | None = None,
) -> Shapes:
    """Name → (shape, dtype) of the scratch. It is enough for fewer rows too, for which the table may select `fixed_order`.
    For w (H, D, D) this is the scratch of one head, because heads run one by one."""
    problem = Problem(x, w, invariant and not backward, backward)
    few = problem._replace(x=Form((min(x.shape[0], FEW_ROWS_BFLOAT16), x.shape[1]), x.dtype, x.device))
    shapes = LINEAR.workspace(problem, few, kernel=kernel, bias=bias)
    if backward and bias:
        dy = Form((x.shape[0], w.shape[-2]), x.dtype, x.device)
        shapes |= below("column_sum", column_sum_workspace(dy))
    return shapes


def rounds_weights(x: TensorLike, w: TensorLike) -> bool:
    """Whether each product rounds a float32 w to x's dtype into scratch. A caller with many products of one w should round it
    once."""
    return w.dtype != x.dtype and LINEAR.select(Problem(x, w, backward=True)).name == "bf16"


@op(one_kernel=True)
def linear_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float = 1.0, invariant: bool = False,
    **where: Unpack[Where],
) -> None:  # fmt: skip
    """y = x wᵀ + b, or y = scale · x wᵀ. On CUDA y may be float32 for a bfloat16 x, but only without b and scale."""
    (n, cin), cout = x.shape, w.shape[0]
    check_param("w", w, (cout, cin), x)
    if b is not None:
        check_param("b", b, (cout,), x)
    writes_float32 = b is None and x.device.type != "cpu" and y.dtype == accumulation_dtype(x.dtype)
    check_tensor("y", y, (n, cout), y.dtype if writes_float32 else x.dtype, x.device)
    _check_scale(scale, alone=b is None and y.dtype == x.dtype)
    options = NO_BIAS if b is None else BIAS
    LINEAR.run("fwd", Problem(x, w, invariant), x, w, b, options=options, y=y, scale=scale, **where)


@op(accumulates=("dx",))
def linear_bwd_input(
    dy: Tensor, w: Tensor, *, dx: Tensor, accumulate: bool, scale: float = 1.0, **where: Unpack[Where]
) -> None:
    """dx = dy w, or dx += dy w if accumulate is True, or dx = scale · dy w."""
    check_param("w", w, (dy.shape[1], dx.shape[1]), dy)
    check_tensor("dx", dx, (dy.shape[0], w.shape[1]), dy.dtype, dy.device)
    _check_scale(scale, alone=not accumulate)
    problem = Problem(dx, w, backward=True)
    LINEAR.run("bwd_input", problem, dy, w, options=NO_BIAS, dx=dx, accumulate=accumulate, scale=scale, **where)


@op(accumulates=("dw", "db"))
def linear_bwd_weight(
    dy: Tensor, x: Tensor, w: Tensor, *,
    dw: Tensor | None = None, db: Tensor | None = None, accumulate: bool = True, **where: Unpack[Where],
) -> None:  # fmt: skip
    """dw += dyᵀ x   db += Σ_n dy; accumulate=False: dw and db are overwritten. Only the shape and dtype of w are used."""
    (n, cin), cout, acc = x.shape, w.shape[0], accumulation_dtype(x.dtype)
    check_param("w", w, (cout, cin), x)
    check_tensor("dy", dy, (n, cout), x.dtype, x.device)
    check_given(x.device, ("dw", dw, (cout, cin), acc), ("db", db, (cout,), acc))
    if db is not None:
        check_columns("dy", dy)
        check_columns("db", db)
        scratch = of("column_sum", where.get("scratch") or {})
        COLUMN_SUM.run("fwd", SumProblem(dy), dy, sums=db, accumulate=accumulate, scratch=scratch)
    if dw is not None:
        problem = Problem(x, w, backward=True)
        LINEAR.run("bwd_weight", problem, dy, x, options=NO_BIAS, dw=dw, accumulate=accumulate, **where)


@op()
def per_head_linear_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, invariant: bool = False, **where: Unpack[Where]
) -> None:
    """y[:, h·D:(h+1)·D] = x[:, h·D:(h+1)·D] w[h]ᵀ + b[h]       x, y (N, H·D)   w (H, D, D) = (head, out, in)   b (H, D)"""
    _check_heads(x, w, b=b, y=y)
    for h, columns in _heads(w):
        linear_fwd(x[:, columns], w[h], None if b is None else b[h], y=y[:, columns], invariant=invariant, **where)


@op(accumulates=("dx",))
def per_head_linear_bwd_input(dy: Tensor, w: Tensor, *, dx: Tensor, accumulate: bool, **where: Unpack[Where]) -> None:
    """`linear_bwd_input` of each head."""
    _check_heads(dy, w, dx=dx)
    for h, columns in _heads(w):
        linear_bwd_input(dy[:, columns], w[h], dx=dx[:, columns], accumulate=accumulate, **where)


@op(accumulates=("dw", "db"))
def per_head_linear_bwd_weight(
    dy: Tensor, x: Tensor, w: Tensor, *,
    dw: Tensor | None = None, db: Tensor | None = None, accumulate: bool = True, **where: Unpack[Where],
) -> None:  # fmt: skip
    """`linear_bwd_weight` of each head."""
    _check_heads(x, w, dy=dy, db=db)
    for h, columns in _heads(w):
        dw_h, db_h = (None if grad is None else grad[h] for grad in (dw, db))
        linear_bwd_weight(dy[:, columns], x[:, columns], w[h], dw=dw_h, db=db_h, accumulate=accumulate, **where)


def _check_scale(scale: float, *, alone: bool) -> None:
    if scale != 1.0 and not alone:
        raise ValueError(f"scale: got {scale!r} with b, accumulate or a float32 output; accepted: 1.0 with these")


def _heads(w: Tensor) -> Iterator[tuple[int, slice]]:
    """(head, its columns) for each head."""
    d = w.shape[1]
    return ((h, slice(h * d, (h + 1) * d)) for h in range(w.shape[0]))


def _check_heads(x: Tensor, w: Tensor, **others: Tensor | None) -> None:
    if len(w.shape) != 3 or w.shape[1] != w.shape[2] or w.shape[0] * w.shape[1] != x.shape[1]:
        raise ValueError(f"w: got {tuple(w.shape)}; accepted: (H, D, D) with H·D = {x.shape[1]}, the columns of x")
    for name, other in others.items():
        shape = (w.shape[0], w.shape[1]) if name in ("b", "db") else tuple(x.shape)
        if other is not None and tuple(other.shape) != shape:
            raise ValueError(f"{name}: got {tuple(other.shape)}; accepted: {shape}")
