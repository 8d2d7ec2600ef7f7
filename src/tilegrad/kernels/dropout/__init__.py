"""Elementwise dropout.       x, y (N, C)

    y = x ∘ keep / (1 − p),   keep(row, column) = word ≥ floor(p · 2³²)
    word = first word of Philox4×32-10(counter = (column, row, layer_counter, 2³² − 1), key = seed)

In attention the last counter word is the sequence. Here this word is a number that no sequence has, so the masks
never coincide. The backward is the forward on dy: it draws the mask again instead of storing it. `DROPOUT` is the table of
kernels: each module offers `workspace` and `fwd`, and all draw the same mask.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from .. import gpu
from ..checks import check_tensor
from ..op import op
from ..philox import NO_SEQUENCE
from ..scratch import Shapes, TensorLike
from ..table import Problem, Where

DROPOUT = gpu.triton_else_torch("dropout")


def dropout_workspace(x: TensorLike, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch, forward and backward."""
    return DROPOUT.workspace(Problem(x), kernel=kernel)


@op()
def dropout_fwd(
    x: Tensor, seed: int | Tensor, dropout_p: float, layer_counter: int, *, y: Tensor, **where: Unpack[Where]
) -> None:
    """y = x ∘ keep / (1 − dropout_p); y may be x. dropout_p = 0 copies and needs no scratch."""
    check_tensor("y", y, tuple(x.shape), x.dtype, x.device)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p!r}; accepted: a number p, 0 ≤ p < 1")
    if not 0 <= layer_counter <= NO_SEQUENCE:
        raise ValueError(f"layer_counter: got {layer_counter!r}; accepted: an int from 0 to {NO_SEQUENCE}")
    if dropout_p == 0.0:
        y.copy_(x)
    else:
        DROPOUT.run("fwd", Problem(x), x, seed, dropout_p, layer_counter, y=y, **where)
