"""Rotary positions: the halves of a head's vector turned against each other (the convention of Llama and GPT-NeoX).

    x = (x1, x2), halves of D       angle[t, i] = t · theta^(−2i/D)     cos, sin (T, D/2)
    y1 = x1 ∘ cos − x2 ∘ sin        y2 = x2 ∘ cos + x1 ∘ sin            the backward turns back: sin → −sin

x (B, T, H, D) has any strides, so q and k are views of the fused projection. Tables are in the accumulation dtype
(float32, float64 for float64), and so is the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_tensor
from .op import op
from .scratch import Scratch, Shapes, accumulation_dtype, blocks, views

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 22}  # elements of a block of positions


def _positions(x: Any) -> int:
    _, t, h, d = x.shape
    return int(max(1, min(t, BLOCK[torch.device(x.device).type] // max(h * d, 1))))


def rope_workspace(x: Any) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold, forward and backward."""
    (_, _, h, d), acc = x.shape, accumulation_dtype(x.dtype)
    shapes: Shapes = {"kept": ((_positions(x), h, d // 2), acc)}
    return shapes | ({"turned": ((_positions(x), h, d), acc)} if x.dtype != acc else {})


@op()
def rope_table(theta: float, d: int, t: int, *, cos: Tensor, sin: Tensor) -> None:
    """cos, sin (T, D/2) of the angles, computed in float64. Filled once, before the first step: the one function here
    that allocates, 8·T bytes."""
    if not theta > 0.0:
        raise ValueError(f"theta: got {theta!r}; accepted: a number > 0")
    if d % 2:
        raise ValueError(f"d: got {d}; accepted: an even head dimension")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (t, d // 2), table.dtype, cos.device)
    position = torch.arange(t, dtype=torch.float64, device=cos.device)
    for i in range(d // 2):
        angle = position * theta ** (-2.0 * i / d)
        cos[:, i].copy_(angle.cos())
        sin[:, i].copy_(angle.sin())


@op()
def rope_fwd(x: Tensor, cos: Tensor, sin: Tensor, *, y: Tensor, scratch: Scratch | None = None) -> None:
    """y = x turned by its positions; y may be x. Tables may be longer than T: their first T rows are read."""
    _turn(x, cos, sin, 1.0, y=y, scratch=scratch)


@op()
def rope_bwd(dy: Tensor, cos: Tensor, sin: Tensor, *, dx: Tensor, scratch: Scratch | None = None) -> None:
    """dx = dy turned back; dx may be dy."""
    _turn(dy, cos, sin, -1.0, y=dx, scratch=scratch)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float, *, y: Tensor, scratch: Scratch | None) -> None:
    b, t, _, d = x.shape
    acc = accumulation_dtype(x.dtype)
    if d % 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}; accepted: an even head dimension")
    check_tensor("y", y, tuple(x.shape), x.dtype, x.device)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (max(t, table.shape[0]), d // 2), acc, x.device)
    scratch = views(scratch, rope_workspace(x), x.device, "rope")
    for n in range(b):
        for i in blocks(t, _positions(x)):
            m = i.stop - i.start
            xi, yi = x[n, i], y[n, i]
            if "turned" in scratch:
                xi = yi = scratch["turned"][:m].copy_(xi)
            (x1, x2), (y1, y2) = xi.split(d // 2, -1), yi.split(d // 2, -1)
            kept, cos_i, sin_i = scratch["kept"][:m].copy_(x1), cos[i, None], sin[i, None]
            torch.mul(x1, cos_i, out=y1).addcmul_(x2, sin_i, value=-sign)
            torch.mul(x2, cos_i, out=y2).addcmul_(kept, sin_i, value=sign)
            if "turned" in scratch:
                y[n, i].copy_(yi)
