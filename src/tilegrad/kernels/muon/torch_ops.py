"""Muon in torch ops, on any device. Matrices of one shape are multiplied in batches of at most BLOCK elements, or one by one if
a matrix is larger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..guard import non_finite
from ..scratch import Scratch, Shapes, TensorLike, blocks
from . import COEFFICIENTS, FIRST_MOMENTUM, MARGINS, Matrices, MuonConfig, Range

BLOCK = 1 << 24  # the most elements of a batch of several matrices
CAUTIOUS_BLOCK = 1 << 20  # the most parameters whose signs are compared at once


class Batch(NamedTuple):
    """Matrices of one shape. `members` are their indices."""

    rows: int
    columns: int
    members: list[int]


def batches(matrices: Matrices) -> Iterator[Batch]:
    by_shape: dict[tuple[int, int], list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault((matrix.rows, matrix.columns), []).append(i)
    for (rows, columns), members in by_shape.items():
        for part in blocks(len(members), max(1, BLOCK // (rows * columns))):
            yield Batch(rows, columns, members[part])


def _product_dtype(params: TensorLike) -> torch.dtype:
    rounded = params.device.type != "cpu" and params.dtype == torch.float32
    return torch.bfloat16 if rounded else params.dtype


def workspace(params: TensorLike, matrices: Matrices, cautious: bool) -> Shapes:
    dtype, param_dtype = _product_dtype(params), params.dtype
    x = a = norms = 1
    for rows, columns, members in batches(matrices):
        n, side = len(members), min(rows, columns)
        x, a, norms = max(x, n * rows * columns), max(a, n * side * side), max(norms, n)
    shapes: Shapes = {"x": ((x,), dtype), "next_x": ((x,), dtype), "a": ((a,), dtype), "b": ((a,), dtype)}
    shapes |= {"norms": ((norms,), param_dtype)}
    if cautious:
        shapes |= {"signs": ((max(1, min(CAUTIOUS_BLOCK, sum(x.stop - x.start for x in matrices))),), param_dtype)}
    return shapes | dict.fromkeys(("clip", "momentum", "blend", "rate", "keep"), ((), param_dtype))


def step(
    norm: Tensor,
    step: Tensor,
    learning_rate: float | Tensor,
    muon: MuonConfig,
    weight_decay: float,
    max_norm: float,
    *,
    ranges: Sequence[Range],
    scratch: Scratch,
) -> None:
    clip, momentum, blend, rate = (scratch[name] for name in ("clip", "momentum", "blend", "rate"))
    clip.copy_(norm).add_(1e-6).div_(max_norm).clamp_(min=1.0).reciprocal_().nan_to_num_(nan=0.0)
    non_finite(norm, out=rate).neg_().add_(1.0)
    if muon.momentum_warmup:
        momentum.copy_(step).sub_(1.0).div_(muon.momentum_warmup).clamp_(max=1.0)
        momentum.mul_(muon.momentum - FIRST_MOMENTUM).add_(FIRST_MOMENTUM)
        torch.sub(1.0, momentum, out=blend).mul_(rate)
    else:
        momentum.fill_(muon.momentum)
        torch.mul(rate, 1.0 - muon.momentum, out=blend)
    rate.mul_(learning_rate).mul_(muon.learning_rate_factor)
    for each in ranges:
        g = each.grads.mul_(clip).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        each.m.lerp_(g, blend)
        g.lerp_(each.m, momentum) if muon.nesterov else g.copy_(each.m)
    updates = [each.grads[x.start : x.stop].view(x.rows, x.columns) for each in ranges for x in each.matrices]
    for batch in batches(sum((each.matrices for each in ranges), ())):
        _orthogonalize([updates[i] for i in batch.members], muon, scratch)
    for each in ranges:
        _apply(each, weight_decay, rate, scratch, cautious=muon.cautious)


def _orthogonalize(updates: list[Tensor], muon: MuonConfig, scratch: Scratch) -> None:
    """Overwrites each matrix with scale · orthogonal(matrix). All matrices have the same shape."""
    n, (rows, columns) = len(updates), updates[0].shape
    from_left, side = rows <= columns, min(rows, columns)
    x, following = (_part(scratch[name], n, rows, columns) for name in ("x", "next_x"))
    a, b = (_part(scratch[name], n, side, side) for name in ("a", "b"))
    torch._foreach_copy_([*x], updates)
    norms = _part(scratch["norms"], n, 1, 1)
    for update, size in zip(updates, norms, strict=True):
        torch.linalg.vector_norm(update, out=size.view(()))
    x.div_(norms.mul_(MARGINS[muon.orthogonalization]).add_(1e-7))
    for first, third, fifth in COEFFICIENTS[muon.orthogonalization]:
        # A is symmetric, so a.mT receives A as well. On aarch64, torch.bmm allocates unless `out` is column-major.
        torch.bmm(*((x, x.mT) if from_left else (x.mT, x)), out=a.mT)
        torch.baddbmm(a, a, a, beta=third, alpha=fifth, out=b)
        torch.baddbmm(x, *((b, x) if from_left else (x, b)), beta=first, out=following)
        x, following = following, x
    torch._foreach_copy_(updates, [*x])
    torch._foreach_mul_(updates, muon.scale_of(rows, columns))


def _apply(given: Range, weight_decay: float, rate: Tensor, scratch: Scratch, *, cautious: bool) -> None:
    """params −= rate · (weight_decay · params + update). The update is in grads. If `cautious`, a parameter decays only if it
    has the same sign as the update."""
    params, update = given.params, given.grads
    if cautious:
        for i in blocks(len(params), len(scratch["signs"])):
            signs = torch.mul(params[i], update[i], out=_part(scratch["signs"], i.stop - i.start))
            params[i].addcmul_(signs.gt_(0.0).mul_(params[i]), rate, value=-weight_decay)
    else:
        params.mul_(torch.mul(rate, -weight_decay, out=scratch["keep"]).add_(1.0))
    params.addcmul_(update, rate, value=-1.0)
    if given.rounded is not None:
        given.rounded.copy_(params)


def _part(x: Tensor, *shape: int) -> Tensor:
    return x[: prod(shape)].view(shape)
