"""Error bounds of attention's outputs, derived from the formulas of reference.py. ../closeness.py defines σ, B, u, a and slope.

A kernel may round r = p ∘ keep / (1 − dropout_p) (before r v and rᵀ do), dx (before dx k and dxᵀ q) and o (before delta)
to q's dtype, once each. Everything else is computed in the accumulator: scores, their sums, lse, delta, dp, dbias, dsinks.
Let var(x) = u² x² / 3 be the variance of one rounding, and g = 1 − tanh²(x / c), or 1 without a softcap:

    σ²(o)      = Σⱼ var(rᵢⱼ) vⱼ²                                            σ²(lse) = 0
    σ²(delta)  = Σⱼ var(rᵢⱼ) (doᵢ·vⱼ)² + Σ var(oᵢ) doᵢ²                      shared by row i: dsᵢⱼ errs by −pᵢⱼ times this error
    σ²(dv)     = Σᵢ var(rᵢⱼ) doᵢ²
    σ²(dq)     = scale² (Σⱼ var(dxᵢⱼ) kⱼ² + σ²(deltaᵢ) (Σⱼ (p g)ᵢⱼ kⱼ)²)
    σ²(dk)     = scale² Σᵢ (var(dxᵢⱼ) + σ²(deltaᵢ) (p g)ᵢⱼ²) qᵢ²
    σ²(dbias)  = Σ σ²(deltaᵢ) pᵢⱼ²                                          (Σⱼ pᵢⱼ)² for a bias that is broadcast over columns
    σ²(dsinks) = Σ σ²(deltaᵢ) p_sinkᵢ²

The elements of a row share these roundings. The slope's variance counts each rounding once, with its effect on ⟨x, x64⟩:

    o, dv      Σ var(rᵢⱼ) (oᵢ·vⱼ)²,  Σ var(rᵢⱼ) (doᵢ·dvⱼ)²
    dq, dk     Σ var(dxᵢⱼ) cᵢⱼ² + Σᵢ σ²(deltaᵢ) (Σⱼ (p g)ᵢⱼ cᵢⱼ)²             cᵢⱼ = scale dqᵢ·kⱼ,  scale qᵢ·dkⱼ

The accumulator's roundings are independent too. In units of a, V is the variance of errors that each pair has separately, and
B is six standard deviations of an error that a row shares. A sum of n terms t rounds its partial sums s, which adds
Σ s² / 3 ≈ n ((Σt)² / 3 + Σt² / 6) / 3 to V:

    V(x)     = scale² D ((q·k)² / 3 + Σ (q k)² / 6) / 3 + x²                  the dot product, then scale
    V(s)     = V(x) + (bias² + (slope · distance)²) / 3
    V(exp)   = ((s − lse)² + 16) / 3                                        exp errs by up to 4, or by the kernel's exp_error
    B(lse)   = 6 √Σⱼ pᵢⱼ² (V(s) + V(exp)) + B(Σ p) + |lse| + 4

**Large scores.** The error δ of a score s can be |s| a, but p must err less. The forward's maximum, lse and the backward's p
are computed from the same rounded scores, bit for bit. So lse contains the errors δ too. The relative error of pᵢⱼ is thus
δⱼ − Σₖ pᵢₖ δₖ. It is 0 if one key has all the probability of a row, however large its score is. Only the rounding of lse
remains. The row's maximum m has the accumulator's dtype, so rounding m + log Σ errs by at most log Σ = −log max p:

    B(row)   = B(Σ p) + 4 + min(|lse|, −log max p / a)                      shared: relative error of every p of the row
    V(o)     = Σⱼ pᵢⱼ² (V(s) + V(exp)) (keepᵢⱼ vⱼ − oᵢ)²                      effect of a row's errors of s and exp on o
    B(delta) = 6 √Σⱼ pᵢⱼ² (V(s) + V(exp)) (dpᵢⱼ − do·o)² + B(row) |do·o| + B(Σ do o) + |delta|
                                                                            shared: dsᵢⱼ errs by −pᵢⱼ times this error
    V(p)/p²  = (1 − pᵢⱼ)² V(sᵢⱼ) + Σ_{k≠j} pᵢₖ² V(sᵢₖ) + Σₖ pᵢₖ² V(exp)         the backward's p, without the error of its exp
    V(dq)    = scale² (Σⱼ V(sᵢⱼ) (dxᵢⱼ kⱼ − pᵢⱼ Σₖ dxᵢₖ kₖ)² + Σₖ pᵢₖ² V(exp) (Σₖ dxᵢₖ kₖ)²)      without V(ds)
    V(ds)    = ds² (V(exp) + 1) + p² (V(dp) + (dp² + delta²) / 3)             ds² · V(p)/p² is added to it

A GPU flushes p and ds below the accumulator's smallest normal number to 0. That adds Σⱼ rᵢⱼ |vⱼ| over the flushed pairs to the
error of o, and similar sums to the errors of dv, dq, dk and dbias. Any output below that number may itself be flushed to 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor

from ..closeness import SIGMAS, Bound, rounding, roundoff
from ..scratch import accumulation_dtype
from . import reference
from .mask import Mask, distance, four_dims, packed, sequences

Exact = Mapping[str, Tensor]


def bounds(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, exact: Exact, exp_error: float = 0.0
) -> dict[str, Bound]:
    """The bound of every output by name, from whole T×T matrices in float64. `exact` has the oracle's outputs, which the slope
    test compares with. `exp_error` is the relative error of the kernel's exp if that is larger than 4 a."""
    exp = max(4.0, exp_error / roundoff(accumulation_dtype(q.dtype)))
    if mask.varlen:
        return _bounds_varlen(q, k, v, do, dlse, mask, exact, exp)
    return _bounds(q, k, v, do, dlse, mask, exact, exp, range(q.shape[0]))


def _bounds(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, exact: Exact, exp: float, batch: range
) -> dict[str, Bound]:
    # Longer than 60 lines: the formulas of the docstring in their order, which share many intermediate results.
    dtype, a, kv = q.dtype, roundoff(accumulation_dtype(q.dtype)), k
    if dtype == torch.float64:
        a *= 2  # the oracle is in float64 too, and its roundings are as large
    q, k, v, do = (x.double() for x in (q, k, v, do))
    k, v = reference._heads_of(k, like=q), reference._heads_of(v, like=q)
    (tq, d), (tk, dv), scale = q.shape[2:], (k.shape[2], v.shape[3]), mask.scale_for(q.shape[3])
    sums = q.shape[1] // max(1, kv.shape[1]) * tq  # terms of the sum in one element of dk or dv
    p, p_sink, lse, tanh = reference.softmax(q, k, mask, batch)
    empty = lse == -math.inf
    q2, k2, v2, do2, p2 = (x.square() for x in (q, k, v, do, p))
    dlse = torch.zeros_like(lse) if dlse is None else dlse.double().masked_fill(empty, 0.0)

    r, dr = p, do @ v.mT
    dp, keep2 = dr, torch.ones(())
    if mask.dropout_p:
        keep = reference._dropout(p, mask, batch)(torch.ones_like(p))
        r, dp, keep2 = p * keep, dr * keep, keep.square()
    o = r @ v
    delta = (do * o).sum(-1) - dlse
    ds = p * (dp - delta[..., None])
    dx, pg, g = ds, p, torch.ones(())
    if tanh is not None:
        g = 1.0 - tanh.square()
        dx, pg = ds * g, p * g
    r2, ds2, dx2 = r.square(), ds.square(), dx.square()
    var_r, var_dx = rounding(r, dtype), rounding(dx, dtype)
    var_delta = (var_r * dr.square()).sum(-1) + (rounding(o, dtype) * do2).sum(-1)

    x, do_o = scale * (q @ k.mT), (do * o).sum(-1)
    v_x = _partial_sums(x, scale**2 * (q2 @ k2.mT), d) + x.square()
    v_s = (v_x + _shifts(p, mask, batch) / 3 + (0.0 if tanh is None else 5 * x.square())).masked_fill(p == 0, 0.0)
    v_exp = ((torch.where(p > 0, p.log(), 0.0).square() + exp**2) / 3).masked_fill(p == 0, 0.0)
    row, v_exp_sum, v_pairs = _Row(p, v_s), (p2 * v_exp).sum(-1, keepdim=True), p2 * (v_s + v_exp)
    largest = row.largest_of(p) if p_sink is None else torch.maximum(row.largest_of(p), p_sink)
    size = lse.masked_fill(empty, 0.0).abs()
    b_sum = _of_a_sum(torch.ones_like(lse), p2.sum(-1), tk) + exp
    b_lse = SIGMAS * v_pairs.sum(-1).sqrt() + b_sum + size
    b_row = b_sum + torch.minimum(size, -largest.masked_fill(empty, 1.0).log() / a)
    v_p, b_o = row.relative() + v_exp_sum, _of_a_sum(o, r2 @ v2, tk) + 2 * o.abs()
    v_delta = (v_pairs * (dp - do_o[..., None]).square()).sum(-1)
    b_delta = SIGMAS * v_delta.sqrt() + b_row * do_o.abs() + (do2 * b_o.square()).sum(-1).sqrt()
    b_delta = b_delta + _of_a_sum(do_o, (do * o).square().sum(-1), dv) + delta.abs() + dlse.abs()
    v_dp = keep2 * (_partial_sums(dr, do2 @ v2.mT, dv) + dr.square())
    v_ds = ds2 * (v_exp + 1) + p2 * (v_dp + (dp.square() + delta[..., None].square()) / 3)
    v_dx = v_ds if tanh is None else v_ds * g**2 + ds2 * _tanh_variance(tanh, v_x, mask.softcap)
    shared_dx = (dx * b_row[..., None]).square() + (pg * b_delta[..., None]).square()

    def along(c: Tensor) -> Tensor:
        """The variance of Σ cᵢⱼ dxᵢⱼ."""
        return (var_dx * c.square()).sum() + (var_delta * (pg * c).sum(-1).square()).sum()

    def to_kv(x: Tensor) -> Tensor:
        return reference._summed_to_heads_of(x, like=kv)

    dxk, dxq, pgk = dx @ k, to_kv(dx.mT @ q), pg @ k
    dk64, dv64 = (reference._heads_of(exact[name], like=q) for name in ("dk", "dv"))
    var: dict[str, tuple[Tensor, Tensor | None]] = {  # σ², and the slope's variance
        "o": (var_r @ v2, (var_r * (exact["o"] @ v.mT).square()).sum()),
        "lse": (torch.zeros_like(lse), lse.new_zeros(())),
        "dq": (
            scale**2 * (var_dx @ k2 + var_delta[..., None] * pgk.square()),
            along(scale * (exact["dq"] @ k.mT)),
        ),
        "dk": (
            to_kv(scale**2 * ((var_dx + pg.square() * var_delta[..., None]).mT @ q2)),
            along(scale * (q @ dk64.mT)),
        ),
        "dv": (to_kv(var_r.mT @ do2), (var_r * (do @ dv64.mT).square()).sum()),
    }
    b = {  # B
        "o": SIGMAS * row.of(v_s + v_exp).through(r, v, o).sqrt() + b_row[..., None] * o.abs() + b_o,
        "lse": b_lse,
        "dq": abs(scale)
        * (
            SIGMAS * (row.through(dx, k, dxk) + v_exp_sum * dxk.square() + v_dx @ k2).sqrt()
            + b_row[..., None] * dxk.abs()
            + b_delta[..., None] * pgk.abs()
            + _of_a_sum(dxk, dx2 @ k2, tk)
            + 2 * dxk.abs()
        ),
        "dk": abs(scale)
        * (
            to_kv((SIGMAS**2 * (dx2 * v_p + v_dx) + shared_dx).mT @ q2).sqrt()
            + _of_a_sum(dxq, to_kv(dx2.mT @ q2), sums)
            + 2 * dxq.abs()
        ),
        "dv": to_kv((SIGMAS**2 * r2 * (v_p + v_exp) + (r * b_row[..., None]).square()).mT @ do2).sqrt()
        + _of_a_sum(exact["dv"], to_kv(r2.mT @ do2), sums)
        + 2 * exact["dv"].abs(),
    }
    lost: dict[str, Tensor] = {}
    tiny = torch.finfo(accumulation_dtype(dtype)).tiny if _flushes(q) else 0.0
    if tiny:
        lost_r = r.abs().masked_fill((p >= tiny) & (r.abs() >= tiny), 0.0)
        lost_dx = dx.abs().masked_fill((p >= tiny) & (ds.abs() >= tiny), 0.0)
        lost = {
            "o": lost_r @ v.abs(),
            "dq": abs(scale) * (lost_dx @ k.abs()),
            "dk": abs(scale) * to_kv(lost_dx.mT @ q.abs()),
            "dv": to_kv(lost_r.mT @ do.abs()),
        }
    if mask.float_bias is not None:
        shape = four_dims(mask.float_bias).shape
        terms, dbias = ds.numel() // max(1, mask.float_bias.numel()), exact["dbias"].reshape(shape)

        def squares(x: Tensor) -> Tensor:
            """Σ x² in the bias's shape. A row shares its errors, so a row's errors in one bias element are added before
            squaring."""
            return ((x.sum(-1, keepdim=True) if shape[3] == 1 else x) ** 2).sum_to_size(shape)

        along_rows = (var_delta * (p * dbias).sum(-1) ** 2).sum()
        squared = SIGMAS**2 * (ds2 * v_p + v_ds).sum_to_size(shape)
        if shape[3] == 1:
            ds_sum = ds.sum(-1, keepdim=True)
            squared = SIGMAS**2 * (v_s * (ds - p * ds_sum) ** 2 + v_ds).sum_to_size(shape)
            squared = squared + SIGMAS**2 * (v_exp_sum * ds_sum**2).sum_to_size(shape)
        squared = squared + squares(ds * b_row[..., None]) + squares(p * b_delta[..., None])
        b_dbias = squared.sqrt() + _of_a_sum(dbias, ds2.sum_to_size(shape), terms) + dbias.abs()
        var["dbias"] = squares(p * var_delta[..., None].sqrt()).reshape(mask.float_bias.shape), along_rows
        b["dbias"] = b_dbias.reshape(mask.float_bias.shape)
        if tiny:
            lost_ds = ds.abs().masked_fill((p >= tiny) & (ds.abs() >= tiny), 0.0)
            lost["dbias"] = lost_ds.sum_to_size(shape).reshape(mask.float_bias.shape)
    if p_sink is not None and mask.sinks is not None:
        var_sinks = (p_sink**2 * var_delta).sum((0, 2))
        sink_terms = p_sink * delta
        squared = (sink_terms * (mask.sinks.double().abs()[:, None] + b_lse + 4)) ** 2 + (p_sink * b_delta) ** 2
        total, rows = sink_terms.sum((0, 2)), delta[:, 0].numel()
        var["dsinks"] = var_sinks, None  # heads share no rows, so their errors are independent
        b["dsinks"] = squared.sum((0, 2)).sqrt() + _of_a_sum(total, (sink_terms**2).sum((0, 2)), rows) + total.abs()
    results = {**exact, "lse": lse}
    if "dsinks" in var:
        results["dsinks"] = total
    return {
        name: Bound(
            variance.sqrt(),
            a * b[name] + lost.get(name, 0.0) + results[name].abs().masked_fill(results[name].abs() >= tiny, 0.0),
            None if slope_variance is None else slope_variance.sqrt(),
        )
        for name, (variance, slope_variance) in var.items()
    }


class _Row:
    """How errors of scores, with variance V(s), propagate to results computed from a row's p. The key with the largest p is
    handled separately: its V(s) may be so large that subtracting it from a sum over all keys would cancel."""

    def __init__(self, p: Tensor, v_s: Tensor) -> None:
        self.p, self.v_s = p, v_s
        columns = p.shape[-1]
        self.top = p.argmax(-1, keepdim=True) if columns else p.new_zeros((*p.shape[:-1], 0), dtype=torch.int64)
        self.is_top = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, self.top, value=True)

    def of(self, v_s: Tensor) -> _Row:
        """The same row with another V(s)."""
        other = copy(self)
        other.v_s = v_s
        return other

    def largest_of(self, x: Tensor) -> Tensor:
        """x at the key with the largest p, (…, Tq); 0 if there is no key."""
        return x.gather(-1, self.top).sum(-1)

    def relative(self) -> Tensor:
        """V(p) / p² without the error of exp."""
        terms = self.p**2 * self.v_s
        others = terms.masked_fill(self.is_top, 0.0)
        others_sum = others.sum(-1, keepdim=True)
        rest = torch.where(
            self.is_top, others_sum, self.largest_of(terms)[..., None] + (others_sum - others).clamp(min=0.0)
        )
        return (1 - self.p) ** 2 * self.v_s + rest

    def through(self, c: Tensor, v: Tensor, total: Tensor) -> Tensor:
        """Σⱼ V(s) (cⱼ vⱼ − pⱼ total)², total = Σⱼ cⱼ vⱼ."""
        if not self.p.shape[-1]:
            return torch.zeros_like(total)
        v_s = self.v_s.masked_fill(self.is_top, 0.0)
        others = (v_s * c**2) @ v**2 - 2 * total * ((v_s * c * self.p) @ v)
        others = others + total**2 * (v_s * self.p**2).sum(-1, keepdim=True)
        v_top = v.gather(2, self.top.expand(*self.top.shape[:-1], v.shape[-1]))
        c_top, p_top = self.largest_of(c)[..., None], self.largest_of(self.p)[..., None]
        return others.clamp(min=0.0) + self.largest_of(self.v_s)[..., None] * (c_top * v_top - p_top * total) ** 2


def _flushes(q: Tensor) -> bool:
    return q.device.type == "cuda"


def _partial_sums(total: Tensor, squares: Tensor, terms: int) -> Tensor:
    """V of a sum of n = `terms` terms t: `total` is Σ t, `squares` is Σ t²."""
    return terms * (total**2 / 3 + squares / 6) / 3


def _of_a_sum(total: Tensor, squares: Tensor, terms: int) -> Tensor:
    """B of a sum of n = `terms` terms, as in `_partial_sums`."""
    return SIGMAS * _partial_sums(total, squares, terms).sqrt()


def _shifts(p: Tensor, mask: Mask, batch: range) -> Tensor:
    """bias² + (slope · distance)²"""
    shifts = torch.zeros_like(p)
    if mask.float_bias is not None:
        shifts = shifts + mask.float_bias.double().masked_fill(mask.float_bias == -math.inf, 0.0) ** 2
    slopes = mask.slopes(batch)
    if slopes is not None:
        tq, tk = p.shape[2:]
        gap = distance(torch.arange(tq, device=p.device), torch.arange(tk, device=p.device), tq, tk)
        shifts = shifts + (slopes.double()[..., None, None] * gap) ** 2
    return shifts


def _tanh_variance(tanh: Tensor, v_x: Tensor, softcap: float) -> Tensor:
    """V of g = 1 − tanh²(x / c); tanh errs by up to 4, in units of a."""
    return (2 * tanh) ** 2 * ((1 - tanh**2) ** 2 * v_x / softcap**2 + 16 * tanh**2 / 3) + 1 / 3


def _bounds_varlen(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, exact: Exact, exp: float
) -> dict[str, Bound]:
    assert mask.cu_seqlens_q is not None and mask.cu_seqlens_k is not None
    parts = []
    for b, rows, cols in sequences(mask.cu_seqlens_q, mask.cu_seqlens_k):
        qkvdo = packed(q, rows), packed(k, cols), packed(v, cols), packed(do, rows)
        exact_part = {
            name: packed(exact[name], cols if name in ("dk", "dv") else rows) for name in ("o", "dq", "dk", "dv")
        }
        parts.append(
            _bounds(*qkvdo, None if dlse is None else dlse[None, :, rows], mask, exact_part, exp, range(b, b + 1))
        )
    out = {}
    for name in parts[0]:
        sigmas, accumulated = [part[name].sigma for part in parts], [part[name].accumulated for part in parts]
        if name == "dsinks":
            out[name] = Bound(torch.stack(sigmas).square().sum(0).sqrt(), torch.stack(accumulated).sum(0))
            continue
        slope = torch.stack([torch.as_tensor(part[name].slope) for part in parts]).square().sum().sqrt()
        sigma, acc = torch.cat(sigmas, 2)[0], torch.cat(accumulated, 2)[0]  # each part is (1, H, T, …)
        out[name] = (
            Bound(sigma, acc, slope) if name == "lse" else Bound(sigma.transpose(0, 1), acc.transpose(0, 1), slope)
        )
    return out
