"""Layer norm and RMS norm over the last dimension.       x, y (N, C)   w, b (C,)   mean, rstd (N,)

    layer norm   mean = Σ_c x / C   rstd = 1 / √(Σ_c (x − mean)² / C + eps)   x̂ = (x − mean) ∘ rstd   y = x̂ ∘ w + b
    RMS norm     mean = 0           rstd = 1 / √(Σ_c x² / C + eps)            x̂ = x ∘ rstd            y = x̂ ∘ w

    residual     x1 = x + f, in x's dtype; then the norm of x1, in the same pass

    g = dy ∘ w   dx += rstd ∘ (g − Σ_c g / C − x̂ Σ_c (g ∘ x̂) / C)   (RMS norm: without Σ_c g)
    dw += Σ_n dy ∘ x̂   db += Σ_n dy   dx_sum += Σ_n dx      (accumulate=False: dw = …; dx is always accumulated)

dx accumulates because the norm is on a branch of the residual stream. The backward can also recompute y, with the same bits (y
may be dy), and write dx_sum, the column sum of the final dx. dx_sum is the bias gradient of the projection whose output was
last added to the stream. Statistics and sums are in the accumulation dtype (float32, float64 for float64); on a CPU w and b may
have that dtype too.

`NORM` is the table of kernels: each module offers `workspace`, `fwd` and `bwd`. In these functions, mean=None means RMS norm,
and f=None means a forward without residual.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_param, check_tensor
from ..cpu import rows
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import BACKWARD, FORWARD, Kernel, Problem, Table, Where, takes_all


class Outputs(NamedTuple):
    """Outputs of a forward: x1 and y (N, C), mean and rstd (N,); None: not computed."""

    x1: Tensor | None
    y: Tensor
    mean: Tensor | None
    rstd: Tensor


class Statistics(NamedTuple):
    """Statistics of a forward that its backward reads, (N,) each; mean=None: RMS norm."""

    mean: Tensor | None
    rstd: Tensor


class Gradients(NamedTuple):
    """Outputs of a backward: dx and y (N, C), the others (C,). An output that is None is not computed."""

    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None
    dx_sum: Tensor | None
    y: Tensor | None
    accumulate: bool


MOST_COLUMNS = 16384  # most columns: the Triton kernels keep a row in registers


def _triton_refuses(problem: Problem) -> str | None:
    refusal = gpu.refusal(problem.x)
    if refusal is None and problem.x.shape[1] > MOST_COLUMNS:
        return f"keeps a row in registers: takes up to {MOST_COLUMNS} columns, not {problem.x.shape[1]}"
    return refusal


NORM = Table(
    "norm",
    (
        Kernel("native", "norm.cpu", lambda problem: rows.refusal(problem.x)),
        Kernel("triton", "norm.triton_ops", _triton_refuses),
        Kernel("torch", "norm.torch_ops", takes_all),
    ),
)


def norm_workspace(x: TensorLike, *, backward: bool, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch of layer norm or RMS norm."""
    return NORM.workspace(Problem(x), kernel=kernel, backward=backward)


@op(one_kernel=True)
def layernorm_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, f: Tensor | None = None, *,
    x1: Tensor | None = None, y: Tensor, mean: Tensor, rstd: Tensor, **where: Unpack[Where],
) -> None:  # fmt: skip
    """Writes y, mean and rstd; with f first x1 = x + f, whose norm y is. x1 may be x."""
    _fwd(x, f, w, b, eps, where, Outputs(x1, y, mean, rstd))


@op(adds=("dx",), accumulates=("dw", "db", "dx_sum"))
def layernorm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, b: Tensor | None = None, *,
    dx: Tensor | None = None, dw: Tensor | None = None, db: Tensor | None = None, dx_sum: Tensor | None = None,
    y: Tensor | None = None, accumulate: bool = True, **where: Unpack[Where],
) -> None:  # fmt: skip
    """dx += …   dw += Σ_n dy ∘ x̂   db += Σ_n dy   dx_sum += Σ_n dx   y = x̂ ∘ w + b; y may be dy"""
    _bwd(dy, x, w, b, Statistics(mean, rstd), where, Gradients(dx, dw, db, dx_sum, y, accumulate))


@op(one_kernel=True)
def rmsnorm_fwd(
    x: Tensor, w: Tensor, eps: float, f: Tensor | None = None, *,
    x1: Tensor | None = None, y: Tensor, rstd: Tensor, **where: Unpack[Where],
) -> None:  # fmt: skip
    """Writes y and rstd; with f first x1 = x + f, whose norm y is. x1 may be x."""
    _fwd(x, f, w, None, eps, where, Outputs(x1, y, None, rstd))


@op(adds=("dx",), accumulates=("dw", "dx_sum"))
def rmsnorm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, *,
    dx: Tensor | None = None, dw: Tensor | None = None, dx_sum: Tensor | None = None, y: Tensor | None = None,
    accumulate: bool = True, **where: Unpack[Where],
) -> None:  # fmt: skip
    """dx += …   dw += Σ_n dy ∘ x̂   dx_sum += Σ_n dx   y = x̂ ∘ w; y may be dy"""
    _bwd(dy, x, w, None, Statistics(None, rstd), where, Gradients(dx, dw, None, dx_sum, y, accumulate))


def _fwd(x: Tensor, f: Tensor | None, w: Tensor, b: Tensor | None, eps: float, where: Where, out: Outputs) -> None:
    if not eps > 0.0:
        raise ValueError(f"eps: got {eps!r}; accepted: a number > 0")
    _check(x, out.mean, out.rstd, w, b, y=out.y, f=f, x1=out.x1)
    NORM.run("fwd", Problem(x), x, f, w, b, eps, options=FORWARD, out=out, **where)


def _bwd(
    dy: Tensor, x: Tensor, w: Tensor, b: Tensor | None, statistics: Statistics, where: Where, out: Gradients
) -> None:
    _check(x, *statistics, w, b, dy=dy, dx=out.dx, y=out.y)
    if out.dx_sum is not None and out.dx is None:
        raise ValueError("dx_sum: got a tensor but dx is None; accepted: None, or both dx and dx_sum")
    for name, grad in (("dw", out.dw), ("db", out.db), ("dx_sum", out.dx_sum)):
        if grad is not None:
            check_tensor(name, grad, (x.shape[1],), accumulation_dtype(x.dtype), x.device)
            check_columns(name, grad)
    NORM.run("bwd", Problem(x), dy, x, w, b, statistics, options=BACKWARD, out=out, **where)


def _check(x: Tensor, mean: Tensor | None, rstd: Tensor, w: Tensor, b: Tensor | None, **others: Tensor | None) -> None:
    n, c = x.shape
    check_param("w", w, (c,), x)
    check_columns("w", w)
    if b is not None:
        check_tensor("b", b, (c,), w.dtype, x.device)
        check_columns("b", b)
    for name, other in (("x", x), *others.items()):
        if other is not None:
            check_tensor(name, other, (n, c), x.dtype, x.device)
            check_columns(name, other)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if statistic is not None:
            check_tensor(name, statistic, (n,), accumulation_dtype(x.dtype), x.device)
            check_columns(name, statistic)
