"""AdamW in Triton: one program computes the scalars, then one pass over each range of the arenas.

    decide   finite = norm is finite     t += finite      clip = 1 / max(1, (norm + 1e-6) / max_norm)
             rate = lr / (1 − β1^t)      root = 1 / √(1 − β2^t)      decay = lr · weight_decay
    pass     reads p, g, m, v, writes p, m, v and the rounded copy: 28 bytes per parameter, 30 with the copy

Powers of β are computed in float64 because 1 − β^t cancels. If norm is not finite, the programs of the pass return at once.
grads is only read.

Lean states are read exactly, and their new values rounded stochastically (kernels/stochastic_rounding.py). One draw of Philox
gives the words of four elements. With bfloat16 moments the pass moves 20 bytes per parameter, 22 with the copy; with everything
in bfloat16 it moves 14.
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
from ..stochastic_rounding import HALF, MOMENTS, PARAMETERS

if TYPE_CHECKING:
    from . import Range, Update

TILE, WARPS = 1 << 10, 4  # TILE: parameters per program


@triton.jit
def _decide_kernel(
    norm,
    learning_rate,
    step,
    decision,
    weight_decay,
    max_norm,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
):
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
def _words(seed, step, index, STREAM: tl.constexpr, TILE: tl.constexpr):
    """The TILE words word(index), word(index + 1), …, uint32. `index` is a multiple of 4."""
    quad = index // 4 + tl.arange(0, TILE // 4)
    zero = tl.zeros([TILE // 4], tl.uint32)
    t = tl.load(step).to(tl.uint32)
    low, high = (quad & 0xFFFFFFFF).to(tl.uint32), (quad >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed), low, high, zero + t, zero + STREAM)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def stochastic(x, bits):
    """x rounded stochastically to bfloat16, as float32: r(x) of kernels/stochastic_rounding.py. bits: uint32 below 2¹⁶"""
    word = x.to(tl.uint32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    total = (word + tl.where(magnitude > 0x7F7F0000, 0, bits)) & 0xFFFF0000
    return tl.where(magnitude > 0x7F800000, 0x7FC00000, total).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _adamw_kernel(
    decision, grads,
    weights, m, v, rounded,
    P, decayed, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
    seed, step, index,
    MOMENTS: tl.constexpr, PARAMETERS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if tl.load(decision) != 0.0:
        i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = i < P
        clip, rate = tl.load(decision + 1), tl.load(decision + 2)
        root, decay = tl.load(decision + 3), tl.load(decision + 4)

        g = tl.load(grads + i, mask=inside, other=0.0).to(tl.float32) * clip
        m_new = beta1 * tl.load(m + i, mask=inside, other=0.0).to(tl.float32) + one_minus_beta1 * g
        v_new = beta2 * tl.load(v + i, mask=inside, other=0.0).to(tl.float32) + one_minus_beta2 * (g * g)
        p = tl.load(weights + i, mask=inside, other=0.0).to(tl.float32)

        p -= tl.where(i < decayed, decay, 0.0) * p
        p -= tl.math.div_rn(rate * m_new, tl.math.sqrt_rn(v_new) * root + eps)

        first = tl.program_id(0).to(tl.int64) * TILE
        if m.dtype.element_ty == tl.bfloat16:
            words = _words(seed, step, index + first, MOMENTS, TILE)
            m_new = stochastic(m_new, words & 0xFFFF).to(tl.bfloat16)
            v_new = stochastic(v_new, words >> HALF).to(tl.bfloat16)
        if weights.dtype.element_ty == tl.bfloat16:
            words = _words(seed, step, index + first, PARAMETERS, TILE)
            p = stochastic(p, words & 0xFFFF).to(tl.bfloat16)

        tl.store(m + i, m_new, mask=inside)
        tl.store(v + i, v_new, mask=inside)
        tl.store(weights + i, p, mask=inside)
        if rounded is not None:
            tl.store(rounded + i, p.to(rounded.dtype.element_ty), mask=inside)


def workspace(params: TensorLike, lean: bool = False) -> Shapes:
    return {"decision": ((5,), torch.float32)}


def step(update: Update, *, ranges: Sequence[Range], step: Tensor, scratch: Scratch) -> None:
    norm, learning_rate, weight_decay, max_norm, (beta1, beta2), eps, seed = update
    decision = scratch["decision"]
    logs = {"LOG_BETA1": math.log(beta1), "LOG_BETA2": math.log(beta2)}
    given, on_device = (norm, learning_rate, step, decision, weight_decay, max_norm), isinstance(learning_rate, Tensor)
    launch(_decide_kernel, (1,), *given, **logs, RATE_ON_DEVICE=on_device, num_warps=1)
    factors = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps)
    constants = {"MOMENTS": MOMENTS, "PARAMETERS": PARAMETERS, "HALF": HALF, "TILE": TILE, "num_warps": WARPS}
    for each in ranges:
        for part, first in each.parts() if each.rounds else [(each, None)]:
            p, t = len(part.params), None if first is None else step
            tensors = (decision, part.grads, part.params, part.m, part.v, part.rounded)
            numbers = (p, part.decayed, *factors, None if first is None else seed, t, first)
            launch(_adamw_kernel, (ceil_div(p, TILE),), *tensors, *numbers, **constants)
