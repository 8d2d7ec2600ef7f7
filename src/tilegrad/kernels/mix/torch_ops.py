"""The mix by torch ops, one sequence at a time: any device, dtype and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype


def workspace(part: TensorLike) -> Shapes:
    acc = accumulation_dtype(part.dtype)
    shapes: Shapes = {"share": (tuple(part.shape[1:3]), acc), "mixed": (tuple(part.shape[1:]), acc)}
    return shapes | ({} if part.dtype == acc else {"part": (tuple(part.shape[1:]), acc)})


def fwd(part: Tensor, part_lse: Tensor, *, o: Tensor, lse: Tensor, scratch: Scratch) -> None:
    share, mixed = scratch["share"], scratch["mixed"]
    for b in range(part.shape[0]):
        torch.sub(lse[b], part_lse[b], out=share).sigmoid_()
        part_b = scratch["part"].copy_(part[b]) if "part" in scratch else part[b]
        o[b].copy_(mixed.copy_(o[b]).sub_(part_b).mul_(share[..., None]).add_(part_b))
        lse[b].copy_(torch.logaddexp(lse[b], part_lse[b], out=share))
