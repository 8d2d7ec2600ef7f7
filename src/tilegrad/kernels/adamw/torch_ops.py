"""AdamW by torch's fused one: one pass over each of the two parts, the one that decays and the one that doesn't.

Its clipping factor is float32, and on aarch64 it is 1.3 times as slow with one; there, and for float64, grads is scaled
before, in a pass of its own. On a CPU a factor of 1 is left out. grads is left clipped.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes

_SLOW_FACTOR = platform.machine() == "aarch64"


def workspace(params: Any) -> Shapes:
    return {"grad_scale": ((), params.dtype), "found_inf": ((), torch.float32)}


def step(
    norm: Tensor, learning_rate: float | Tensor, decayed: int, weight_decay: float, max_norm: float,
    betas: tuple[float, float], eps: float, *,
    params: Tensor, grads: Tensor, m: Tensor, v: Tensor, step: Tensor, rounded: Tensor | None, scratch: Scratch,
) -> None:  # fmt: skip
    grad_scale, found_inf = scratch["grad_scale"], scratch["found_inf"]
    grad_scale.copy_(norm).add_(1e-6).div_(max_norm).clamp_(min=1.0).nan_to_num_(nan=1.0, posinf=1.0)
    found_inf.copy_(norm).mul_(0.0).nan_to_num_(nan=1.0)  # 0 where norm is finite, else 0 · norm = NaN → 1
    step.add_(1.0).sub_(found_inf)
    on_cpu = params.device.type == "cpu"
    clips = not (on_cpu and grad_scale.item() == 1.0)
    before = params.dtype == torch.float64 or (on_cpu and _SLOW_FACTOR)
    if clips and before:
        grads.mul_(grad_scale.reciprocal_())
    for part, decay in ((slice(0, decayed), weight_decay), (slice(decayed, len(params)), 0.0)):
        if part.start < part.stop:
            torch._fused_adamw_(
                [params[part]], [grads[part]], [m[part]], [v[part]], [], [step],
                lr=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=decay, eps=eps,
                amsgrad=False, maximize=False, grad_scale=grad_scale if clips and not before else None, found_inf=found_inf,
            )  # fmt: skip
    if rounded is not None:
        rounded.copy_(params)
