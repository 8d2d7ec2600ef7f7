"""AdamW on flat arenas, clipped by their norm.       params, grads, m, v (P,): one range of the arenas

    g = grads / max(1, (norm + 1e-6) / max_norm)                          norm: of the op `global_norm`
    m = β1 m + (1 − β1) g            v = β2 v + (1 − β2) g²
    params −= lr · weight_decay · params                                  (the first `decayed` elements only)
    params −= lr · (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + eps)
    rounded = params, in its own dtype                                    (where a copy to compute with is kept)

Where norm is not finite, nothing changes: not params, m, v, rounded, and not the step count t. That is decided on the
device, so nothing waits for it. grads is spent: a kernel leaves it clipped or as it was. Of ranges that are owned in pieces,
params, grads, m, v and rounded are lists, `decayed` is one of each piece, and the step is counted once. `ADAMW` is the table
of kernels: each module offers `workspace` and `step`.
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


class Piece(NamedTuple):
    """One range of the arenas: (P,) each."""

    params: Tensor
    grads: Tensor
    m: Tensor
    v: Tensor
    rounded: Tensor | None
    decayed: int  # leading elements that decay


@op(accumulates=("params", "grads", "m", "v", "step", "rounded"))
def adamw_step(
    norm: Tensor, learning_rate: float | Tensor, decayed: int | list[int], weight_decay: float = 0.1,
    max_norm: float = 1.0, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, *,
    params: Tensor | list[Tensor], grads: Tensor | list[Tensor], m: Tensor | list[Tensor], v: Tensor | list[Tensor],
    step: Tensor, rounded: Tensor | list[Tensor] | None = None, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """params, m, v and step (0-d float32, the number of steps done) move on by one. max_norm = inf does not clip."""
    pieces = _pieces(params, grads, m, v, rounded, decayed)
    first = pieces[0].params
    for piece in pieces:
        _check(piece, first)
    check_tensor("norm", norm, (), first.dtype, first.device)
    check_tensor("step", step, (), torch.float32, first.device)
    if not max_norm > 0.0:
        raise ValueError(f"max_norm: got {max_norm!r}; accepted: a number > 0, inf for no clipping")
    row = ADAMW.select(Problem(first), kernel)
    module = row.load()
    module.step(
        norm, learning_rate, weight_decay, max_norm, betas, eps, pieces=pieces, step=step,
        scratch=views(scratch, module.workspace(first), first.device, "adamw", kernel=row.name),
    )  # fmt: skip


def _pieces(params: Any, grads: Any, m: Any, v: Any, rounded: Any, decayed: Any) -> list[Piece]:
    if not isinstance(params, list):
        return [Piece(params, grads, m, v, rounded, decayed)]
    copies = [None] * len(params) if rounded is None else rounded
    return [Piece(*piece) for piece in zip(params, grads, m, v, copies, decayed, strict=True)]


def _check(piece: Piece, first: Tensor) -> None:
    p = piece.params.numel()
    for name in ("params", "grads", "m", "v"):
        check_tensor(name, getattr(piece, name), (p,), accumulation_dtype(first.dtype), first.device)
    if piece.rounded is not None:
        check_tensor("rounded", piece.rounded, (p,), piece.rounded.dtype, first.device)
    if not 0 <= piece.decayed <= p:
        raise ValueError(f"decayed: got {piece.decayed}; accepted: 0 … {p}, the number of leading elements that decay")
