"""Elementwise dropout.       x, y (N, C)

    y = x ∘ keep / (1 − p),   keep(row, column) = word ≥ floor(p · 2³²)
    word = first word of Philox4×32-10(counter = (column, row, layer_counter, 2³² − 1), key = seed)

The last counter word, which attention uses for the sequence, is one that no sequence has, so the masks never coincide.
The backward is the forward on dy: the mask is drawn again, not kept. `DROPOUT` is the table of kernels: each module offers
`workspace` and `fwd`, and all draw the same mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .. import gpu
from ..checks import check_tensor
from ..op import op
from ..philox import NO_SEQUENCE
from ..scratch import Scratch, Shapes, views
from ..table import Kernel, Table, takes_all


class Problem(NamedTuple):
    """Dropout as the table sees it: the dtype and device of x."""

    x: Any


DROPOUT = Table(
    "dropout",
    (
        Kernel("triton", "dropout.triton_ops", lambda problem: gpu.refusal(problem.x)),
        Kernel("torch", "dropout.torch_ops", takes_all),
    ),
)


def dropout_workspace(x: Any, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold, forward and backward."""
    return DROPOUT.workspace(Problem(x), kernel=kernel)


@op()
def dropout_fwd(
    x: Tensor, seed: int | Tensor, dropout_p: float, layer_counter: int, *,
    y: Tensor, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """y = x ∘ keep / (1 − dropout_p); y may be x (N, C). dropout_p = 0 copies, and needs no scratch."""
    _dropout(x, seed, dropout_p, layer_counter, y=y, scratch=scratch, kernel=kernel)


@op()
def dropout_bwd(
    dy: Tensor, seed: int | Tensor, dropout_p: float, layer_counter: int, *,
    dx: Tensor, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """dx = dy ∘ keep / (1 − dropout_p), with the forward's keep; dx may be dy."""
    _dropout(dy, seed, dropout_p, layer_counter, y=dx, scratch=scratch, kernel=kernel)


def _dropout(
    x: Tensor, seed: int | Tensor, dropout_p: float, layer_counter: int, *,
    y: Tensor, scratch: Scratch | None, kernel: str | None,
) -> None:  # fmt: skip
    check_tensor("y", y, tuple(x.shape), x.dtype, x.device)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p!r}; accepted: a number p, 0 ≤ p < 1")
    if not 0 <= layer_counter <= NO_SEQUENCE:
        raise ValueError(f"layer_counter: got {layer_counter!r}; accepted: an int of 32 bits, ≥ 0")
    if dropout_p == 0.0:
        y.copy_(x)
        return
    row = DROPOUT.select(Problem(x), kernel)
    module = row.load()
    buffers = views(scratch, module.workspace(x), x.device, "dropout", kernel=row.name)
    module.fwd(x, seed, dropout_p, layer_counter, y=y, scratch=buffers)
