"""Cross-entropy of logits that never exist as a whole.       x (N, C)   w (V, C)   targets (N,) int64, −1 = ignored

    l = x wᵀ   p = softmax(l)   nll = logsumexp(l) − l[target]
    loss = Σ over targets of nll · inv_total
    dl = (p − onehot(target)) · inv_total     dx = dl w     dw += dlᵀ x        (0 in rows without a target)

inv_total is 1 / (number of targets of the whole step), a 0-d tensor, so that micro-batches add up to one large batch.

One chunk of rows at a time: its logits become p in place. Then

    logsumexp(l) = max l − log max p          for max p ≥ 1/V, which is never small
    dx = inv_total ∘ ((p − onehot) w)         dw += (p − onehot)ᵀ (inv_total ∘ x)         (accumulate=False: dw = …)

so that the factor passes over C columns instead of V. Logits are float32 (float64 for float64). For bfloat16 on a CPU,
whose products can't write float32, they and p − onehot are bfloat16, and a block of rows that stays in cache passes
through float32. `cross_entropy_step` is forward and backward on one set of logits; `cross_entropy_bwd` forms them again
in the same chunks, so its dx and dw are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .checks import check_given, check_param, check_tensor
from .linear import linear_bwd, linear_fwd, linear_workspace, rounds_weights
from .op import op
from .scratch import Form, Scratch, Shapes, accumulation_dtype, below, blocks, larger, of, views

CHUNK = {"cpu": 1 << 26, "cuda": 1 << 28}  # bytes of logits held at once
BLOCK = 1 << 20  # bfloat16 logits that pass through float32 at once
_EVEN = 256  # a chunk of more rows has a multiple of these
_aten = torch.ops.aten


def _logits_dtype(x: Any) -> torch.dtype:
    dtype: torch.dtype = x.dtype
    return dtype if torch.device(x.device).type == "cpu" else accumulation_dtype(dtype)


def _rows(x: Any, w: Any) -> int:
    """Rows of a chunk at most. They grow with N, so that the scratch of a large batch serves a small one."""
    rows = CHUNK[torch.device(x.device).type] // (max(w.shape[0], 1) * _logits_dtype(x).itemsize)
    return int(max(1, min(x.shape[0], rows - rows % _EVEN if rows > _EVEN else rows)))


def _chunks(x: Tensor, w: Tensor) -> Iterator[slice]:
    """As few as will do, of even size."""
    n, most = x.shape[0], _rows(x, w)
    count = -(-n // most)
    return blocks(n, -(-n // max(count, 1)) or 1)


def _block_rows(x: Any, w: Any) -> int:
    """Rows of a chunk that become probabilities at once: all, but where they pass through float32."""
    rows, converted = _rows(x, w), _logits_dtype(x) != accumulation_dtype(x.dtype)
    return int(max(1, min(rows, BLOCK // max(w.shape[0], 1)))) if converted else rows


def cross_entropy_workspace(x: Any, w: Any, *, backward: bool) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold: for `_fwd`, or (backward) for `_bwd` and `_step`."""
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
    if rounds_weights(x, w):
        shapes["w"] = ((v, c), x.dtype)
        w = Form((v, c), x.dtype, x.device)
    chunk = Form((rows, c), x.dtype, x.device)
    products = linear_workspace(chunk, w, backward=False, bias=False)
    if backward:
        products = larger(products, linear_workspace(chunk, w, backward=True, bias=False))
    return shapes | below("linear", products)


@op()
def cross_entropy_fwd(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, *, loss: Tensor, scratch: Scratch | None = None
) -> None:
    """loss (0-d), overwritten."""
    _run(x, w, targets, inv_total, loss=loss, dx=None, dw=None, accumulate=True, backward=False, scratch=scratch)


@op(accumulates=("dw",))
def cross_entropy_bwd(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, *,
    dx: Tensor | None = None, dw: Tensor | None = None, accumulate: bool = True, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """dx overwritten, dw added to (accumulate=False: overwritten); the logits are formed again."""
    _run(x, w, targets, inv_total, loss=None, dx=dx, dw=dw, accumulate=accumulate, backward=True, scratch=scratch)


@op(accumulates=("dw",))
def cross_entropy_step(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, *,
    loss: Tensor, dx: Tensor | None = None, dw: Tensor | None = None, accumulate: bool = True,
    scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """Forward and backward at once."""
    _run(x, w, targets, inv_total, loss=loss, dx=dx, dw=dw, accumulate=accumulate, backward=True, scratch=scratch)


def _run(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, *,
    loss: Tensor | None, dx: Tensor | None, dw: Tensor | None, accumulate: bool, backward: bool, scratch: Scratch | None,
) -> None:  # fmt: skip
    check_loss(x, targets, inv_total, loss=loss, dx=dx, w=("w", w), dw=("dw", dw))
    buffers = views(scratch, cross_entropy_workspace(x, w, backward=backward), x.device, "cross_entropy")
    linear = of("linear", buffers)
    if "w" in buffers:
        w = buffers["w"].copy_(w)  # rounded once for all chunks
    if loss is not None:
        loss.zero_()
    gradients = dx is not None or dw is not None
    if dw is not None and not accumulate and not x.shape[0]:
        dw.zero_()
    for i in _chunks(x, w):
        m = i.stop - i.start
        rows = {name: buffers[name][:m] for name in ("logits", "index", "valid")}
        scale = buffers["statistics"][0, :m]
        mask_targets(targets[i], inv_total, valid=rows["valid"], index=rows["index"], scale=scale)
        linear_fwd(x[i], w, None, y=rows["logits"], scratch=linear)
        for j in blocks(m, _block_rows(x, w)):
            _probabilities(rows, j, scale, buffers, loss=loss, gradients=gradients)
        if gradients:
            dxi = None if dx is None else dx[i]
            added = accumulate or i.start > 0  # a later chunk adds to the first
            _chunk_bwd(rows["logits"], x[i], w, scale, buffers, linear, dx=dxi, dw=dw, accumulate=added)


def check_loss(
    x: Tensor, targets: Tensor, inv_total: Tensor, *,
    loss: Tensor | None, dx: Tensor | None, w: tuple[str, Tensor], dw: tuple[str, Tensor | None],
) -> None:  # fmt: skip
    """Tensors of a loss over the rows of a weight (V, C), which comes with its name, and so does its gradient."""
    (n, c), v, acc = x.shape, w[1].shape[0], accumulation_dtype(x.dtype)
    check_param(*w, (v, c), x)
    check_targets(targets, n, v, x.device)
    check_given(
        x.device,
        ("inv_total", inv_total, (), acc),
        ("loss", loss, (), acc),
        ("dx", dx, (n, c), x.dtype),
        (*dw, (v, c), acc),
    )


def check_targets(targets: Tensor, n: int, v: int, device: torch.device) -> None:
    """Their form, and on a CPU their values: on a device reading them would wait for it."""
    check_tensor("targets", targets, (n,), torch.int64, device)
    if device.type == "cpu" and n:
        low, high = (int(end) for end in targets.aminmax())
        if low < -1 or high >= v:
            raise ValueError(f"targets: got {low if low < -1 else high}; accepted: 0 … {v - 1}, or −1 for none")


def mask_targets(targets: Tensor, inv_total: Tensor, *, valid: Tensor, index: Tensor, scale: Tensor) -> None:
    """valid = there is a target; index = the target, 0 where there is none; scale = inv_total, 0 where there is none."""
    torch.ge(targets, 0, out=valid)
    torch.clamp(targets, min=0, out=index)
    scale.copy_(valid).mul_(inv_total)


def _probabilities(
    rows: Scratch, j: slice, scale: Tensor, buffers: Scratch, *, loss: Tensor | None, gradients: bool
) -> None:
    """loss += Σ nll ∘ scale over rows j of a chunk; where there are gradients, p − onehot in the place of the logits."""
    logits, index = rows["logits"][j], rows["index"][j, None]
    row_max, p_max, at_target = buffers["statistics"][1:, j].unbind()
    p = buffers["block"][: logits.shape[0]].copy_(logits) if "block" in buffers else logits
    if loss is not None:
        torch.amax(p, -1, out=row_max)
        torch.gather(p, 1, index, out=at_target[:, None])
    _aten._softmax.out(p, -1, half_to_float=False, out=p)
    if loss is not None:
        torch.amax(p, -1, out=p_max).log_()
        nll = row_max.sub_(p_max).sub_(at_target)
        loss.add_(torch.sum(nll.mul_(scale[j]), 0, out=buffers["part"]))
    if gradients:
        p.scatter_add_(1, index, p_max.fill_(-1.0)[:, None])
        if p is not logits:
            logits.copy_(p)


def _chunk_bwd(
    dl: Tensor, x: Tensor, w: Tensor, scale: Tensor, buffers: Scratch, linear: Scratch, *,
    dx: Tensor | None, dw: Tensor | None, accumulate: bool,
) -> None:  # fmt: skip
    """dl is p − onehot."""
    m = x.shape[0]
    if "dlogits" in buffers:
        dl = buffers["dlogits"][:m].copy_(dl)
    if dw is not None:
        _scaled(x, scale, buffers, y=buffers["x_scaled"][:m])
        linear_bwd(dl, buffers["x_scaled"][:m], w, dw=dw, accumulate=accumulate, scratch=linear)
    if dx is not None:
        linear_bwd(dl, x, w, dx=dx, scratch=linear)
        _scaled(dx, scale, buffers, y=dx)


def _scaled(x: Tensor, scale: Tensor, buffers: Scratch, *, y: Tensor) -> None:
    """y = scale ∘ x, by rows, in the accumulation dtype."""
    if "x32" in buffers:
        y.copy_(buffers["x32"][: x.shape[0]].copy_(x).mul_(scale[:, None]))
    else:
        torch.mul(x, scale[:, None], out=y)
