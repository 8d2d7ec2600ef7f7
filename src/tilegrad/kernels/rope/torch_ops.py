"""Rotary positions by torch ops, on blocks of positions that stay in cache: any device, dtype and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 22}  # elements of a block of positions


def _positions(x: TensorLike) -> int:
    _, t, h, d = x.shape
    return int(max(1, min(t, BLOCK[x.device.type] // max(h * d, 1))))


def workspace(x: TensorLike, *, packed: bool = False) -> Shapes:
    (_, _, h, d), acc = x.shape, accumulation_dtype(x.dtype)
    shapes: Shapes = {"old_x1": ((_positions(x), h, d // 2), acc)}
    if packed:
        shapes |= dict.fromkeys(("cos", "sin"), ((_positions(x), d // 2), acc))
    return shapes | ({"rotated": ((_positions(x), h, d), acc)} if x.dtype != acc else {})


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, sign: float, *, y: Tensor, scratch: Scratch
) -> None:
    b, t, _, d = x.shape
    for n in range(b):
        for i in blocks(t, _positions(x)):
            m = i.stop - i.start
            xi, yi = x[n, i], y[n, i]
            if "rotated" in scratch:
                xi = yi = scratch["rotated"][:m].copy_(xi)
            (x1, x2), (y1, y2) = xi.split(d // 2, -1), yi.split(d // 2, -1)
            old_x1 = scratch["old_x1"][:m].copy_(x1)
            if positions is None:
                cos_i, sin_i = cos[i, None], sin[i, None]
            else:
                tables, index = ((cos, scratch["cos"][:m]), (sin, scratch["sin"][:m])), positions[n, i]
                cos_i, sin_i = (torch.index_select(table, 0, index, out=rows)[:, None] for table, rows in tables)
            torch.mul(x1, cos_i, out=y1).addcmul_(x2, sin_i, value=-sign)
            torch.mul(x2, cos_i, out=y2).addcmul_(old_x1, sin_i, value=sign)
            if "rotated" in scratch:
                y[n, i].copy_(yi)
