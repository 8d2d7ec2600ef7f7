"""A sum of two streams with learned scalars.       x, x0, y (N, C)   a, b (1,)

    y = a x + b x0        dx = a dy        dx0 += b dy        da += Σ dy ∘ x        db += Σ dy ∘ x0
                                                               (accumulate=False: da = …, db = …; dx0 is always accumulated)

b=None means b = 1. dx0 accumulates because all blocks of the model read the same x0. y may be x0, and dx may be dy. Rows of y
and dy, and of x0 in a forward, may be columns of wider rows. The sums are in the accumulation dtype, and their terms are added
in the same order each time. On a CPU a and b may have the accumulation dtype too. `SCALED_SUM` is the table of kernels: each
module offers `workspace`, `fwd` and `bwd`.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_given, check_param
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import BACKWARD, FORWARD, Problem, Where

SCALED_SUM = gpu.triton_else_torch("scaled_sum")


class Gradients(NamedTuple):
    """Outputs of a backward; None: not computed."""

    dx: Tensor
    dx0: Tensor | None
    da: Tensor | None
    db: Tensor | None
    accumulate: bool


def scaled_sum_workspace(x: TensorLike, *, backward: bool, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch of a forward or of a backward."""
    return SCALED_SUM.workspace(Problem(x), kernel=kernel, backward=backward)


def _check(x: Tensor, a: Tensor, b: Tensor | None, rows: dict[str, Tensor | None], **others: Tensor | None) -> None:
    """Checks that x and `others` are contiguous, and that each tensor of `rows` has contiguous rows."""
    shape, given = tuple(x.shape), {"x": x} | others
    check_given(x.device, *((name, other, shape, x.dtype) for name, other in (given | rows).items()))
    for name, other in given.items():
        if other is not None and not other.is_contiguous():
            raise ValueError(f"{name}: got strides {other.stride()}; accepted: a contiguous tensor")
    for name, other in rows.items():
        if other is not None:
            check_columns(name, other)
    check_param("a", a, (1,), x)
    if b is not None:
        check_param("b", b, (1,), x)


@op()
def scaled_sum_fwd(x: Tensor, x0: Tensor, a: Tensor, b: Tensor | None, *, y: Tensor, **where: Unpack[Where]) -> None:
    """y = a x + b x0, rounded once; y is not x."""
    _check(x, a, b, {"x0": x0, "y": y})
    SCALED_SUM.run("fwd", Problem(x), x, x0, a, b, options=FORWARD, y=y, **where)


@op(accumulates=("da", "db"), adds=("dx0",))
def scaled_sum_bwd(
    dy: Tensor, x: Tensor, x0: Tensor | None, a: Tensor, b: Tensor | None, *,
    dx: Tensor, dx0: Tensor | None = None, da: Tensor | None = None, db: Tensor | None = None, accumulate: bool = True,
    **where: Unpack[Where],
) -> None:  # fmt: skip
    """dx = a dy   dx0 += b dy   da += Σ dy ∘ x   db += Σ dy ∘ x0; x0 may be None without db."""
    if x0 is None and db is not None:
        raise ValueError("x0: got None; accepted: a tensor, which db needs")
    _check(x, a, b, {"dy": dy}, x0=x0, dx=dx, dx0=dx0)
    acc = accumulation_dtype(x.dtype)
    check_given(x.device, ("da", da, (1,), acc), ("db", db, (1,), acc))
    out = Gradients(dx, dx0, da, db, accumulate)
    SCALED_SUM.run("bwd", Problem(x), dy, x, x0, a, b, options=BACKWARD, out=out, **where)
