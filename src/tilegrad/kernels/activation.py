"""Activations of the feed-forward layer, elementwise.       h, a, gate, up: one shape, any strides

    gelu   a = h σ(2u), u = √(2/π) (h + 0.044715 h³)     (GPT-2's, the tanh form)
    tanh   a = tanh h            dh = da · 4 σ(2h) σ(−2h)  = da (1 − tanh² h), from h alone
    relu   a = max(h, 0)         dh = da where h > 0
    swiglu a = silu(gate) ∘ up   dup = da ∘ silu(gate)   dgate = da ∘ up ∘ silu'(gate)   silu(g) = g σ(g)

The backward reads h, so a need not be kept. dh may be da itself, and dgate may be da.

gelu' = σ(z) + h z' σ(z) σ(−z), z = 2u. torch forms it with tanh, which on aarch64 is three times as slow as σ; there float32
goes through the scratch, in blocks of rows. With c = 2 √(2/π) · 0.044715, k = 1 / 0.044715 and sign = −sgn h:

    z = c (h² + k) h   h z' = 3 c (h² + k/3) h   s = σ(−|z|)   gelu' = ½ + (s − ½) sign + h z' s (1 − s)
"""

from __future__ import annotations

import math
import platform
from typing import Any

import torch
from torch import Tensor

from .attention.checks import check_tensor
from .dispatch import op
from .scratch import Scratch, Shapes, blocks, rows_of, views

KINDS = ("gelu", "tanh", "relu")
BLOCK = 1 << 20  # elements of a block of rows
_SLOW_TANH = platform.machine() == "aarch64"
_K, _C = 1.0 / 0.044715, 2.0 * math.sqrt(2.0 / math.pi) * 0.044715
_aten = torch.ops.aten
_SATURATED = 80.0  # σ(80) is 1 in float64, and exp(80) is finite in float32


def _check(kind: str, h: Tensor, **others: Tensor) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; accepted: one of {', '.join(map(repr, KINDS))}")
    for name, other in others.items():
        check_tensor(name, other, tuple(h.shape), h.dtype, h.device)


@op()
def activation_fwd(h: Tensor, kind: str, *, a: Tensor) -> None:
    """a = kind(h); a may be h."""
    _check(kind, h, a=a)
    if kind == "gelu":
        _aten.gelu.out(h, approximate="tanh", out=a)
    elif kind == "tanh":
        torch.tanh(h, out=a)
    else:
        torch.clamp(h, min=0.0, out=a)


def activation_workspace(h: Any, kind: str) -> Shapes:
    """Name → (shape, dtype) of what the backward's `scratch` must hold: nothing in most cases."""
    by_sigma = _SLOW_TANH and kind == "gelu" and h.dtype == torch.float32 and torch.device(h.device).type == "cpu"
    return {name: ((_rows(h), *h.shape[1:]), h.dtype) for name in ("s", "p", "sign")} if by_sigma else {}


def _rows(h: Any) -> int:
    n, *others = h.shape
    return int(max(1, min(n, BLOCK // max(math.prod(others), 1))))


@op()
def activation_bwd(da: Tensor, h: Tensor, kind: str, *, dh: Tensor, scratch: Scratch | None = None) -> None:
    """dh = da ∘ kind'(h); dh may be da."""
    _check(kind, h, da=da, dh=dh)
    buffers = views(scratch, activation_workspace(h, kind), h.device, "activation")
    if buffers:
        for i in blocks(h.shape[0], _rows(h)):
            _gelu_bwd(rows_of(da, i), rows_of(h, i), buffers, dh=rows_of(dh, i))
    elif kind == "gelu":
        _aten.gelu_backward.grad_input(da, h, approximate="tanh", grad_input=dh)
    elif kind == "tanh":  # softplus_backward(g, h, β, ·) = g σ(β h)
        _aten.softplus_backward.grad_input(da, h, 2.0, _SATURATED, grad_input=dh)
        _aten.softplus_backward.grad_input(dh, h, -2.0, _SATURATED, grad_input=dh).mul_(4.0)
    else:
        _aten.threshold_backward.grad_input(da, h, 0.0, grad_input=dh)


def _gelu_bwd(da: Tensor, h: Tensor, buffers: Scratch, *, dh: Tensor) -> None:
    s, p, sign = (rows_of(buffers[name], slice(0, h.shape[0])) for name in ("s", "p", "sign"))
    torch.sign(h, out=sign).neg_()
    torch.mul(h, h, out=p)
    torch.add(p, _K, out=s).mul_(h).mul_(sign).mul_(_C).sigmoid_()
    p.add_(_K / 3.0).mul_(h)
    _aten.sigmoid_backward.grad_input(p, s, grad_input=p)  # p s (1 − s)
    torch.mul(s.sub_(0.5).mul_(sign).add_(p, alpha=3.0 * _C).add_(0.5), da, out=dh)


@op()
def swiglu_fwd(gate: Tensor, up: Tensor, *, a: Tensor) -> None:
    """a = silu(gate) ∘ up"""
    for name, other in (("up", up), ("a", a)):
        check_tensor(name, other, tuple(gate.shape), gate.dtype, gate.device)
    _aten.silu.out(gate, out=a).mul_(up)


@op()
def swiglu_bwd(da: Tensor, gate: Tensor, up: Tensor, *, dgate: Tensor, dup: Tensor) -> None:
    """dup = da ∘ silu(gate)   dgate = da ∘ up ∘ silu'(gate); dgate may be da."""
    for name, other in (("da", da), ("up", up), ("dgate", dgate), ("dup", dup)):
        check_tensor(name, other, tuple(gate.shape), gate.dtype, gate.device)
    _aten.silu.out(gate, out=dup).mul_(da)
    torch.mul(da, up, out=dgate)
    _aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
