"""Activations of the feed-forward layer, elementwise.       h, a, gate, up: one shape, any strides

    gelu   a = h σ(2u), u = √(2/π) (h + 0.044715 h³)     (GPT-2's, the tanh form)
    tanh   a = tanh h            dh = da · 4 σ(2h) σ(−2h)  = da (1 − tanh² h), from h alone
    relu   a = max(h, 0)         dh = da where h > 0
    swiglu a = silu(gate) ∘ up   dup = da ∘ silu(gate)   dgate = da ∘ up ∘ silu'(gate)   silu(g) = g σ(g)

The backward reads h, so a need not be kept. dh may be da itself, and dgate may be da. gelu of float32 and bfloat16 on a CPU
is in rowwise.py where all lie contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_tensor
from ..cpu import rowwise
from ..op import op

KINDS = ("gelu", "tanh", "relu")
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
    if kind == "gelu" and rowwise.takes(h) and h.is_contiguous() and a.is_contiguous():
        rowwise.gelu_fwd(h, a=a)
    elif kind == "gelu":
        _aten.gelu.out(h, approximate="tanh", out=a)
    elif kind == "tanh":
        torch.tanh(h, out=a)
    else:
        torch.clamp(h, min=0.0, out=a)


@op()
def activation_bwd(da: Tensor, h: Tensor, kind: str, *, dh: Tensor) -> None:
    """dh = da ∘ kind'(h); dh may be da."""
    _check(kind, h, da=da, dh=dh)
    if kind == "gelu" and rowwise.takes(h) and all(x.is_contiguous() for x in (h, da, dh)):
        rowwise.gelu_bwd(da, h, dh=dh)
    elif kind == "gelu":
        _aten.gelu_backward.grad_input(da, h, approximate="tanh", grad_input=dh)
    elif kind == "tanh":  # softplus_backward(g, h, β, ·) = g σ(β h)
        _aten.softplus_backward.grad_input(da, h, 2.0, _SATURATED, grad_input=dh)
        _aten.softplus_backward.grad_input(dh, h, -2.0, _SATURATED, grad_input=dh).mul_(4.0)
    else:
        _aten.threshold_backward.grad_input(da, h, 0.0, grad_input=dh)


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
