"""Cross-entropy as a chain of torch ops: any device, any dtype. The logits of a chunk become p in place; then

    logsumexp(l) = max l − log max p          (accurate: max p ≥ 1/V is never small)
    dx = inv_total ∘ ((p − onehot) w)         dw += (p − onehot)ᵀ (inv_total ∘ x)

so that inv_total multiplies C columns instead of V. Logits are float32 (float64 for float64). bfloat16 products on a CPU
cannot write float32. There the logits and p − onehot are bfloat16, and blocks of rows that stay in cache are converted to
float32 and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..linear import linear_bwd, linear_fwd
from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks, of
from .chunks import chunks, most_rows, products_workspace

if TYPE_CHECKING:
    from . import Outputs

CHUNK = {"cpu": 1 << 26, "cuda": 1 << 28}  # bytes of logits held at once
BLOCK = 1 << 20  # bfloat16 logits converted to float32 at once
_aten = torch.ops.aten


def _logits_dtype(x: TensorLike) -> torch.dtype:
    dtype: torch.dtype = x.dtype
    return dtype if x.device.type == "cpu" else accumulation_dtype(dtype)


def _rows(x: TensorLike, w: TensorLike) -> int:
    return most_rows(x.shape[0], w.shape[0], _logits_dtype(x).itemsize, CHUNK[x.device.type])


def chunks_of(x: TensorLike, w: TensorLike) -> Iterator[slice]:
    return chunks(x.shape[0], _rows(x, w))


def _block_rows(x: TensorLike, w: TensorLike) -> int:
    """Rows of a chunk whose softmax is computed at once: all, unless they are converted to float32."""
    rows, converted = _rows(x, w), _logits_dtype(x) != accumulation_dtype(x.dtype)
    return int(max(1, min(rows, BLOCK // max(w.shape[0], 1)))) if converted else rows


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, *, backward: bool) -> Shapes:
    acc, logits, (v, c), rows = accumulation_dtype(x.dtype), _logits_dtype(x), w.shape, _rows(x, w)
    shapes: Shapes = {
        "logits": ((rows, v), logits),
        "statistics": ((4, rows), acc),
        "part": ((), acc),
        "index": ((rows,), torch.int64),
        "valid": ((rows,), torch.bool),
    }
    if logits != acc:
        shapes["block"] = ((_block_rows(x, w), v), acc)
    if backward:
        shapes["x_scaled"] = ((rows, c), x.dtype)
        if x.dtype != acc:
            shapes["x32"] = ((rows, c), acc)
        if x.dtype != logits:
            shapes["dlogits"] = ((rows, v), x.dtype)
    return shapes | products_workspace(x, w, rows, backward=backward, invariant=invariant)


def run(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    inv_total: Tensor,
    invariant: bool = False,
    *,
    out: Outputs,
    scratch: Scratch,
) -> None:
    loss, dx, dw, accumulate = out
    linear = of("linear", scratch)
    if "w" in scratch:
        w = scratch["w"].copy_(w)  # rounded once for all chunks
    if loss is not None:
        loss.zero_()
    gradients = dx is not None or dw is not None
    for i in chunks_of(x, w):
        m = i.stop - i.start
        rows = {name: scratch[name][:m] for name in ("logits", "index", "valid")}
        scale = scratch["statistics"][0, :m]
        mask_targets(targets[i], inv_total, valid=rows["valid"], index=rows["index"], scale=scale)
        linear_fwd(x[i], w, None, y=rows["logits"], invariant=invariant, scratch=linear)
        for j in blocks(m, _block_rows(x, w)):
            _probabilities(rows, j, scale, scratch, loss=loss, gradients=gradients)
        if gradients:
            dxi = None if dx is None else dx[i]
            added = accumulate or i.start > 0  # later chunks add to dw
            _chunk_bwd(rows["logits"], x[i], w, scale, scratch, linear, dx=dxi, dw=dw, accumulate=added)


def mask_targets(targets: Tensor, inv_total: Tensor, *, valid: Tensor, index: Tensor, scale: Tensor) -> None:
    """valid = targets ≥ 0; index = the target, or 0 if there is none; scale = inv_total, or 0 if there is none."""
    torch.ge(targets, 0, out=valid)
    torch.clamp(targets, min=0, out=index)
    scale.copy_(valid).mul_(inv_total)


def _probabilities(
    rows: Scratch, j: slice, scale: Tensor, scratch: Scratch, *, loss: Tensor | None, gradients: bool
) -> None:
    """loss += Σ nll ∘ scale over rows j of a chunk. With gradients, also replaces the logits by p − onehot."""
    logits, index = rows["logits"][j], rows["index"][j, None]
    row_max, p_max, at_target = scratch["statistics"][1:, j].unbind()
    p = scratch["block"][: logits.shape[0]].copy_(logits) if "block" in scratch else logits
    if loss is not None:
        torch.amax(p, -1, out=row_max)
        torch.gather(p, 1, index, out=at_target[:, None])
    _aten._softmax.out(p, -1, half_to_float=False, out=p)
    if loss is not None:
        torch.amax(p, -1, out=p_max).log_()
        nll = row_max.sub_(p_max).sub_(at_target)
        loss.add_(torch.sum(nll.mul_(scale[j]), 0, out=scratch["part"]))
    if gradients:
        p.scatter_add_(1, index, p_max.fill_(-1.0)[:, None])
        if p is not logits:
            logits.copy_(p)


def _chunk_bwd(
    dl: Tensor, x: Tensor, w: Tensor, scale: Tensor, scratch: Scratch, linear: Scratch, *,
    dx: Tensor | None, dw: Tensor | None, accumulate: bool,
) -> None:  # fmt: skip
    """dx and dw of one chunk, from dl = p − onehot."""
    m = x.shape[0]
    if "dlogits" in scratch:
        dl = scratch["dlogits"][:m].copy_(dl)
    if dw is not None:
        _scaled(x, scale, scratch, y=scratch["x_scaled"][:m])
        linear_bwd(dl, scratch["x_scaled"][:m], w, dw=dw, accumulate=accumulate, scratch=linear)
    if dx is not None:
        linear_bwd(dl, x, w, dx=dx, scratch=linear)
        _scaled(dx, scale, scratch, y=dx)


def _scaled(x: Tensor, scale: Tensor, scratch: Scratch, *, y: Tensor) -> None:
    """y = scale ∘ x, one scale per row, computed in the accumulation dtype."""
    if "x32" in scratch:
        y.copy_(scratch["x32"][: x.shape[0]].copy_(x).mul_(scale[:, None]))
    else:
        torch.mul(x, scale[:, None], out=y)
