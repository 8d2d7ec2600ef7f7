"""Cross-entropy of logits that never exist as a whole.       x (N, C)   w (V, C)   targets (N,) int64, −1 = ignored

    l = x wᵀ   p = softmax(l)   nll = logsumexp(l) − l[target]
    loss = Σ over targets of nll · inv_total
    dl = (p − onehot(target)) · inv_total     dx = dl w     dw += dlᵀ x        (0 in rows without a target)

inv_total is 1 / (number of targets of the whole step), a 0-d tensor, so that micro-batches add up to one large batch.

Walk: a chunk of rows at a time; its logits, in the accumulation dtype, become p in place. Then

    logsumexp(l) = max l − log max p          for max p ≥ 1/V, which is never small
    dx = inv_total ∘ ((p − onehot) w)         dw += (p − onehot)ᵀ (inv_total ∘ x)

so that the factor passes over C columns instead of V. `cross_entropy_step` is forward and backward on one set of logits;
`cross_entropy_bwd` forms them again in the same chunks, so its dx and dw are the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention.checks import check_tensor
from .dispatch import op
from .linear import linear_bwd, linear_fwd, linear_workspace
from .scratch import Scratch, Shapes, accumulation_dtype, blocks, views

CHUNK = {"cpu": 1 << 25, "cuda": 1 << 26}  # logits held at once
_aten = torch.ops.aten


def _rows(x: Any, w: Any) -> int:
    """Rows of a chunk. It grows with N, so that the scratch of a large batch serves a small one."""
    return int(max(1, min(x.shape[0], CHUNK[torch.device(x.device).type] // max(w.shape[0], 1))))


def cross_entropy_workspace(x: Any, w: Any, *, backward: bool) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold: for `_fwd`, or (backward) for `_bwd` and `_step`."""
    acc, c, v, rows = accumulation_dtype(x.dtype), x.shape[1], w.shape[0], _rows(x, w)
    shapes: Shapes = {
        "logits": ((rows, v), acc),
        "statistics": ((4, rows), acc),
        "part": ((), acc),
        "index": ((rows,), torch.int64),
        "valid": ((rows,), torch.bool),
    }
    if backward:
        shapes |= {"x_scaled": ((rows, c), x.dtype)}
        if x.dtype != acc:
            shapes |= {"dlogits": ((rows, v), x.dtype), "x32": ((rows, c), acc)}
    linear = linear_workspace(x, w, backward=backward)
    return shapes | {f"linear.{name}": spec for name, spec in linear.items() if name not in ("db", "ones")}


@op()
def cross_entropy_fwd(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, *, loss: Tensor, scratch: Scratch | None = None
) -> None:
    """loss (0-d), overwritten."""
    _walk(x, w, targets, inv_total, loss=loss, dx=None, dw=None, backward=False, scratch=scratch)


@op(accumulates=("dw",))
def cross_entropy_bwd(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, *,
    dx: Tensor | None = None, dw: Tensor | None = None, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """dx overwritten, dw added to; the logits are formed again."""
    _walk(x, w, targets, inv_total, loss=None, dx=dx, dw=dw, backward=True, scratch=scratch)


@op(accumulates=("dw",))
def cross_entropy_step(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, *,
    loss: Tensor, dx: Tensor | None = None, dw: Tensor | None = None, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """Forward and backward at once."""
    _walk(x, w, targets, inv_total, loss=loss, dx=dx, dw=dw, backward=True, scratch=scratch)


def _walk(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, *,
    loss: Tensor | None, dx: Tensor | None, dw: Tensor | None, backward: bool, scratch: Scratch | None,
) -> None:  # fmt: skip
    (n, c), v, acc = x.shape, w.shape[0], accumulation_dtype(x.dtype)
    check_tensor("w", w, (v, c), x.dtype, x.device)
    check_targets(targets, n, v, x.device)
    for name, other, shape, dtype in (
        ("inv_total", inv_total, (), acc),
        ("loss", loss, (), acc),
        ("dx", dx, (n, c), x.dtype),
        ("dw", dw, (v, c), acc),
    ):
        if other is not None:
            check_tensor(name, other, shape, dtype, x.device)
    buffers = views(scratch, cross_entropy_workspace(x, w, backward=backward), x.device, "cross_entropy")
    if loss is not None:
        loss.zero_()
    for i in blocks(n, _rows(x, w)):
        m = i.stop - i.start
        rows = {name: buffers[name][:m] for name in ("logits", "index", "valid")}
        scale = mask_targets(targets[i], inv_total, rows, scale=buffers["statistics"][0, :m])
        p = _probabilities(x[i], w, rows, buffers, loss=loss, scale=scale)
        if dx is None and dw is None:
            continue
        p.scatter_add_(1, rows["index"][:, None], buffers["statistics"][1, :m].fill_(-1.0)[:, None])
        _chunk_bwd(p, x[i], w, scale, buffers, dx=None if dx is None else dx[i], dw=dw)


def check_targets(targets: Tensor, n: int, v: int, device: torch.device) -> None:
    """Their form, and on a CPU their values: on a device reading them would wait for it."""
    check_tensor("targets", targets, (n,), torch.int64, device)
    if device.type == "cpu" and n:
        low, high = (int(end) for end in targets.aminmax())
        if low < -1 or high >= v:
            raise ValueError(f"targets: got {low if low < -1 else high}; accepted: 0 … {v - 1}, or −1 for none")


def mask_targets(targets: Tensor, inv_total: Tensor, rows: Scratch, *, scale: Tensor) -> Tensor:
    """scale = inv_total, 0 where there is no target; rows["index"] = the target, 0 where there is none."""
    torch.ge(targets, 0, out=rows["valid"])
    torch.clamp(targets, min=0, out=rows["index"])
    return scale.copy_(rows["valid"]).mul_(inv_total)


def _linear(buffers: Scratch) -> Scratch:
    return {name.removeprefix("linear."): x for name, x in buffers.items() if name.startswith("linear.")}


def _probabilities(
    x: Tensor, w: Tensor, rows: Scratch, buffers: Scratch, *, loss: Tensor | None, scale: Tensor
) -> Tensor:
    """p of a chunk, in the place of its logits; loss += Σ nll ∘ scale."""
    logits, m = rows["logits"], x.shape[0]
    row_max, p_max, at_target = buffers["statistics"][1:, :m].unbind()
    linear_fwd(x, w, None, y=logits, scratch=_linear(buffers))
    if loss is not None:
        torch.amax(logits, -1, out=row_max)
        torch.gather(logits, 1, rows["index"][:, None], out=at_target[:, None])
    _aten._softmax.out(logits, -1, False, out=logits)
    if loss is not None:
        torch.amax(logits, -1, out=p_max).log_()
        nll = row_max.sub_(p_max).sub_(at_target)
        loss.add_(torch.sum(nll.mul_(scale), 0, out=buffers["part"]))
    return logits


def _chunk_bwd(
    p: Tensor, x: Tensor, w: Tensor, scale: Tensor, buffers: Scratch, *, dx: Tensor | None, dw: Tensor | None
) -> None:
    """p is p − onehot by now."""
    m, linear = x.shape[0], _linear(buffers)
    half = "dlogits" in buffers
    dl = buffers["dlogits"][:m].copy_(p) if half else p
    if dw is not None:
        x_scaled = buffers["x_scaled"][:m]
        if half:
            x_scaled.copy_(buffers["x32"][:m].copy_(x).mul_(scale[:, None]))
        else:
            torch.mul(x, scale[:, None], out=x_scaled)
        linear_bwd(dl, x_scaled, w, dw=dw, scratch=linear)
    if dx is not None:
        linear_bwd(dl, x, w, dx=dx, scratch=linear)
        if half:
            dx.copy_(buffers["x32"][:m].copy_(dx).mul_(scale[:, None]))
        else:
            dx.mul_(scale[:, None])
