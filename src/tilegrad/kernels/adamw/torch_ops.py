"""AdamW by torch's fused kernel: one call for the elements with weight decay and one for those without, over all ranges.

The fused kernel accepts a clipping factor, but only in float32, and on aarch64 the factor makes it 1.3 times as slow. So on
aarch64, and for float64, a separate pass scales grads first. On a CPU a factor of 1 is skipped. grads is clipped in place.

Lean states are updated in blocks: each block is copied to float32, updated by the equations, and rounded. If norm is not
finite, both β count as 1, and learning rate and weight decay as 0, so a block is written back unchanged.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..guard import non_finite
from ..philox import Keys, round_keys
from ..scratch import Scratch, Shapes, TensorLike, blocks
from ..stochastic_rounding import HALF, MOMENTS, PARAMETERS, draw_words, round_stochastic, rounding_workspace

if TYPE_CHECKING:
    from . import Range, Update

_SLOW_FACTOR = platform.machine() == "aarch64"
BLOCK = 1 << 15  # elements of lean states that are updated at once
SCALARS = ("finite", "clip", "keep1", "take1", "keep2", "take2", "rate", "root", "decay", "eps")


def workspace(params: TensorLike, lean: bool = False) -> Shapes:
    if lean:
        n = min(BLOCK, -(-params.shape[0] // 4) * 4)
        floats: Shapes = dict.fromkeys("gmvp", ((n,), torch.float32))
        scalars: Shapes = {"exact": ((len(SCALARS),), torch.float64), "scalars": ((len(SCALARS),), torch.float32)}
        return floats | scalars | rounding_workspace(n) | {"skipped": ((), torch.bool)}
    return {"grad_scale": ((), params.dtype), "found_inf": ((), torch.float32)}


def step(update: Update, *, ranges: Sequence[Range], step: Tensor, scratch: Scratch) -> None:
    if ranges[0].lean:
        _lean_step(update, ranges, step, scratch)
        return
    norm, learning_rate, weight_decay, max_norm, betas, eps, _ = update
    grad_scale, found_inf = scratch["grad_scale"], scratch["found_inf"]
    grad_scale.copy_(norm).add_(1e-6).div_(max_norm).clamp_(min=1.0).nan_to_num_(nan=1.0, posinf=1.0)
    non_finite(norm, out=found_inf)
    step.add_(1.0).sub_(found_inf)
    on_cpu = norm.device.type == "cpu"
    clips = not (on_cpu and grad_scale.item() == 1.0)
    separately = norm.dtype == torch.float64 or (on_cpu and _SLOW_FACTOR)
    if clips and separately:
        grad_scale.reciprocal_()
        for each in ranges:
            each.grads.mul_(grad_scale)
    decays = [(each, slice(0, each.decayed)) for each in ranges]
    undecayed = [(each, slice(each.decayed, len(each.params))) for each in ranges]
    for parts, decay in ((decays, weight_decay), (undecayed, 0.0)):
        nonempty = [(each, i) for each, i in parts if i.start < i.stop]
        if nonempty:
            torch._fused_adamw_(
                [x.params[i] for x, i in nonempty],
                [x.grads[i] for x, i in nonempty],
                [x.m[i] for x, i in nonempty],
                [x.v[i] for x, i in nonempty],
                [],
                [step] * len(nonempty),
                lr=learning_rate,
                beta1=betas[0],
                beta2=betas[1],
                weight_decay=decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
                grad_scale=grad_scale if clips and not separately else None,
                found_inf=found_inf,
            )
    for each in ranges:
        if each.rounded is not None:
            each.rounded.copy_(each.params)


def _lean_step(update: Update, ranges: Sequence[Range], step: Tensor, scratch: Scratch) -> None:
    lean_scalars(update, step, scratch)
    torch.eq(scratch["exact"][0], 0.0, out=scratch["skipped"])
    keys = None if update.seed is None else round_keys(update.seed)
    for each in ranges:
        for part, first in each.parts():
            for i in blocks(len(part.params), BLOCK):
                _lean_block(part, i, first + i.start, step, keys, scratch)


def lean_scalars(update: Update, step: Tensor, scratch: Scratch) -> None:
    """Counts the step, and fills `scalars` (SCALARS): the factors in p −= decay · p, m = keep1 · m + take1 · g, …"""
    norm, learning_rate, weight_decay, max_norm, betas, eps, _ = update
    exact = dict(zip(SCALARS, scratch["exact"], strict=True))
    finite = non_finite(norm, out=exact["finite"]).neg_().add_(1.0)
    step.add_(finite)
    exact["clip"].copy_(norm).add_(1e-6).div_(max_norm).clamp_(min=1.0).reciprocal_().nan_to_num_(nan=0.0)
    for k, beta in enumerate(betas, start=1):
        exact[f"take{k}"].copy_(finite).mul_(1.0 - beta)
        exact[f"keep{k}"].copy_(finite).mul_(beta).sub_(finite).add_(1.0)
    for name, beta in (("rate", betas[0]), ("root", betas[1])):  # 1 − β^t
        exact[name].copy_(step).clamp_(min=1.0).mul_(math.log(beta)).expm1_().neg_()
    exact["root"].sqrt_().reciprocal_()
    exact["rate"].reciprocal_().mul_(finite).mul_(learning_rate)
    exact["decay"].copy_(finite).mul_(learning_rate).mul_(weight_decay)
    exact["eps"].fill_(eps)
    scratch["scalars"].copy_(scratch["exact"])


def _lean_block(each: Range, i: slice, first: int, step: Tensor, keys: Keys | None, scratch: Scratch) -> None:
    n = i.stop - i.start
    s = dict(zip(SCALARS, scratch["scalars"], strict=True))
    states = {"g": each.grads, "m": each.m, "v": each.v, "p": each.params}
    g, m, v, p = (scratch[name][:n].copy_(x[i]) for name, x in states.items())
    g.mul_(s["clip"]).masked_fill_(scratch["skipped"], 0.0)
    decayed = p[: max(each.decayed - i.start, 0)]
    decay = scratch["size"][: len(decayed)].view(torch.float32)
    decayed.sub_(torch.mul(decayed, s["decay"], out=decay))
    m.mul_(s["keep1"])
    v.mul_(s["keep2"])
    change = scratch["size"][:n].view(torch.float32)
    m.add_(torch.mul(g, s["take1"], out=change))
    v.add_(g.mul_(g).mul_(s["take2"]))
    torch.sqrt(v, out=change).mul_(s["root"]).add_(s["eps"])
    p.sub_(torch.mul(m, s["rate"], out=g).div_(change))
    if each.m.dtype == torch.bfloat16:
        assert keys is not None
        words = draw_words(first, n, step, MOMENTS, keys, scratch=scratch)
        round_stochastic(m, words, 0, out=each.m[i], scratch=scratch)
        round_stochastic(v, words, HALF, out=each.v[i], scratch=scratch)
    else:
        each.m[i].copy_(m)
        each.v[i].copy_(v)
    if each.params.dtype == torch.bfloat16:
        assert keys is not None
        words = draw_words(first, n, step, PARAMETERS, keys, scratch=scratch)
        round_stochastic(p, words, 0, out=each.params[i], scratch=scratch)
    else:
        each.params[i].copy_(p)
    if each.rounded is not None:
        each.rounded[i].copy_(each.params[i])
