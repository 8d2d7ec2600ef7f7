"""Activations by torch's own elementwise ops: any device, any dtype, any strides."""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten
_SATURATED = 80.0  # σ(80) is 1 in float64, and exp(80) is finite in float32


def fwd(h: Tensor, kind: str, *, a: Tensor) -> None:
    if kind == "gelu":
        _aten.gelu.out(h, approximate="tanh", out=a)
    elif kind == "tanh":
        torch.tanh(h, out=a)
    else:
        torch.clamp(h, min=0.0, out=a)


def bwd(da: Tensor, h: Tensor, kind: str, *, dh: Tensor) -> None:
    if kind == "gelu":
        _aten.gelu_backward.grad_input(da, h, approximate="tanh", grad_input=dh)
    elif kind == "tanh":  # softplus_backward(g, h, β, ·) = g σ(β h)
        _aten.softplus_backward.grad_input(da, h, 2.0, _SATURATED, grad_input=dh)
        _aten.softplus_backward.grad_input(dh, h, -2.0, _SATURATED, grad_input=dh).mul_(4.0)
    else:
        _aten.threshold_backward.grad_input(da, h, 0.0, grad_input=dh)


def swiglu_fwd(gate: Tensor, up: Tensor, *, a: Tensor) -> None:
    _aten.silu.out(gate, out=a).mul_(up)


def swiglu_bwd(da: Tensor, gate: Tensor, up: Tensor, *, dgate: Tensor, dup: Tensor) -> None:
    _aten.silu.out(gate, out=dup).mul_(da)
    torch.mul(da, up, out=dgate)
    _aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
