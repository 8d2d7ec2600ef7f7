"""AdamW by torch's fused kernel: one call for the elements with weight decay and one for the others, over all ranges.

The fused kernel takes a float32 clipping factor, which on aarch64 makes it 1.3 times as slow. There, and for float64, grads is
scaled in a pass before. On a CPU a factor of 1 is left out. grads is clipped in place.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..guard import non_finite
from ..scratch import Scratch, Shapes, TensorLike

if TYPE_CHECKING:
    from . import Range

_SLOW_FACTOR = platform.machine() == "aarch64"


def workspace(params: TensorLike) -> Shapes:
    return {"grad_scale": ((), params.dtype), "found_inf": ((), torch.float32)}


def step(
    norm: Tensor, learning_rate: float | Tensor, weight_decay: float, max_norm: float, betas: tuple[float, float],
    eps: float, *, ranges: Sequence[Range], step: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    grad_scale, found_inf = scratch["grad_scale"], scratch["found_inf"]
    grad_scale.copy_(norm).add_(1e-6).div_(max_norm).clamp_(min=1.0).nan_to_num_(nan=1.0, posinf=1.0)
    non_finite(norm, out=found_inf)
    step.add_(1.0).sub_(found_inf)
    on_cpu = norm.device.type == "cpu"
    clips = not (on_cpu and grad_scale.item() == 1.0)
    before = norm.dtype == torch.float64 or (on_cpu and _SLOW_FACTOR)
    if clips and before:
        grad_scale.reciprocal_()
        for each in ranges:
            each.grads.mul_(grad_scale)
    decays = [(each, slice(0, each.decayed)) for each in ranges]
    plain = [(each, slice(each.decayed, len(each.params))) for each in ranges]
    for parts, decay in ((decays, weight_decay), (plain, 0.0)):
        here = [(each, i) for each, i in parts if i.start < i.stop]
        if here:
            torch._fused_adamw_(
                [x.params[i] for x, i in here], [x.grads[i] for x, i in here], [x.m[i] for x, i in here],
                [x.v[i] for x, i in here], [], [step] * len(here),
                lr=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=decay, eps=eps,
                amsgrad=False, maximize=False, grad_scale=grad_scale if clips and not before else None, found_inf=found_inf,
            )  # fmt: skip
    for each in ranges:
        if each.rounded is not None:
            each.rounded.copy_(each.params)
