"""The same product by torch's own casts and a float32 product of the rounded factors: any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes

LARGEST = 448.0
FIRST_PART = 4


def workspace(x: Any, w: Any) -> Shapes:
    (n, cin), cout = x.shape, w.shape[0]
    return {
        "x": ((n, cin), torch.float32),
        "w": ((cout, cin), torch.float32),
        "x8": ((n, cin), torch.float8_e4m3fn),
        "w8": ((cout, cin), torch.float8_e4m3fn),
        "y": ((n, cout), torch.float32),
    }


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, state: Tensor, scratch: Scratch) -> None:
    factors = []
    for i, (name, a) in enumerate((("x", x), ("w", w))):
        scale, seen = state[i, 0], state[i, FIRST_PART]
        a32 = scratch[name].copy_(a)
        if a.numel():
            seen.copy_(torch.maximum(seen, a32.abs().amax()))
        scratch[f"{name}8"].copy_(a32.div_(scale).clamp_(-LARGEST, LARGEST))
        factors.append(a32.copy_(scratch[f"{name}8"]))
    out = torch.mm(factors[0], factors[1].t(), out=scratch["y"])
    out.mul_(state[0, 0] * state[1, 0])
    if b is not None:
        out.add_(b)
    y.copy_(out)


def scale_step(*, state: Tensor) -> None:
    scale, seen = state[:, 0], state[:, FIRST_PART:]
    largest = seen.amax(1)
    used = largest.isfinite() & (largest > 0.0)
    scale.copy_(torch.where(used, largest / LARGEST, scale))
    seen.zero_()
