"""The oracle of dilated attention (T×T masks, a softmax per branch, gradients by autograd) and the error bounds of kernels.

Position t is in segment t div s at place t mod s. A branch covers place p if p ≥ offset and r divides p − offset.

The bounds of attention apply (kernels/attention/bounds.py), because dilated attention is attention with a bias: if pair
(i, j) attends in n branches, bias = log n. A kernel also rounds these intermediate numbers to q's dtype, once each:

    y     "head_groups": o before it is divided by G. "longnet": part_b = softmax_b(lse_b) o_b of every branch but the first,
          and the mix of the branches so far
    delta reads y and do, so it has the roundings of y; "head_groups": also the rounding of o = G y
    do    "head_groups": dy / G
    dq …  "longnet": the term of every branch but the first, and the sum so far

A product or quotient by a power of two is exact.

lse has the error of the worst branch, plus four roundoffs of the accumulation dtype per mix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.attention import reference
from ...kernels.attention.bounds import bounds as attention_bounds
from ...kernels.attention.mask import Mask
from ...kernels.closeness import Bound, rounding, roundoff
from ...kernels.scratch import accumulation_dtype


def covered(t: int, segment: int, rate: int, offset: int) -> Tensor:
    """Which of T positions a branch covers, (T,) bool."""
    place = torch.arange(t) % min(segment, t)
    return (place >= offset) & ((place - offset) % rate == 0)


def pairs(
    h: int, t: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *, mode: str, causal: bool
) -> Tensor:
    """Which pairs attend in which branch, (branches, H, T, T) bool."""
    n, position = len(segment_lengths), torch.arange(t)
    groups = [g for g in range(n) for _ in range(h // n + (g < h % n))]
    out = torch.zeros(n, h, t, t, dtype=torch.bool)
    for g, (segment, rate) in enumerate(zip(segment_lengths, dilation_rates, strict=True)):
        number = position // min(segment, t)
        for head in range(h):
            if mode == "longnet" or groups[head] == g:
                at = covered(t, segment, rate, (g if mode == "head_groups" else head) % rate)
                out[g, head] = (number[:, None] == number) & at[:, None] & at
    return out & (position[:, None] >= position) if causal else out


def dilated(q: Tensor, k: Tensor, v: Tensor, attended: Tensor, *, mode: str) -> Tensor:
    """y (B, H, T, Dv) in q's dtype for the result of `pairs`; in float64 it is the oracle."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    parts, lses = [], []
    for pairs_of in attended.to(q.device):
        at = pairs_of.any(-1, keepdim=True)
        masked = s.masked_fill(~pairs_of, -torch.inf)
        p = torch.softmax(masked.masked_fill(~at, 0.0), -1) * at
        parts.append(p @ v)
        lses.append(masked.masked_fill(~at, 0.0).logsumexp(-1).masked_fill(~at[..., 0], -torch.inf))
    if mode == "head_groups":
        return torch.stack(parts).sum(0) / len(parts)
    lse = torch.stack(lses)
    has_keys = (lse > -torch.inf).any(0)
    share = torch.softmax(lse.masked_fill(~has_keys, 0.0), 0)
    return (share[..., None] * torch.stack(parts)).sum(0) * has_keys[..., None]


def gradients(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, attended: Tensor, *, mode: str) -> dict[str, Tensor]:
    """y and its gradients in float64, by name."""
    q, k, v = leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    y = dilated(q, k, v, attended, mode=mode)
    grads = torch.autograd.grad(y, leaves, dy.double())
    return {"o": y.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dy: Tensor,
    attended: Tensor,
    exact: dict[str, Tensor],
    *,
    mode: str,
    exp_error: float = 0.0,
) -> dict[str, Bound]:
    """Bounds of y, named "o", and its gradients. `attended`: branches in the order in which they are mixed."""
    # Longer than 60 lines because the formulas use variables from many lines above.
    dtype, acc = q.dtype, roundoff(accumulation_dtype(q.dtype))
    attended = attended.to(q.device)
    groups = mode == "head_groups"
    g = len(attended) if groups else 1
    if groups:
        attended = attended.any(0, keepdim=True)
    n, count = len(attended), attended.sum(0)
    mask = Mask(bias=count.double().log()[None])
    q64, k64, v64, do, scale = q.double(), k.double(), v.double(), dy.double() / g, q.shape[-1] ** -0.5
    undivided = {**exact, "o": g * exact["o"], "dbias": torch.zeros_like(count, dtype=torch.float64)[None]}
    base = attention_bounds(q, k, v, do, None, mask, undivided, exp_error)
    branch_lse = [
        attention_bounds(q, k, v, do, None, Mask(bias=one[None]), undivided, exp_error)["lse"].accumulated
        for one in attended
    ]
    p, _, lse, _ = reference.softmax(q64, k64, mask, range(q.shape[0]))
    dp = do @ v64.mT
    delta = (do * undivided["o"]).sum(-1)
    ds = p * (dp - delta[..., None])
    share = attended / count.clamp(min=1)
    parts = {
        "o": [(p * s) @ v64 for s in share],
        "dq": [scale * ((ds * s) @ k64) for s in share],
        "dk": [scale * ((ds * s).mT @ q64) for s in share],
        "dv": [(p * s).mT @ do for s in share],
    }
    rounded = {name: _roundings(of, dtype) for name, of in parts.items()}
    rounded_o = rounding(undivided["o"], dtype) * (g & (g - 1) > 0) if groups else rounded["o"]
    rounded_do = rounding(do, dtype) * (g & (g - 1) > 0)
    var_delta = ((2 if groups else 1) * rounded_o * do**2).sum(-1)

    e_lse = torch.stack(branch_lse).max(0).values + acc * (
        4 * n + lse.masked_fill(lse == -math.inf, 0.0).abs() + math.log(g)
    )
    e_o = e_lse[..., None] * sum(x.abs() for x in parts["o"]) + acc * 8 * n * sum(x.abs() for x in parts["o"])
    e_delta = (do**2 * e_o**2).sum(-1).sqrt() + e_lse * delta.abs()
    e_ds = ((ds * e_lse[..., None]) ** 2 + (p * e_delta[..., None]) ** 2).mT
    extra = {
        "o": (rounded_o, e_o),
        "dq": (
            rounded["dq"] + scale**2 * var_delta[..., None] * (p @ k64) ** 2,
            scale * (e_lse[..., None] * (ds @ k64).abs() + e_delta[..., None] * (p @ k64).abs()),
        ),
        "dk": (rounded["dk"] + scale**2 * ((p**2 * var_delta[..., None]).mT @ q64**2), scale * (e_ds @ q64**2).sqrt()),
        "dv": (rounded["dv"], ((p * e_lse[..., None]) ** 2).mT.matmul(do**2).sqrt()),
    }
    along = {
        "o": (rounded_o * undivided["o"] ** 2).sum(),
        "dq": (var_delta * (p * (scale * (exact["dq"] @ k64.mT))).sum(-1) ** 2).sum(),
        "dk": (var_delta * (p * (scale * (q64 @ exact["dk"].mT))).sum(-1) ** 2).sum(),
        "dv": torch.zeros((), dtype=torch.float64, device=q.device),
    }
    by_do = _roundings_of_do(rounded_do, p, q64, k64, v64, undivided, scale)
    out = {}
    for name, (var, accumulated) in extra.items():
        shared = along[name] + (0.0 if name == "o" else (rounded[name] * exact[name] ** 2).sum())
        var, shared = var + by_do[name][0], shared + by_do[name][1]
        slope = (torch.as_tensor(base[name].slope).square() + shared).sqrt()
        bound = Bound((base[name].sigma ** 2 + var).sqrt(), base[name].accumulated + accumulated, slope)
        by = g if name == "o" else 1
        out[name] = Bound(bound.sigma / by, bound.accumulated / by, slope / by**2)
    return out


def _roundings(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The variance of rounding all parts but the first, and all partial sums but the last."""
    total, so_far = torch.zeros_like(parts[0]), parts[0]
    for part in parts[1:]:
        total = total + rounding(part, dtype) + rounding(so_far, dtype)
        so_far = so_far + part
    return total


def _roundings_of_do(
    var: Tensor, p: Tensor, q: Tensor, k: Tensor, v: Tensor, exact: dict[str, Tensor], scale: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """How rounding errors δ of do, with variance `var`, change each result: (σ², variance along the slope). c is a
    column of do:

    dv_jc errs by Σᵢ pᵢⱼ δᵢc          dsᵢⱼ by pᵢⱼ Σ_c δᵢc (v_jc − o_ic)
    """
    o, zero = exact["o"], torch.zeros((), dtype=torch.float64, device=q.device)
    if not var.any():
        return dict.fromkeys(("o", "dq", "dk", "dv"), (zero, zero))
    by_column = torch.einsum("bhij,bhjc,bhjd->bhicd", p, v, k) - torch.einsum("bhic,bhij,bhjd->bhicd", o, p, k)
    by_pair = var @ (v**2).mT - 2 * (var * o) @ v.mT + (var * o**2).sum(-1, keepdim=True)

    def along(c: Tensor) -> Tensor:
        """The variance of Σ cᵢⱼ dsᵢⱼ."""
        return (var * ((p * c) @ v - o * (p * c).sum(-1, keepdim=True)) ** 2).sum()

    return {
        "o": (zero, zero),
        "dq": (scale**2 * torch.einsum("bhic,bhicd->bhid", var, by_column**2), along(scale * (exact["dq"] @ k.mT))),
        "dk": (scale**2 * ((p**2 * by_pair).mT @ q**2), along(scale * (q @ exact["dk"].mT))),
        "dv": ((p**2).mT @ var, (var * (p @ exact["dv"]) ** 2).sum()),
    }
