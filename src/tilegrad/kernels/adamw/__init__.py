"""AdamW on flat arenas, with gradients clipped by their norm.       params, grads, m, v (P,): one range of the arenas

    g = grads / max(1, (norm + 1e-6) / max_norm)                          norm: from the op `global_norm`
    m = β1 m + (1 − β1) g            v = β2 v + (1 − β2) g²
    params −= lr · weight_decay · params                                  (the first `decayed` elements only)
    params −= lr · (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + eps)
    rounded = params, in rounded's dtype                                  (if there is a bfloat16 copy)

If norm is not finite, nothing changes: not params, m, v, rounded, nor the step count t. The device decides this, so the host
does not wait. Whether grads is clipped in place depends on the kernel. For several ranges, params, grads, m, v, rounded and
`decayed` are lists, and the step is counted once. `ADAMW` is the table of kernels: each module offers `workspace` and `step`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_max_norm, check_range, check_tensor
from ..op import op
from ..scratch import Shapes, TensorLike
from ..table import Problem, Where

T = TypeVar("T")
ADAMW = gpu.triton_else_torch("adamw")


def adamw_workspace(params: TensorLike, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch."""
    return ADAMW.workspace(Problem(params), kernel=kernel)


class Range(NamedTuple):
    """One range of the arenas: (P,) each."""

    params: Tensor
    grads: Tensor
    m: Tensor
    v: Tensor
    rounded: Tensor | None
    decayed: int  # number of leading elements with weight decay


@op(accumulates=("params", "grads", "m", "v", "step", "rounded"))
def adamw_step(
    norm: Tensor, learning_rate: float | Tensor, decayed: int | list[int], weight_decay: float = 0.1,
    max_norm: float = 1.0, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, *,
    params: Tensor | list[Tensor], grads: Tensor | list[Tensor], m: Tensor | list[Tensor], v: Tensor | list[Tensor],
    step: Tensor, rounded: Tensor | list[Tensor] | None = None, **where: Unpack[Where],
) -> None:  # fmt: skip
    """One step: updates params, m, v and step (0-d float32, the number of steps done). max_norm = inf: no clipping."""
    copies = [None] * len(_listed(params)) if rounded is None else _listed(rounded)
    fields = zip(*map(_listed, (params, grads, m, v)), copies, _listed(decayed), strict=True)
    ranges = [Range(*each) for each in fields]
    first = ranges[0].params
    for each in ranges:
        _check(each, first)
    check_tensor("norm", norm, (), first.dtype, first.device)
    check_tensor("step", step, (), torch.float32, first.device)
    check_max_norm(max_norm)
    given = (norm, learning_rate, weight_decay, max_norm, betas, eps)
    ADAMW.run("step", Problem(first), *given, ranges=ranges, step=step, **where)


def _listed(x: T | list[T]) -> list[T]:
    return x if isinstance(x, list) else [x]


def _check(given: Range, first: Tensor) -> None:
    p = check_range(first, given.rounded, params=given.params, grads=given.grads, m=given.m, v=given.v)
    if not 0 <= given.decayed <= p:
        raise ValueError(f"decayed: got {given.decayed}; accepted: 0 … {p}, the leading elements with weight decay")
