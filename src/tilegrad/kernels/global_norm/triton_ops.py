"""The norm in Triton: the sum of squares of each part of the gradients, then one program that adds the sums.

A program reads PART gradients, TILE at a time. The kernels take as long as reading the gradients. The order of every sum
depends only on the lengths of the ranges, so the bits are the same each time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import ceil_div, launch
from ..scratch import Scratch, Shapes, TensorLike

PART, TILE = 1 << 15, 1 << 12  # gradients per program, and per tile
SUM = 1024  # sums that the second kernel reads at a time


@triton.jit
def _squares_kernel(grads, parts, P, PART: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * PART
    squares = tl.zeros([TILE], tl.float32)
    for k in range(0, PART, TILE):
        i = first + k + tl.arange(0, TILE)
        g = tl.load(grads + i, mask=i < P, other=0.0).to(tl.float32)
        squares += g * g
    tl.store(parts + tl.program_id(0), tl.sum(squares, 0))


@triton.jit
def _root_kernel(parts, norm, count, SUM: tl.constexpr):
    """norm = √Σ parts, in one program."""
    total = tl.zeros([SUM], tl.float32)
    for k in range(0, count, SUM):
        i = k + tl.arange(0, SUM)
        total += tl.load(parts + i, mask=i < count, other=0.0)
    tl.store(norm, tl.math.sqrt_rn(tl.sum(total, 0)))


def workspace(grads: TensorLike, others: Sequence[TensorLike] = ()) -> Shapes:
    return {"squares": ((sum(ceil_div(x.shape[0], PART) for x in (grads, *others)),), torch.float32)}


def fwd(ranges: Sequence[Tensor], *, norm: Tensor, scratch: Scratch) -> None:
    squares, at = scratch["squares"], 0
    for grads in ranges:
        count = ceil_div(grads.shape[0], PART)
        launch(_squares_kernel, (count,), grads, squares[at : at + count], grads.shape[0], PART=PART, TILE=TILE)
        at += count
    launch(_root_kernel, (1,), squares, norm, len(squares), SUM=SUM)
