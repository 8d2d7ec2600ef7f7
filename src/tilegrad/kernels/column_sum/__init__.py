"""Sum over rows, for example the gradient of a bias.       x (N, C)   sums (C,), in the accumulation dtype

    sums += Σ_n x        (accumulate=False: sums = Σ_n x)

Rows may be strided, columns must be contiguous. `COLUMN_SUM` is the table of kernels: each module offers `workspace` and `fwd`.
On CUDA torch's product with ones has a higher memory bandwidth than the Triton kernel, so `torch` comes before `triton`.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_tensor
from ..cpu import rows
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import Kernel, Problem, Table, Where, takes_all

COLUMN_SUM = Table(
    "column_sum",
    (
        Kernel("native", "column_sum.cpu", lambda problem: rows.refusal(problem.x)),
        Kernel("torch", "column_sum.torch_ops", takes_all),
        Kernel("triton", "column_sum.triton_ops", lambda problem: gpu.refusal(problem.x)),
    ),
)


def column_sum_workspace(x: TensorLike, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch."""
    return COLUMN_SUM.workspace(Problem(x), kernel=kernel)


@op(accumulates=("sums",))
def column_sum_fwd(x: Tensor, *, sums: Tensor, accumulate: bool = True, **where: Unpack[Where]) -> None:
    """sums += Σ_n x, or sums = Σ_n x if accumulate is False."""
    check_tensor("sums", sums, (x.shape[1],), accumulation_dtype(x.dtype), x.device)
    check_columns("x", x)
    check_columns("sums", sums)
    COLUMN_SUM.run("fwd", Problem(x), x, sums=sums, accumulate=accumulate, **where)
