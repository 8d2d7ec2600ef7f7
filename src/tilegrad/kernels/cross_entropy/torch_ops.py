"""Cross-entropy as a chain of torch ops: any device, any dtype. p = softmax(l) replaces the logits l of a chunk. Then

    logsumexp(l) = max l − log max p          (accurate: max p ≥ 1/V is never small)
    dx = inv_total ∘ ((p − onehot) w)         dw += (p − onehot)ᵀ (inv_total ∘ x)

so that inv_total multiplies C columns instead of V. The options (softcap, smoothing, z-loss) change p − onehot in place before
these products. With a softcap the tanh of a block of rows is kept for the gradient. Logits are float32 (float64 for float64),
except with bfloat16 on a CPU, where products cannot write float32: there the logits and p − onehot are bfloat16, and blocks of
rows that stay in cache are converted to float32 and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..activation import activation_fwd
from ..linear import linear_bwd_input, linear_bwd_weight, linear_fwd
from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks, of
from .chunks import chunks, most_rows, products_workspace
from .terms import PLAIN, Terms

if TYPE_CHECKING:
    from . import Inputs, Outputs

CHUNK = {"cpu": 1 << 26, "cuda": 1 << 28}  # most bytes of logits in a chunk
BLOCK = 1 << 20  # logits converted to float32 or capped at once on a CPU
_aten = torch.ops.aten


def _logits_dtype(x: TensorLike) -> torch.dtype:
    dtype: torch.dtype = x.dtype
    return dtype if x.device.type == "cpu" else accumulation_dtype(dtype)


def _rows(x: TensorLike, w: TensorLike) -> int:
    return most_rows(x.shape[0], w.shape[0], _logits_dtype(x).itemsize, CHUNK[x.device.type])


def chunks_of(x: TensorLike, w: TensorLike) -> Iterator[slice]:
    return chunks(x.shape[0], _rows(x, w))


def _block_rows(x: TensorLike, w: TensorLike, terms: Terms) -> int:
    """Rows of a chunk whose softmax is computed at once: all, except on a CPU if they are converted to float32 or capped."""
    rows, converted = _rows(x, w), _logits_dtype(x) != accumulation_dtype(x.dtype)
    small = converted or (terms.softcap and x.device.type == "cpu")
    return int(max(1, min(rows, BLOCK // max(w.shape[0], 1)))) if small else rows


def workspace(
    x: TensorLike,
    w: TensorLike,
    invariant: bool = False,
    bias: TensorLike | None = None,
    terms: Terms = PLAIN,
    *,
    backward: bool,
) -> Shapes:
    acc, logits, (v, c), rows = accumulation_dtype(x.dtype), _logits_dtype(x), w.shape, _rows(x, w)
    shapes: Shapes = {
        "logits": ((rows, v), logits),
        "statistics": ((5 if terms.label_smoothing else 4, rows), acc),
        "part": ((), acc),
        "index": ((rows,), torch.int64),
        "ignored": ((rows,), torch.bool),
    }
    if logits != acc:
        shapes["block"] = ((_block_rows(x, w, terms), v), acc)
    if terms.softcap:
        shapes["tanh"] = ((_block_rows(x, w, terms), v), acc)
    if backward:
        shapes["x_scaled"] = ((rows, c), x.dtype)
        if x.dtype != acc:
            shapes["x32"] = ((rows, c), acc)
        if x.dtype != logits:
            shapes["dlogits"] = ((rows, v), x.dtype)
    added = bias is not None
    return shapes | products_workspace(x, w, rows, backward=backward, invariant=invariant, bias=added)


def run(inputs: Inputs, *, out: Outputs, scratch: Scratch) -> None:
    x, w, targets, inv_total, bias, invariant, terms = inputs
    loss, dx, _, accumulate, losses, dbias = out
    linear = of("linear", scratch)
    if "w" in scratch:
        w = scratch["w"].copy_(w)  # rounded once for all chunks
    if loss is not None:
        loss.zero_()
    if dbias is not None and not accumulate:
        dbias.zero_()
    mixed = scratch["logits"].dtype != x.dtype  # a product whose result has another dtype than x adds no bias
    for i in chunks_of(x, w):
        m = i.stop - i.start
        rows = {name: scratch[name][:m] for name in ("logits", "index", "ignored")}
        scale = scratch["statistics"][0, :m]
        mask_targets(targets, inv_total, i, ignored=rows["ignored"], index=rows["index"], scale=scale)
        linear_fwd(x[i], w, None if mixed else bias, y=rows["logits"], invariant=invariant, scratch=linear)
        if mixed and bias is not None:
            rows["logits"].add_(bias)
        chunk_out = out._replace(dx=None if dx is None else dx[i], losses=None if losses is None else losses[i])
        for j in blocks(m, _block_rows(x, w, terms)):
            _probabilities(rows, j, scale, scratch, terms, invariant=invariant, out=chunk_out)
        if out.has_gradients:
            added = accumulate or i.start > 0  # later chunks add to dw
            _chunk_bwd(rows, x[i], w, scale, scratch, linear, out=chunk_out._replace(accumulate=added))


def mask_targets(
    targets: Tensor, inv_total: Tensor, i: slice, *, ignored: Tensor, index: Tensor, scale: Tensor
) -> None:
    """For rows i: ignored = targets < 0, index = targets, scale = inv_total. In ignored rows index and scale are 0."""
    torch.lt(targets[i], 0, out=ignored)
    torch.clamp(targets[i], min=0, out=index)
    scale.copy_(inv_total[i] if inv_total.ndim else inv_total).masked_fill_(ignored, 0.0)


def softmax_workspace(logits: TensorLike) -> Shapes:
    (rows, v), acc = logits.shape, accumulation_dtype(logits.dtype)
    shapes: Shapes = {"statistics": ((4, rows), acc), "index": ((rows,), torch.int64), "ignored": ((rows,), torch.bool)}
    return shapes | {"block": ((max(1, min(rows, BLOCK // max(v, 1))), v), acc)}


def softmax(
    logits: Tensor, targets: Tensor, inv_total: Tensor, softcap: float = 0.0, *,
    losses: Tensor, row_max: Tensor | None, factor: Tensor | None, scratch: Scratch,
) -> None:  # fmt: skip
    m = logits.shape[0]
    scale, largest, row_sum, at_target = scratch["statistics"][:, :m].unbind()
    index, ignored = scratch["index"][:m], scratch["ignored"][:m]
    mask_targets(targets, inv_total, slice(0, m), ignored=ignored, index=index, scale=scale)
    for j in blocks(m, scratch["block"].shape[0]):
        x = scratch["block"][: j.stop - j.start].copy_(logits[j])
        if softcap:
            x.div_(softcap).tanh_().mul_(softcap)
        torch.amax(x, -1, out=largest[j])
        torch.gather(x, 1, index[j, None], out=at_target[j, None])
        torch.sum(x.sub_(largest[j, None]).exp_(), -1, out=row_sum[j])
    torch.log(row_sum, out=losses).add_(largest).sub_(at_target).mul_(scale).masked_fill_(ignored, 0.0)
    if row_max is not None and factor is not None:
        torch.div(scale, row_sum, out=factor)
        row_max.copy_(largest).masked_fill_(ignored, math.inf)


def total(losses: Tensor, *, loss: Tensor) -> None:
    torch.sum(losses, 0, out=loss)


def _probabilities(
    rows: Scratch, j: slice, scale: Tensor, scratch: Scratch, terms: Terms, *, invariant: bool = False, out: Outputs
) -> None:
    """losses = nll ∘ scale of rows j of a chunk, and loss += Σ losses. With gradients, the logits are replaced by
    dl = ((1 + 2 z lse) p − (1 − ε) onehot − ε / V) ∘ (1 − tanh²), with z_loss z and smoothing ε, and dbias += dlᵀ scale."""
    logits, index = rows["logits"][j], rows["index"][j, None]
    row_max, p_max, at_target, *mean = scratch["statistics"][1:, j].unbind()
    softcap, smoothing, z_loss = terms
    has_loss = out.loss is not None or out.losses is not None
    p = scratch["block"][: logits.shape[0]].copy_(logits) if "block" in scratch else logits
    if softcap:
        tanh = torch.div(p, softcap, out=scratch["tanh"][: p.shape[0]])
        activation_fwd(tanh, "tanh", a=tanh, invariant=invariant)
        torch.mul(tanh, softcap, out=p)
    if has_loss or z_loss:
        torch.amax(p, -1, out=row_max)
    if has_loss:
        torch.gather(p, 1, index, out=at_target[:, None])
    if has_loss and smoothing:
        at_target.mul_(1.0 - smoothing).add_(torch.mean(p, -1, out=mean[0]), alpha=smoothing)
    _aten._softmax.out(p, -1, half_to_float=False, out=p)
    if has_loss or z_loss:
        lse = row_max.sub_(torch.amax(p, -1, out=p_max).log_())
    if has_loss:
        nll = torch.sub(lse, at_target, out=at_target)
        if z_loss:
            nll.addcmul_(lse, lse, value=z_loss)
        nll.mul_(scale[j]).masked_fill_(rows["ignored"][j], 0.0)
    if out.losses is not None:
        out.losses[j].copy_(nll)
    if out.loss is not None:
        out.loss.add_(torch.sum(nll, 0, out=scratch["part"]))
    if out.has_gradients:
        if z_loss:
            p.mul_(lse.mul_(2.0 * z_loss).add_(1.0)[:, None])
        if smoothing:
            p.sub_(smoothing / p.shape[1])
        p.scatter_add_(1, index, p_max.fill_(smoothing - 1.0)[:, None])
        if softcap:
            p.mul_(tanh.square_().neg_().add_(1.0))
        if out.dbias is not None:
            out.dbias.addmv_(p.t(), scale[j])
        if p is not logits:
            logits.copy_(p)


def _chunk_bwd(
    rows: Scratch, x: Tensor, w: Tensor, scale: Tensor, scratch: Scratch, linear: Scratch, *, out: Outputs
) -> None:
    """dx and dw of one chunk, from dl / inv_total, which has replaced the logits."""
    _, dx, dw, accumulate, *_ = out
    m, dl = x.shape[0], rows["logits"]
    if "dlogits" in scratch:
        dl = scratch["dlogits"][:m].copy_(dl)
    if dw is not None:
        _scaled(x, scale, scratch, y=scratch["x_scaled"][:m])
        linear_bwd_weight(dl, scratch["x_scaled"][:m], w, dw=dw, accumulate=accumulate, scratch=linear)
    if dx is not None:
        linear_bwd_input(dl, w, dx=dx, accumulate=False, scratch=linear)
        _scaled(dx, scale, scratch, y=dx)
        dx.masked_fill_(rows["ignored"][:, None], 0.0)  # because 0 · NaN is NaN


def _scaled(x: Tensor, scale: Tensor, scratch: Scratch, *, y: Tensor) -> None:
    """y = scale ∘ x, one scale per row, computed in the accumulation dtype."""
    if "x32" in scratch:
        y.copy_(scratch["x32"][: x.shape[0]].copy_(x).mul_(scale[:, None]))
    else:
        torch.mul(x, scale[:, None], out=y)
