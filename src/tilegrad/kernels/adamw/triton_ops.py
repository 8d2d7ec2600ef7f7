"""AdamW in Triton: one program computes the scalars, then one pass over each range of the arenas.

    decide   finite = norm is finite     t += finite      clip = 1 / max(1, (norm + 1e-6) / max_norm)
             rate = lr / (1 − β1^t)      root = 1 / √(1 − β2^t)      decay = lr · weight_decay
    pass     reads p, g, m, v, writes p, m, v and the rounded copy: 28 bytes per parameter, 30 with the copy

Powers of β are computed in float64 because 1 − β^t cancels. If norm is not finite, the programs of the pass return at once.
grads is only read.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import ceil_div, launch
from ..scratch import Scratch, Shapes, TensorLike

if TYPE_CHECKING:
    from . import Range

TILE, WARPS = 1 << 10, 4  # TILE: parameters per program


@triton.jit
def _decide_kernel(
    norm, learning_rate,
    step, decision,
    weight_decay, max_norm,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, RATE_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """decision = (finite, clip, rate, root, decay)"""
    length = tl.load(norm)
    finite = tl.where(length * 0.0 == 0.0, 1.0, 0.0)
    t = tl.load(step) + finite
    tl.store(step, t)
    rate = tl.load(learning_rate).to(tl.float32) if RATE_ON_DEVICE else learning_rate
    tl.store(decision, finite)
    tl.store(decision + 1, tl.math.div_rn(1.0, tl.maximum(1.0, tl.math.div_rn(length + 1e-6, max_norm))))
    correction1 = (1.0 - tl.exp(t.to(tl.float64) * LOG_BETA1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(t.to(tl.float64) * LOG_BETA2)).to(tl.float32)
    tl.store(decision + 2, tl.math.div_rn(rate, correction1))
    tl.store(decision + 3, tl.math.div_rn(1.0, tl.math.sqrt_rn(correction2)))
    tl.store(decision + 4, rate * weight_decay)


@triton.jit
def _adamw_kernel(
    decision, grads,
    weights, m, v, rounded,
    P, decayed, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
    TILE: tl.constexpr,
):  # fmt: skip
    if tl.load(decision) != 0.0:
        i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        here = i < P
        clip, rate = tl.load(decision + 1), tl.load(decision + 2)
        root, decay = tl.load(decision + 3), tl.load(decision + 4)

        g = tl.load(grads + i, mask=here, other=0.0) * clip
        m_new = beta1 * tl.load(m + i, mask=here, other=0.0) + one_minus_beta1 * g
        v_new = beta2 * tl.load(v + i, mask=here, other=0.0) + one_minus_beta2 * (g * g)
        p = tl.load(weights + i, mask=here, other=0.0)

        p -= tl.where(i < decayed, decay, 0.0) * p
        p -= tl.math.div_rn(rate * m_new, tl.math.sqrt_rn(v_new) * root + eps)

        tl.store(m + i, m_new, mask=here)
        tl.store(v + i, v_new, mask=here)
        tl.store(weights + i, p, mask=here)
        if rounded is not None:
            tl.store(rounded + i, p.to(rounded.dtype.element_ty), mask=here)


def workspace(params: TensorLike) -> Shapes:
    return {"decision": ((5,), torch.float32)}


def step(
    norm: Tensor, learning_rate: float | Tensor, weight_decay: float, max_norm: float, betas: tuple[float, float],
    eps: float, *, ranges: Sequence[Range], step: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    (beta1, beta2), decision = betas, scratch["decision"]
    logs = {"LOG_BETA1": math.log(beta1), "LOG_BETA2": math.log(beta2)}
    given, on_device = (norm, learning_rate, step, decision, weight_decay, max_norm), isinstance(learning_rate, Tensor)
    launch(_decide_kernel, (1,), *given, **logs, RATE_ON_DEVICE=on_device, num_warps=1)
    factors = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps)
    for params, grads, m, v, rounded, decayed in ranges:
        p = len(params)
        tensors = (decision, grads, params, m, v, rounded)
        launch(_adamw_kernel, (ceil_div(p, TILE),), *tensors, p, decayed, *factors, TILE=TILE, num_warps=WARPS)
