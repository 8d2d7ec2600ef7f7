"""The oracle: attention and its gradients on whole T×T matrices, one step per line.

    s = scores(q, k)                        docstring of mask.py
    p = softmax over [s, sink]              the sink's column has no value and is removed
    lse = log(Σ exp s + exp sink)
    r = p ∘ keep / (1 − dropout_p)
    o = r v

Backward, with do = ∂L/∂o and dlse = ∂L/∂lse:

    dv = rᵀ do          dr = do vᵀ          dp = dr ∘ keep / (1 − dropout_p)
    ds = p ∘ (dp − delta)                   delta = rowsum(do ∘ o) − dlse          (= Σⱼ p ∘ dp − dlse)
    dsink = −Σ p_sink · delta               p_sink = exp(sink − lse)
    dbias = ds, summed to bias's shape
    dx = ds ∘ (1 − tanh²(x / c))            x = scale · q kᵀ, only with a softcap
    dq = scale · dx k                       dk = scale · dxᵀ q

`forward` and `backward` compute in the dtype of their inputs. In float64 they are the oracle; bounds.py says how far from the
oracle a kernel may be. The kernel "reference" calls them in float64, allocates, rounds each result once, and is only run by
name. A row that attends to no key has p = 0, and lse = −inf or, with a sink, the sink's logit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..philox import WORK_BUFFERS, drop_mask, round_keys
from ..scratch import Shapes, Views
from .mask import Mask, attends, distance, four_dims, masked_by, packed, sequences
from .problem import Backward, Forward


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None


class Softmax(NamedTuple):
    p: Tensor  # (B, Hq, Tq, Tk)
    p_sink: Tensor | None  # (B, Hq, Tq), in float32 or better, like lse
    lse: Tensor  # (B, Hq, Tq)
    tanh: Tensor | None  # tanh(x / softcap), (B, Hq, Tq, Tk)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """o in q's dtype, lse in float32 or better."""
    if mask.varlen:
        return _forward_varlen(q, k, v, mask)
    return _forward(q, k, v, mask, range(q.shape[0]))


def backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask) -> Gradients:
    """All gradients, in q's dtype; o and lse are recomputed."""
    if mask.varlen:
        return _backward_varlen(q, k, v, do, dlse, mask)
    return _backward(q, k, v, do, dlse, mask, range(q.shape[0]))


def softmax(q: Tensor, k: Tensor, mask: Mask, batch: range) -> Softmax:
    """Probabilities of a dense call. `batch`: indices of its sequences, for slopes and dropout. k must have Hq heads."""
    b, h, tq, d = q.shape
    tk = k.shape[2]
    s = (q @ k.mT) * mask.scale_for(d)
    tanh = None
    if mask.softcap:
        tanh = torch.tanh(s / mask.softcap)
        s = mask.softcap * tanh
    if mask.float_bias is not None:
        s = s + mask.float_bias.to(s.dtype)
    gap = distance(torch.arange(tq, device=q.device), torch.arange(tk, device=q.device), tq, tk)
    slopes = mask.slopes(batch)
    if slopes is not None:
        s = s - slopes.to(s.dtype)[..., None, None] * gap.abs()
    attended = attends(mask, gap)
    if mask.bool_bias is not None:
        attended = attended & mask.bool_bias
    if mask.intervals is not None:
        masked = masked_by(mask.intervals, torch.arange(tq, device=q.device))
        attended = attended & ~masked.repeat_interleave(h // masked.shape[1], dim=1)
    s = s.masked_fill(~attended, -torch.inf)
    if mask.sinks is not None:
        s = torch.cat([s, mask.sinks.to(s.dtype)[:, None, None].expand(b, h, tq, 1)], dim=-1)
    s32 = s.to(torch.promote_types(s.dtype, torch.float32))
    lse = torch.logsumexp(s32, dim=-1) if s.shape[-1] else s32.new_full((b, h, tq), -torch.inf)
    p = torch.softmax(s, dim=-1).masked_fill((lse == -torch.inf)[..., None], 0.0)
    p_sink = torch.exp(s32[..., tk] - lse).masked_fill(lse == -torch.inf, 0.0) if mask.sinks is not None else None
    return Softmax(p[..., :tk], p_sink, lse, tanh)


def _heads_of(k: Tensor, like: Tensor) -> Tensor:
    """Repeats each kv head for the query heads that share it: (B, Hkv, T, D) → (B, Hq, T, D)."""
    return k.repeat_interleave(like.shape[1] // k.shape[1], dim=1)


def _summed_to_heads_of(dk: Tensor, like: Tensor) -> Tensor:
    """The reverse of `_heads_of`: sums the gradients of the query heads that share a kv head."""
    b, hq, t, d = dk.shape
    return dk.reshape(b, like.shape[1], hq // like.shape[1], t, d).sum(2)


def _dropout(p: Tensor, mask: Mask, batch: range) -> Callable[[Tensor], Tensor]:
    """x → x ∘ keep / (1 − dropout_p), for any x in the shape of p."""
    if not mask.dropout_p:
        return lambda x: x
    assert mask.seed is not None
    b, h, m, n = (torch.arange(size, device=p.device) for size in p.shape)
    dropped = torch.empty(p.shape, dtype=torch.bool, device=p.device)
    work = torch.empty(WORK_BUFFERS, *p.shape, dtype=torch.int64, device=p.device)
    drop_mask(round_keys(mask.seed), mask.dropout_p, b + batch.start, h, m, n, dropped=dropped, work=work)
    return lambda x: x.masked_fill(dropped, 0.0) / (1.0 - mask.dropout_p)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, batch: range) -> tuple[Tensor, Tensor]:
    k, v = _heads_of(k, like=q), _heads_of(v, like=q)
    p, _, lse, _ = softmax(q, k, mask, batch)
    return _dropout(p, mask, batch)(p) @ v, lse


def _backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, batch: range) -> Gradients:
    kv = k
    k, v = _heads_of(k, like=q), _heads_of(v, like=q)
    p, p_sink, lse, tanh = softmax(q, k, mask, batch)
    dropout = _dropout(p, mask, batch)
    r = dropout(p)

    dv = r.mT @ do
    dp = dropout(do @ v.mT)
    delta = (do * (r @ v)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(delta.dtype).masked_fill(lse == -torch.inf, 0.0)
    ds = p * (dp - delta[..., None])
    dsinks = -(p_sink * delta).sum((0, 2)) if p_sink is not None else None
    dbias = ds.sum_to_size(four_dims(mask.float_bias).shape) if mask.float_bias is not None else None
    dx = ds * (1.0 - tanh**2) if tanh is not None else ds
    scale = mask.scale_for(q.shape[-1])
    dq = scale * (dx @ k)
    dk = scale * (dx.mT @ q)

    if dbias is not None and mask.bias is not None:
        dbias = dbias.reshape(mask.bias.shape)
    return Gradients(dq, _summed_to_heads_of(dk, like=kv), _summed_to_heads_of(dv, like=kv), dbias, dsinks)


def _forward_varlen(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    assert mask.cu_seqlens_q is not None and mask.cu_seqlens_k is not None
    o = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for b, rows, cols in sequences(mask.cu_seqlens_q, mask.cu_seqlens_k):
        ob, lseb = _forward(packed(q, rows), packed(k, cols), packed(v, cols), mask, range(b, b + 1))
        packed(o, rows).copy_(ob)
        lse[:, rows] = lseb[0]
    return o, lse


def _backward_varlen(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask) -> Gradients:
    assert mask.cu_seqlens_q is not None and mask.cu_seqlens_k is not None
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsinks = (
        torch.zeros_like(mask.sinks, dtype=torch.promote_types(q.dtype, torch.float32))
        if mask.sinks is not None
        else None
    )
    for b, rows, cols in sequences(mask.cu_seqlens_q, mask.cu_seqlens_k):
        dlseb = None if dlse is None else dlse[None, :, rows]
        g = _backward(packed(q, rows), packed(k, cols), packed(v, cols), packed(do, rows), dlseb, mask, range(b, b + 1))
        packed(dq, rows).copy_(g.dq)
        packed(dk, cols).copy_(g.dk)
        packed(dv, cols).copy_(g.dv)
        if dsinks is not None and g.dsinks is not None:
            dsinks += g.dsinks
    return Gradients(dq, dk, dv, None, dsinks)


def workspace(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, backward: bool, deterministic: bool) -> Shapes:
    return {}


def prepare_fwd(_call: Forward, _views: Views) -> Callable[[Forward], None]:
    return _run_forward


def prepare_bwd(_call: Backward, _views: Views) -> Callable[[Backward], None]:
    return _run_backward


def _run_forward(call: Forward) -> None:
    o, lse = forward(call.q.double(), call.k.double(), call.v.double(), call.mask)
    if call.o is not None:
        call.o.copy_(o)
    if call.lse is not None:
        call.lse.copy_(lse)


def _run_backward(call: Backward) -> None:
    dlse = None if call.dlse is None else call.dlse.double()
    g = backward(call.q.double(), call.k.double(), call.v.double(), call.do.double(), dlse, call.mask)
    for out, value in ((call.dq, g.dq), (call.dk, g.dk), (call.dv, g.dv), (call.dbias, g.dbias)):
        if out is not None:
            assert value is not None
            out.copy_(value)
    if call.dsinks is not None and g.dsinks is not None:
        call.dsinks.add_(g.dsinks)
