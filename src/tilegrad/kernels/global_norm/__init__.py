"""The norm for gradient clipping.       grads (P,): a flat range of float32, float64 or bfloat16, or a list of ranges
                                      norm 0-d: float32, or float64 for float64

    norm = ‖grads‖₂        inf or NaN if an element is; over all ranges of a list

The norm is computed from sums over parts: each sum is short, so float32 is accurate enough. `GLOBAL_NORM` is the table of
kernels: each module offers `workspace` and `fwd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_tensor
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import Where


class Problem(NamedTuple):
    """The properties of a norm that decide which kernels accept it: the dtype and device of the gradients, and the lengths of
    all their ranges."""

    grads: TensorLike
    others: Sequence[TensorLike] = ()  # ranges after the first


GLOBAL_NORM = gpu.triton_else_torch("global_norm")


def global_norm_workspace(*grads: TensorLike, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch."""
    return GLOBAL_NORM.workspace(Problem(grads[0], grads[1:]), kernel=kernel)


@op()
def global_norm(grads: Tensor | list[Tensor], *, norm: Tensor, **where: Unpack[Where]) -> None:
    """norm (0-d) = ‖grads‖₂; inf or NaN if an element is."""
    ranges = grads if isinstance(grads, list) else [grads]
    first = ranges[0]
    acc = accumulation_dtype(first.dtype)
    for x in ranges:
        check_tensor("grads", x, (x.numel(),), first.dtype if first.dtype == torch.bfloat16 else acc, first.device)
    check_tensor("norm", norm, (), acc, first.device)
    GLOBAL_NORM.run("fwd", Problem(first, ranges[1:]), ranges, norm=norm, **where)
