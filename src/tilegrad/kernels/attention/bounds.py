"""What attention's outputs may err by: σ and a B of ../closeness.py, of the formulas of reference.py.

A kernel may round r = p ∘ keep / (1 − dropout_p) (before r v and rᵀ do), dx (before dx k and dxᵀ q) and o (of which delta is
formed) to q's dtype, once each. All else is formed in the accumulator: scores, their sums, lse, delta, dp, dbias, dsinks.
With var(x) = u² x² / 3, the variance of one rounding, and g = 1 − tanh²(x / c), which is 1 without a softcap:

    σ²(o)      = Σⱼ var(rᵢⱼ) vⱼ²                                            lse has none
    σ²(delta)  = Σⱼ var(rᵢⱼ) (doᵢ·vⱼ)² + Σ var(oᵢ) doᵢ²                      one number for the row: dsᵢⱼ errs by −pᵢⱼ times it
    σ²(dv)     = Σᵢ var(rᵢⱼ) doᵢ²
    σ²(dq)     = scale² (Σⱼ var(dxᵢⱼ) kⱼ² + σ²(deltaᵢ) (Σⱼ (p g)ᵢⱼ kⱼ)²)
    σ²(dk)     = scale² Σᵢ (var(dxᵢⱼ) + σ²(deltaᵢ) (p g)ᵢⱼ²) qᵢ²
    σ²(dbias)  = Σ σ²(deltaᵢ) pᵢⱼ²                                          (Σⱼ pᵢⱼ)² where a number of bias is a whole row's
    σ²(dsinks) = Σ σ²(deltaᵢ) p_sinkᵢ²

The numbers of a row share these roundings. The slope's variance counts each of them once, times what it changes ⟨x, x64⟩ by:

    o, dv      Σ var(rᵢⱼ) (oᵢ·vⱼ)²,  Σ var(rᵢⱼ) (doᵢ·dvⱼ)²
    dq, dk     Σ var(dxᵢⱼ) cᵢⱼ² + Σᵢ σ²(deltaᵢ) (Σⱼ (p g)ᵢⱼ cᵢⱼ)²             cᵢⱼ = scale dqᵢ·kⱼ,  scale qᵢ·dkⱼ

B is in units of a; that of a sum of n terms is √n Σ|terms| + Σ B(terms):

    B(s)     = |scale| Σ|q||k| (√D + 3) + |bias| + |slope · distance|        the product, then scale, base 2 and shift
    B(lse)   = Σⱼ pᵢⱼ B(sᵢⱼ) + √Tk + |lse| + 4                               the sum of exponentials, exp and log
    B(p)     = p (B(s) + B(lse))                                            p = exp(s − lse)
    B(ds)    = p (|do||v| + |delta|) (B(s) + B(lse) + √Dv + 2) + p B(delta)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..closeness import Bound, accumulator, rounding, roundoff
from . import reference
from .mask import Mask, distance, four_dims, packed, sequences

Exact = Mapping[str, Tensor]


def bounds(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, exact: Exact
) -> dict[str, Bound]:
    """Of every output of a call, by name, from whole T×T matrices of float64. `exact` is the oracle's; slopes are along it."""
    if mask.varlen:
        return _bounds_varlen(q, k, v, do, dlse, mask, exact)
    return _bounds(q, k, v, do, dlse, mask, exact, range(q.shape[0]))


def _bounds(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, exact: Exact, batch: range
) -> dict[str, Bound]:
    dtype, a, kv = q.dtype, roundoff(accumulator(q.dtype)), k
    q, k, v, do = (x.double() for x in (q, k, v, do))
    k, v = reference._heads_of(k, like=q), reference._heads_of(v, like=q)
    (tq, d), (tk, dv), scale = q.shape[2:], (k.shape[2], v.shape[3]), mask.scale_for(q.shape[3])
    sums = q.shape[1] // max(1, kv.shape[1]) * tq  # terms of a number of dk and dv
    p, p_sink, lse, tanh = reference.softmax(q, k, mask, batch)
    empty = lse == -math.inf
    keep = reference._dropout(torch.ones_like(p), mask, batch)
    r, g = p * keep, torch.ones_like(p) if tanh is None else 1.0 - tanh**2
    dlse = torch.zeros_like(lse) if dlse is None else dlse.double().masked_fill(empty, 0.0)

    o, dr = r @ v, do @ v.mT
    delta = (do * o).sum(-1) - dlse
    ds = p * (dr * keep - delta[..., None])
    dx, pg = ds * g, p * g
    var_r, var_dx = rounding(r, dtype), rounding(dx, dtype)
    var_delta = (var_r * dr**2).sum(-1) + (rounding(o, dtype) * do**2).sum(-1)

    x_abs = abs(scale) * (q.abs() @ k.abs().mT) * (math.sqrt(d) + 3)
    s_abs = _shifted(x_abs, mask, batch).masked_fill(p == 0, 0.0)
    b_lse = (p * s_abs).sum(-1) + math.sqrt(tk) + 4 + lse.masked_fill(empty, 0.0).abs()
    b_p = p * (s_abs + b_lse[..., None])
    av, ado, ak, aq = (x.abs() for x in (v, do, k, q))
    o_abs = r @ av
    b_o = (b_p * keep) @ av + (math.sqrt(tk) + 2) * o_abs
    delta_abs = (ado * o_abs).sum(-1) + dlse.abs()
    b_delta = (ado * b_o).sum(-1) + (math.sqrt(dv) + 1) * delta_abs
    dp_abs = (ado @ av.mT) * keep + delta_abs[..., None]
    b_ds = dp_abs * (b_p + p * (math.sqrt(dv) + 2)) + p * b_delta[..., None]
    b_dx = b_ds if tanh is None else b_ds * g + ds.abs() * _tanh_error(tanh, x_abs, mask.softcap)

    def along(c: Tensor) -> Tensor:
        """The variance of Σ cᵢⱼ dxᵢⱼ."""
        return (var_dx * c**2).sum() + (var_delta * (pg * c).sum(-1) ** 2).sum()

    def to_kv(x: Tensor) -> Tensor:
        return reference._summed_to_heads_of(x, like=kv)

    dk64, dv64 = (reference._heads_of(exact[name], like=q) for name in ("dk", "dv"))
    var: dict[str, tuple[Tensor, Tensor | None]] = {  # σ², and the slope's
        "o": (var_r @ v**2, (var_r * (exact["o"] @ v.mT) ** 2).sum()),
        "lse": (torch.zeros_like(lse), lse.new_zeros(())),
        "dq": (
            scale**2 * (var_dx @ k**2 + var_delta[..., None] * (pg @ k) ** 2),
            along(scale * (exact["dq"] @ k.mT)),
        ),
        "dk": (
            to_kv(scale**2 * ((var_dx + pg**2 * var_delta[..., None]).mT @ q**2)),
            along(scale * (q @ dk64.mT)),
        ),
        "dv": (to_kv(var_r.mT @ do**2), (var_r * (do @ dv64.mT) ** 2).sum()),
    }
    b = {  # B
        "o": b_o,
        "lse": b_lse,
        "dq": abs(scale) * ((b_dx + (math.sqrt(tk) + 2) * dx.abs()) @ ak),
        "dk": to_kv(abs(scale) * ((b_dx + (math.sqrt(sums) + 2) * dx.abs()).mT @ aq)),
        "dv": to_kv((b_p * keep + (math.sqrt(sums) + 2) * r).mT @ ado),
    }
    if mask.float_bias is not None:
        shape = four_dims(mask.float_bias).shape
        terms = math.sqrt(ds.numel() / max(1, mask.float_bias.numel()))
        squares = p.sum(-1, keepdim=True) ** 2 if shape[3] == 1 else p**2
        along_rows = (var_delta * (p * exact["dbias"].reshape(shape)).sum(-1) ** 2).sum()
        var["dbias"] = (squares * var_delta[..., None]).sum_to_size(shape).reshape(mask.float_bias.shape), along_rows
        b["dbias"] = (b_ds + terms * ds.abs()).sum_to_size(shape).reshape(mask.float_bias.shape)
    if p_sink is not None and mask.sinks is not None:
        var_sinks = (p_sink**2 * var_delta).sum((0, 2))
        relative = mask.sinks.double().abs()[:, None] + b_lse + math.sqrt(delta[:, 0].numel())
        var["dsinks"] = var_sinks, None  # each head has rows of its own
        b["dsinks"] = (p_sink * (delta_abs * relative + b_delta)).sum((0, 2))
    return {
        name: Bound(of.sqrt(), a * b[name], None if of_slope is None else of_slope.sqrt())
        for name, (of, of_slope) in var.items()
    }


def _shifted(s_abs: Tensor, mask: Mask, batch: range) -> Tensor:
    """B(s) of B(x): |bias| and |slope · distance| added."""
    if mask.float_bias is not None:
        s_abs = s_abs + mask.float_bias.double().abs()
    slopes = mask.slopes(batch)
    if slopes is not None:
        tq, tk = s_abs.shape[2:]
        gap = distance(torch.arange(tq, device=s_abs.device), torch.arange(tk, device=s_abs.device), tq, tk)
        s_abs = s_abs + slopes.double().abs()[..., None, None] * gap.abs()
    return s_abs


def _tanh_error(tanh: Tensor, x_abs: Tensor, softcap: float) -> Tensor:
    """B(g) of g = 1 − tanh²(x / c)."""
    return 1.0 + 2.0 * tanh.abs() * ((1.0 - tanh**2) * x_abs / softcap + 2.0 * tanh.abs())


def _bounds_varlen(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, exact: Exact
) -> dict[str, Bound]:
    assert mask.cu_seqlens_q is not None and mask.cu_seqlens_k is not None
    parts = []
    for b, rows, cols in sequences(mask.cu_seqlens_q, mask.cu_seqlens_k):
        of = packed(q, rows), packed(k, cols), packed(v, cols), packed(do, rows)
        own = {name: packed(exact[name], cols if name in ("dk", "dv") else rows) for name in ("o", "dq", "dk", "dv")}
        parts.append(_bounds(*of, None if dlse is None else dlse[None, :, rows], mask, own, range(b, b + 1)))
    out = {}
    for name in parts[0]:
        sigmas, accumulated = ([part[name][x] for part in parts] for x in (0, 1))
        if name == "dsinks":
            out[name] = Bound(torch.stack(sigmas).square().sum(0).sqrt(), torch.stack(accumulated).sum(0))
            continue
        slope = torch.stack([torch.as_tensor(part[name].slope) for part in parts]).square().sum().sqrt()
        whole = (torch.cat(x, 2)[0] for x in (sigmas, accumulated))  # (1, H, T, …) each
        out[name] = Bound(*(x if name == "lse" else x.transpose(0, 1) for x in whole), slope)
    return out
