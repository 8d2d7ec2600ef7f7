"""The oracle of cross-entropy, with whole matrices and gradients by autograd; and its bounds (kernels/closeness.py).

For bfloat16, d = dl / inv_total, inv_total x and d w are rounded. Before that, torch's kernel rounds the logits on a
CPU, and Triton's kernel rounds x wᵀ, without the bias. Where products are written in bfloat16, torch's kernel also
rounds x wᵀ before it adds the bias, and each chunk's dw is rounded. Triton's kernel rounds dl = inv_total d instead of
d. If all rows have the same inv_total and it is not a bfloat16 number, every target with a small p has dl ≈ −inv_total, and all
these dl are rounded by the same factor. This multiplies all gradients by the factor, which these bounds do not allow.

Let s = 1 − (l / c)², D = (1 + 2 z lse) p − (1 − ε) onehot − ε / V and d = s D. Roundings ρ of a row of logits change
Σ k d by Σ ρ (A k − B Σ p s k):

    A = s ((1 + 2 z lse) p s − 2 D l / c²)        B = s p (1 + 2 z (lse − 1))        without terms: A = B = p
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import linear
from ..closeness import Bound, rounding, roundoff
from ..scratch import accumulation_dtype
from . import CROSS_ENTROPY, Problem
from .terms import PLAIN, Terms

TANH = 6.0  # error of c · tanh(l / c), in units of the roundoff a


def losses(x: Tensor, w: Tensor, targets: Tensor, bias: Tensor | None = None, terms: Terms = PLAIN) -> Tensor:
    """The loss of each row, (N,), 0 for a row without a target. In float64 these losses are the oracle."""
    softcap, smoothing, z_loss = terms
    logits = x @ w.t() if bias is None else x @ w.t() + bias
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    lse, at_target = logits.logsumexp(-1), logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    nll = (1 - smoothing) * (lse - at_target) + smoothing * (lse - logits.mean(-1)) + z_loss * lse**2
    return torch.where(targets >= 0, nll, 0.0)


def exact(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor | float, bias: Tensor | None = None, terms: Terms = PLAIN
) -> dict[str, Tensor]:
    """loss, losses, dx, dw and, with a bias, dbias in float64; inv_total is a number or (N,)."""
    leaves = {name: y.detach().double() for name, y in (("x", x), ("w", w), ("bias", bias)) if y is not None}
    for y in leaves.values():
        y.requires_grad_()
    each = losses(leaves["x"], leaves["w"], targets, leaves.get("bias"), terms) * inv_total
    gradients = torch.autograd.grad(each.sum(), list(leaves.values()))
    named = {f"d{name}": y for name, y in zip(leaves, gradients, strict=True)}
    return {"loss": each.sum().detach(), "losses": each.detach()} | named


def bounds(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor | float, bias: Tensor | None = None, terms: Terms = PLAIN
) -> dict[str, Bound]:
    """How far a kernel's loss, losses, dx, dw and dbias may be from `exact`."""
    # Longer than 60 lines because the formulas share many intermediate results.
    dtype, short, on_cpu = x.dtype, x.dtype == torch.bfloat16, x.device.type == "cpu"
    row = CROSS_ENTROPY.select(Problem(x, w, bias=bias, terms=terms))
    products_rounded = short and on_cpu and linear._has_bf16_products()
    chunks = list(row.load().chunks_of(x, w)) if products_rounded else []
    (softcap, smoothing, z_loss), v = terms, w.shape[0]
    kept, index = (targets >= 0).double()[:, None], targets.clamp(min=0)[:, None]
    a = roundoff(accumulation_dtype(dtype))
    x, w = x.double(), w.double()
    scale = torch.as_tensor(inv_total, dtype=torch.float64, device=x.device).expand(len(x))[:, None]
    product = x @ w.t()
    logits = product if bias is None else product + bias.double()
    var_l = torch.zeros_like(logits)
    if short and (on_cpu or row.name == "triton"):
        var_l = kept * rounding(product if row.name == "triton" else logits, dtype)
    if products_rounded and row.name == "torch" and bias is not None:
        var_l += kept * rounding(product, dtype)
    b_l = _of_a_sum(logits, x**2 @ (w**2).t(), x.shape[1]) + 2 * logits.abs()
    slope, b_slope, bend = torch.ones_like(logits), torch.zeros_like(logits), torch.zeros_like(logits)
    if softcap:
        tanh = torch.tanh(logits / softcap)
        logits, slope, bend = softcap * tanh, 1 - tanh**2, -2 * tanh / softcap
        b_l = slope * b_l + TANH * logits.abs()
        b_slope = bend.abs() * b_l + 4
    p, lse = logits.softmax(-1), logits.logsumexp(-1, keepdim=True)
    mean, factor = logits.mean(1, keepdim=True), 1 + 2 * z_loss * lse
    onehot = torch.zeros_like(p).scatter_(1, index, 1.0)
    d_capped = kept * (factor * p - (1 - smoothing) * onehot - smoothing / v)  # D of the docstring
    d = d_capped * slope
    nll = kept * ((1 - smoothing) * (lse - logits.gather(1, index)) + smoothing * (lse - mean) + z_loss * lse**2)
    own, shared = (
        slope * (factor * p * slope + d_capped * bend),
        slope * p * (factor - 2 * z_loss),
    )  # A and B of the docstring
    p_slope = p * slope

    scaled = scale * x
    var_d, var_x = (rounding(y, dtype) if short else torch.zeros_like(y) for y in (d, scaled))
    raw, dw, dbias = d @ w, d.t() @ scaled, (scale * d).sum(0)
    var_raw = rounding(raw, dtype) if short else torch.zeros_like(raw)
    var_dw = sum((rounding(d[i].t() @ scaled[i], dtype) for i in chunks), torch.zeros_like(dw))
    var_of_row = (shared**2 * var_l).sum(1, keepdim=True)
    # The variance of each d, caused by rounding the logits.
    var_of_l = (var_l * (own**2 - 2 * own * shared * p_slope) + var_of_row * p_slope**2).clamp(min=0)
    var_stored = var_d if row.name == "triton" else torch.zeros_like(d)  # Triton's dbias sums rounded d

    def along(k: Tensor) -> Tensor:
        """The variance of Σ k d, caused by rounding the logits."""
        return (var_l * (own * k - shared * (p_slope * k).sum(1, keepdim=True)) ** 2).sum()

    b_row = (p * b_l).sum(1, keepdim=True) + _of_a_sum(torch.ones_like(lse), (p**2).sum(1, keepdim=True), v) + 4
    b_lse = b_row + lse.abs()
    b_capped = factor.abs() * p * (b_l + b_row) + d_capped.abs()
    b_nll = b_l.gather(1, index) + b_lse + nll.abs()
    if z_loss:
        b_capped = b_capped + p * (2 * abs(z_loss) * b_lse + 2 * factor.abs())
        b_nll = b_nll + 2 * abs(z_loss) * lse.abs() * (b_lse + lse.abs())
    if smoothing:
        b_of_mean = _of_a_sum(v * mean, (logits**2).sum(1, keepdim=True), v) / v
        b_capped = b_capped + factor.abs() * p + 2 * smoothing / v
        b_nll = (
            b_nll + logits.gather(1, index).abs() + smoothing * (b_l.mean(1, keepdim=True) + b_of_mean + 2 * mean.abs())
        )
    b_d = kept * (b_capped if not softcap else slope * b_capped + d_capped.abs() * b_slope + d.abs())
    b_nll = kept * b_nll
    centred = (
        (var_l * own**2) @ w**2 - 2 * (p_slope @ w) * ((var_l * own * shared) @ w) + var_of_row * (p_slope @ w) ** 2
    )
    dx, size = scale * raw, scale.abs()
    by_dx, by_dw, by_dbias = scale * (dx @ w.t()), scale * (x @ dw.t()), scale * dbias
    var = {
        "loss": ((scale**2 * var_l * d**2).sum(), None),
        "losses": ((scale**2 * var_l * d**2).sum(1), None),
        "dx": (
            scale**2 * (var_d @ w**2 + centred.clamp(min=0) + var_raw),
            along(by_dx) + (var_d * by_dx**2).sum() + (var_raw * (scale * dx) ** 2).sum(),
        ),
        "dw": (
            (var_d + var_of_l).t() @ scaled**2 + (d**2).t() @ var_x + var_dw,
            along(by_dw) + (var_d * by_dw**2).sum() + (var_x * (d @ dw) ** 2).sum() + (var_dw * dw**2).sum(),
        ),
        "dbias": ((scale**2 * (var_stored + var_of_l)).sum(0), along(by_dbias) + (var_stored * by_dbias**2).sum()),
    }
    each = scale * nll
    b = {
        "loss": (size * b_nll).sum() + _of_a_sum(each.sum(), (each**2).sum(), len(x)),
        "losses": (size * (b_nll + nll.abs()))[:, 0],
        "dx": size * (b_d @ w.abs() + _of_a_sum(raw, d**2 @ w**2, v) + raw.abs()),
        "dw": (size * b_d).t() @ x.abs()
        + 2 * d.t().abs() @ scaled.abs()
        + _of_a_sum(dw, (d**2).t() @ scaled**2, len(x)),
        "dbias": (size * (b_d + d.abs())).sum(0) + _of_a_sum(dbias, ((scale * d) ** 2).sum(0), len(x)),
    }
    names = [name for name in var if bias is not None or name != "dbias"]
    return {n: Bound(var[n][0].sqrt(), a * b[n], None if (s := var[n][1]) is None else s.sqrt()) for n in names}


def _of_a_sum(total: Tensor, squares: Tensor, terms: int) -> Tensor:
    """The contribution to B (closeness.py) of a sum of `terms` terms, from their total and the sum of their squares."""
    return (terms * (4 * total**2 + 2 * squares)).sqrt()
