"""AdamW on flat arenas, clipped by their norm.       params, grads, m, v (P,): one range of the arenas

    g = grads / max(1, (norm + 1e-6) / max_norm)                          norm: of the op `global_norm`
    m = β1 m + (1 − β1) g            v = β2 v + (1 − β2) g²
    params −= lr · weight_decay · params                                  (the first `decayed` elements only)
    params −= lr · (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + eps)
    rounded = params, in its own dtype                                    (where a copy to compute with is kept)

Where norm is not finite, nothing changes: not params, m, v, rounded, and not the step count t. That is decided on the
device, so nothing waits for it. grads is spent: a kernel leaves it clipped or as it was. `ADAMW` is the table of kernels:
each module offers `workspace` and `step`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_tensor
from ..op import op
from ..scratch import Scratch, Shapes, accumulation_dtype, views
from ..table import Kernel, Table, takes_all


class Problem(NamedTuple):
    """A step as the table sees it: the dtype and device of the parameters."""

    params: Any


ADAMW = Table(
    "adamw",
    (
        Kernel("triton", "adamw.triton_ops", lambda problem: gpu.refusal(problem.params)),
        Kernel("torch", "adamw.torch_ops", takes_all),
    ),
)


def adamw_workspace(params: Any, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold."""
    return ADAMW.workspace(Problem(params), kernel=kernel)


@op(accumulates=("params", "grads", "m", "v", "step", "rounded"))
def adamw_step(
    norm: Tensor, learning_rate: float | Tensor, decayed: int, weight_decay: float = 0.1, max_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, *,
    params: Tensor, grads: Tensor, m: Tensor, v: Tensor, step: Tensor, rounded: Tensor | None = None,
    scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """params, m, v and step (0-d float32, the number of steps done) move on by one. max_norm = inf does not clip."""
    p = params.numel()
    for name, x in (("params", params), ("grads", grads), ("m", m), ("v", v)):
        check_tensor(name, x, (p,), accumulation_dtype(params.dtype), params.device)
    check_tensor("norm", norm, (), params.dtype, params.device)
    check_tensor("step", step, (), torch.float32, params.device)
    if rounded is not None:
        check_tensor("rounded", rounded, (p,), rounded.dtype, params.device)
    if not 0 <= decayed <= p:
        raise ValueError(f"decayed: got {decayed}; accepted: 0 … {p}, the number of leading elements that decay")
    if not max_norm > 0.0:
        raise ValueError(f"max_norm: got {max_norm!r}; accepted: a number > 0, inf for no clipping")
    row = ADAMW.select(Problem(params), kernel)
    module = row.load()
    module.step(
        norm, learning_rate, decayed, weight_decay, max_norm, betas, eps,
        params=params, grads=grads, m=m, v=v, step=step, rounded=rounded,
        scratch=views(scratch, module.workspace(params), params.device, "adamw", kernel=row.name),
    )  # fmt: skip
