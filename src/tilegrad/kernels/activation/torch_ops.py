"""Activations by torch's elementwise ops: any device, dtype and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from ..column_sum import COLUMN_SUM, column_sum_workspace
from ..scratch import Scratch, Shapes, TensorLike, below, of
from ..table import Problem

_aten = torch.ops.aten
_SATURATED = 80.0  # σ(80) is 1 in float64, and exp(80) is finite in float32


def workspace(
    x: TensorLike,
    kind: str,
    others: tuple[Tensor, ...] = (),
    invariant: bool = False,
    *,
    sums: bool = True,
) -> Shapes:
    return below("column_sum", column_sum_workspace(x)) if sums else {}


def fwd(h: Tensor, kind: str, *, a: Tensor, scratch: Scratch) -> None:
    if kind == "gelu":
        if h.is_contiguous() and not a.is_contiguous():
            h = a.copy_(h)  # oneDNN's gelu cannot write a strided output if the input is contiguous (torch 2.13)
        _aten.gelu.out(h, approximate="tanh", out=a)
    elif kind == "tanh":
        torch.tanh(h, out=a)
    else:
        torch.clamp(h, min=0.0, out=a)


def bwd(
    da: Tensor, h: Tensor, kind: str, *,
    dh: Tensor, a: Tensor | None, dh_sum: Tensor | None, accumulate: bool, scratch: Scratch,
) -> None:  # fmt: skip
    if kind == "gelu":
        _aten.gelu_backward.grad_input(da, h, approximate="tanh", grad_input=dh)
    elif kind == "tanh":  # softplus_backward(g, h, β, ·) = g σ(β h)
        _aten.softplus_backward.grad_input(da, h, 2.0, _SATURATED, grad_input=dh)
        _aten.softplus_backward.grad_input(dh, h, -2.0, _SATURATED, grad_input=dh).mul_(4.0)
    else:
        _aten.threshold_backward.grad_input(da, h, 0.0, grad_input=dh)
    _add_columns(dh, sums=dh_sum, accumulate=accumulate, scratch=scratch)
    if a is not None:
        fwd(h, kind, a=a, scratch=scratch)


def swiglu_fwd(gate: Tensor, up: Tensor, *, a: Tensor, scratch: Scratch) -> None:
    _aten.silu.out(gate, out=a).mul_(up)


def swiglu_bwd(
    da: Tensor, gate: Tensor, up: Tensor, *,
    dgate: Tensor, dup: Tensor, a: Tensor | None, dgate_sum: Tensor | None, dup_sum: Tensor | None, accumulate: bool,
    scratch: Scratch,
) -> None:  # fmt: skip
    _aten.silu.out(gate, out=dup).mul_(da)
    torch.mul(da, up, out=dgate)
    _aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    for x, sums in ((dgate, dgate_sum), (dup, dup_sum)):
        _add_columns(x, sums=sums, accumulate=accumulate, scratch=scratch)
    if a is not None:
        swiglu_fwd(gate, up, a=a, scratch=scratch)


def _add_columns(x: Tensor, *, sums: Tensor | None, accumulate: bool, scratch: Scratch) -> None:
    if sums is not None:
        given = of("column_sum", scratch)
        COLUMN_SUM.run("fwd", Problem(x), x, sums=sums, accumulate=accumulate, scratch=given)
