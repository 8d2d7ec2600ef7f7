"""Layer norm and RMS norm over the last dimension.       x, y (N, C)   w, b (C,)   mean, rstd (N,)

    layer norm   mean = Σ_c x / C   rstd = 1 / √(Σ_c (x − mean)² / C + eps)   x̂ = (x − mean) ∘ rstd   y = x̂ ∘ w + b
    RMS norm     mean = 0           rstd = 1 / √(Σ_c x² / C + eps)            x̂ = x ∘ rstd            y = x̂ ∘ w

    residual     x1 = x + f, in x's dtype; then the norm of x1, in the same pass

    g = dy ∘ w   dx += rstd ∘ (g − Σ_c g / C − x̂ Σ_c (g ∘ x̂) / C)   (RMS norm: without Σ_c g)
    dw += Σ_n dy ∘ x̂   db += Σ_n dy   dx_sum += Σ_n dx      (accumulate=False: dw = …; dx is added to all the same)

dx is added to, for the norm stands on a branch of the residual stream. The backward forms two things more where they are
asked for: y once more, to the same bits, which may take the place of dy; and dx_sum, the column sum of the dx it leaves, the
bias gradient of the projection that the stream below got its last branch from. Statistics and sums are in the accumulation
dtype (float32, float64 for float64); on a CPU w and b may both have it too. `NORM` is the table of kernels: each module
offers `workspace`, `fwd` and `bwd`, in which an RMS norm is mean=None, and a forward without a residual f=None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_param, check_tensor
from ..cpu import rows
from ..op import op
from ..scratch import Scratch, Shapes, accumulation_dtype, views
from ..table import Kernel, Table, takes_all


class Problem(NamedTuple):
    """A norm as the table sees it: the shape, dtype and device of x."""

    x: Any


MOST_COLUMNS = 16384  # of a row that Triton's kernels hold in registers


def _triton_refuses(problem: Problem) -> str | None:
    refusal = gpu.refusal(problem.x)
    if refusal is None and problem.x.shape[1] > MOST_COLUMNS:
        return f"holds a row in registers, up to {MOST_COLUMNS} columns, not {problem.x.shape[1]}"
    return refusal


NORM = Table(
    "norm",
    (
        Kernel("native", "norm.cpu", lambda problem: rows.refusal(problem.x)),
        Kernel("triton", "norm.triton_ops", _triton_refuses),
        Kernel("torch", "norm.torch_ops", takes_all),
    ),
)


def norm_workspace(x: Any, *, backward: bool, kernel: str | None = None) -> Shapes:
    """Of layer norm and RMS norm. Name → (shape, dtype) of what `scratch` must hold."""
    return NORM.workspace(Problem(x), kernel=kernel, backward=backward)


@op()
def layernorm_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *,
    y: Tensor, mean: Tensor, rstd: Tensor, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """y, mean and rstd."""
    _fwd(x, None, w, b, eps, x1=None, y=y, mean=mean, rstd=rstd, scratch=scratch, kernel=kernel)


@op()
def add_layernorm_fwd(
    x: Tensor, f: Tensor, w: Tensor, b: Tensor | None, eps: float, *,
    x1: Tensor, y: Tensor, mean: Tensor, rstd: Tensor, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """x1 = x + f, and y, mean and rstd of x1; x1 may be x."""
    _fwd(x, f, w, b, eps, x1=x1, y=y, mean=mean, rstd=rstd, scratch=scratch, kernel=kernel)


@op(adds=("dx",), accumulates=("dw", "db", "dx_sum"))
def layernorm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, b: Tensor | None = None, *,
    dx: Tensor | None = None, dw: Tensor | None = None, db: Tensor | None = None, dx_sum: Tensor | None = None,
    y: Tensor | None = None, accumulate: bool = True, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """dx += …   dw += Σ_n dy ∘ x̂   db += Σ_n dy   dx_sum += Σ_n dx   y = x̂ ∘ w + b, which may be dy"""
    _bwd(
        dy, x, w, mean, rstd, b, dx=dx, dw=dw, db=db, dx_sum=dx_sum, y=y,
        accumulate=accumulate, scratch=scratch, kernel=kernel,
    )  # fmt: skip


@op()
def rmsnorm_fwd(
    x: Tensor, w: Tensor, eps: float, *,
    y: Tensor, rstd: Tensor, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """y and rstd."""
    _fwd(x, None, w, None, eps, x1=None, y=y, mean=None, rstd=rstd, scratch=scratch, kernel=kernel)


@op()
def add_rmsnorm_fwd(
    x: Tensor, f: Tensor, w: Tensor, eps: float, *,
    x1: Tensor, y: Tensor, rstd: Tensor, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """x1 = x + f, and y and rstd of x1; x1 may be x."""
    _fwd(x, f, w, None, eps, x1=x1, y=y, mean=None, rstd=rstd, scratch=scratch, kernel=kernel)


@op(adds=("dx",), accumulates=("dw", "dx_sum"))
def rmsnorm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, *,
    dx: Tensor | None = None, dw: Tensor | None = None, dx_sum: Tensor | None = None, y: Tensor | None = None,
    accumulate: bool = True, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """dx += …   dw += Σ_n dy ∘ x̂   dx_sum += Σ_n dx   y = x̂ ∘ w, which may be dy"""
    _bwd(
        dy, x, w, None, rstd, None, dx=dx, dw=dw, db=None, dx_sum=dx_sum, y=y,
        accumulate=accumulate, scratch=scratch, kernel=kernel,
    )  # fmt: skip


def _fwd(
    x: Tensor, f: Tensor | None, w: Tensor, b: Tensor | None, eps: float, *,
    x1: Tensor | None, y: Tensor, mean: Tensor | None, rstd: Tensor, scratch: Scratch | None, kernel: str | None,
) -> None:  # fmt: skip
    if not eps > 0.0:
        raise ValueError(f"eps: got {eps!r}; accepted: a number > 0")
    _check(x, mean, rstd, w=w, b=b, y=y, f=f, x1=x1)
    if b is not None:
        check_tensor("b", b, (x.shape[1],), w.dtype, x.device)
    row = NORM.select(Problem(x), kernel)
    module = row.load()
    buffers = views(scratch, module.workspace(x, backward=False), x.device, "norm", kernel=row.name)
    module.fwd(x, f, w, b, eps, x1=x1, y=y, mean=mean, rstd=rstd, scratch=buffers)


def _bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor | None, rstd: Tensor, b: Tensor | None, *,
    dx: Tensor | None, dw: Tensor | None, db: Tensor | None, dx_sum: Tensor | None, y: Tensor | None, accumulate: bool,
    scratch: Scratch | None, kernel: str | None,
) -> None:  # fmt: skip
    _check(x, mean, rstd, w=w, b=b, dy=dy, dx=dx, y=y)
    if b is not None:
        check_tensor("b", b, (x.shape[1],), w.dtype, x.device)
    if dx_sum is not None and dx is None:
        raise ValueError("dx_sum: got a tensor without dx; accepted: None, or the two together")
    for name, grad in (("dw", dw), ("db", db), ("dx_sum", dx_sum)):
        if grad is not None:
            check_tensor(name, grad, (x.shape[1],), accumulation_dtype(x.dtype), x.device)
            check_columns(name, grad)
    row = NORM.select(Problem(x), kernel)
    module = row.load()
    buffers = views(scratch, module.workspace(x, backward=True), x.device, "norm", kernel=row.name)
    module.bwd(dy, x, w, mean, rstd, b, dx=dx, dw=dw, db=db, dx_sum=dx_sum, y=y, accumulate=accumulate, scratch=buffers)


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
