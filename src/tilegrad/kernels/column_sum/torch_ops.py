"""Sums over rows as products with ones: any device, any dtype. bfloat16 on a CPU is copied to float32 tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks, rows_of

ROWS, COLS = 512, 1024  # a tile of bfloat16 on a CPU; on a CPU a running sum adds at most ROWS rows


def _in_tiles(x: TensorLike) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu"


def workspace(x: TensorLike) -> Shapes:
    (n, c), acc = x.shape, accumulation_dtype(x.dtype)
    shapes: Shapes = {"part": ((c,), acc), "ones": ((n,), acc if _in_tiles(x) else x.dtype)}
    return shapes | ({"tile": ((min(n, ROWS), min(c, COLS)), acc)} if _in_tiles(x) else {})


def fwd(x: Tensor, *, sums: Tensor, accumulate: bool, scratch: Scratch) -> None:
    if not accumulate:
        sums.zero_()
    part, ones = scratch["part"], scratch["ones"].fill_(1.0)
    if not _in_tiles(x):
        add_weighted_rows(x, ones, sums=sums, part=part)
        return
    for i in blocks(x.shape[0], ROWS):
        for j in blocks(x.shape[1], COLS):
            xij = x[i, j]
            tile = scratch["tile"].view(-1)[: xij.numel()].view(xij.shape).copy_(xij)
            add_weighted_rows(tile, ones[: tile.shape[0]], sums=sums[j], part=part[j])


def add_weighted_rows(x: Tensor, weights: Tensor, *, sums: Tensor, part: Tensor) -> None:
    """sums += Σ_n weights[n] x[n].       x (N, C)   weights (N,) of x's dtype   sums, part (C,)

    This is a product because `torch.sum(x, 0)` is slower on a CPU, and on CUDA allocates up to half the size of x. On a CPU
    rows are added in blocks of ROWS, because a longer running sum loses digits.
    """
    if x.device.type == "cpu":
        for i in blocks(x.shape[0], ROWS):
            sums.add_(torch.mv(rows_of(x, i).t(), rows_of(weights, i), out=part))
    elif sums.dtype == x.dtype:
        sums[None].addmm_(weights[None], x)
    else:
        torch.addmm(sums[None], weights[None], x, out_dtype=sums.dtype, out=sums[None])
