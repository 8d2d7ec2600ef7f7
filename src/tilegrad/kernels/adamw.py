"""AdamW on flat arenas, and the norm that clips it.       params, grads, m, v (P,): one range of the arenas

    norm = ‖grads‖₂                  g = grads / max(1, (norm + 1e-6) / max_norm)
    m = β1 m + (1 − β1) g            v = β2 v + (1 − β2) g²
    params −= lr · weight_decay · params                                  (the first `decayed` elements only)
    params −= lr · (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + eps)

One pass (torch's fused AdamW) over each of the two parts. Its clipping factor is float32, and on aarch64 it is 1.3 times
as slow with one; there, and for float64, grads is scaled before, in a pass of its own. On a CPU a factor of 1 is left
out. Where norm is not finite, nothing changes: not params, m, v, and not the step count t. That is decided on the
device, so nothing waits for it. grads is left clipped.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

from .checks import check_tensor
from .op import op
from .scratch import Scratch, Shapes, accumulation_dtype, views

_SLOW_FACTOR = platform.machine() == "aarch64"
BLOCK = 1 << 16  # elements whose norm is taken at once: sums stay short, so float32 stays exact enough


def global_norm_workspace(grads: Any) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold."""
    return {"parts": ((grads.shape[0] // BLOCK + 1,), grads.dtype)}


@op()
def global_norm(grads: Tensor, *, norm: Tensor, scratch: Scratch | None = None) -> None:
    """norm (0-d) = ‖grads‖₂; inf or NaN where an element is."""
    check_tensor("grads", grads, (grads.numel(),), accumulation_dtype(grads.dtype), grads.device)
    check_tensor("norm", norm, (), grads.dtype, grads.device)
    parts = views(scratch, global_norm_workspace(grads), grads.device, "global_norm")["parts"]
    whole = grads.shape[0] // BLOCK
    if whole:
        torch.linalg.vector_norm(grads[: whole * BLOCK].view(whole, BLOCK), dim=1, out=parts[:whole])
    torch.linalg.vector_norm(grads[whole * BLOCK :], out=parts[whole])
    torch.linalg.vector_norm(parts, out=norm)


def adamw_workspace(params: Any) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold."""
    return {"grad_scale": ((), params.dtype), "found_inf": ((), torch.float32)}


@op(accumulates=("params", "grads", "m", "v", "step"))
def adamw_step(
    norm: Tensor, learning_rate: float | Tensor, decayed: int, weight_decay: float = 0.1, max_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, *,
    params: Tensor, grads: Tensor, m: Tensor, v: Tensor, step: Tensor, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """params, m, v and step (0-d float32, the number of steps done) move on by one. max_norm = inf does not clip."""
    p = params.numel()
    for name, x in (("params", params), ("grads", grads), ("m", m), ("v", v)):
        check_tensor(name, x, (p,), accumulation_dtype(params.dtype), params.device)
    check_tensor("norm", norm, (), params.dtype, params.device)
    check_tensor("step", step, (), torch.float32, params.device)
    if not 0 <= decayed <= p:
        raise ValueError(f"decayed: got {decayed}; accepted: 0 … {p}, the number of leading elements that decay")
    if not max_norm > 0.0:
        raise ValueError(f"max_norm: got {max_norm!r}; accepted: a number > 0, inf for no clipping")
    buffers = views(scratch, adamw_workspace(params), params.device, "adamw")
    grad_scale, found_inf = buffers["grad_scale"], buffers["found_inf"]
    grad_scale.copy_(norm).add_(1e-6).div_(max_norm).clamp_(min=1.0).nan_to_num_(nan=1.0, posinf=1.0)
    found_inf.copy_(norm).mul_(0.0).nan_to_num_(nan=1.0)  # 0 where norm is finite, else 0 · norm = NaN → 1
    step.add_(1.0).sub_(found_inf)
    on_cpu = params.device.type == "cpu"
    clips = not (on_cpu and grad_scale.item() == 1.0)
    before = params.dtype == torch.float64 or (on_cpu and _SLOW_FACTOR)
    if clips and before:
        grads.mul_(grad_scale.reciprocal_())
    for part, decay in ((slice(0, decayed), weight_decay), (slice(decayed, p), 0.0)):
        if part.start < part.stop:
            torch._fused_adamw_(
                [params[part]], [grads[part]], [m[part]], [v[part]], [], [step],
                lr=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=decay, eps=eps,
                amsgrad=False, maximize=False, grad_scale=grad_scale if clips and not before else None, found_inf=found_inf,
            )  # fmt: skip
