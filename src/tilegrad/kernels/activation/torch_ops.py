"""Activations by torch's elementwise ops: any device, dtype and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..column_sum import COLUMN_SUM, column_sum_workspace
from ..scratch import Scratch, Shapes, TensorLike, below, blocks, of, rows_per_block
from ..table import Problem

if TYPE_CHECKING:
    from . import Sums

_aten = torch.ops.aten
BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}  # elements that swiglu's backward computes at once
_SATURATED = 80.0  # σ(80) is 1 in float64, and exp(80) is finite in float32


def workspace(x: TensorLike, kind: str, *_: object, backward: bool = True, sums: bool = True) -> Shapes:
    shapes: Shapes = (
        {"block": ((2, rows_per_block(x, BLOCK), x.shape[1]), x.dtype)} if kind == "swiglu" and backward else {}
    )
    return shapes | (below("column_sum", column_sum_workspace(x)) if sums else {})


def fwd(h: Tensor, kind: str, *, a: Tensor, scratch: Scratch) -> None:
    if kind == "gelu":
        if h.is_contiguous() and not a.is_contiguous():
            h = a.copy_(h)  # oneDNN's gelu cannot write a strided output if the input is contiguous (torch 2.13)
        _aten.gelu.out(h, approximate="tanh", out=a)
    elif kind == "tanh":
        torch.tanh(h, out=a)
    else:
        torch.clamp(h, min=0.0, out=a)
        if kind == "relu2":
            a.mul_(a)


def bwd(da: Tensor, h: Tensor, kind: str, *, dh: Tensor, a: Tensor | None, sums: Sums, scratch: Scratch) -> None:
    if kind == "gelu":
        _aten.gelu_backward.grad_input(da, h, approximate="tanh", grad_input=dh)
    elif kind == "tanh":  # softplus_backward(g, h, β, ·) = g σ(β h)
        _aten.softplus_backward.grad_input(da, h, 2.0, _SATURATED, grad_input=dh)
        _aten.softplus_backward.grad_input(dh, h, -2.0, _SATURATED, grad_input=dh).mul_(4.0)
    elif kind == "relu2":  # where h < 0 the product may be infinite; threshold_backward writes 0 there
        _aten.threshold_backward.grad_input(torch.mul(da, h, out=dh), h, 0.0, grad_input=dh).mul_(2.0)
    else:
        _aten.threshold_backward.grad_input(da, h, 0.0, grad_input=dh)
    _add_columns(dh, sums=sums, scratch=scratch)
    if a is not None:
        fwd(h, kind, a=a, scratch=scratch)


def swiglu_fwd(gate: Tensor, up: Tensor, *, a: Tensor, scratch: Scratch) -> None:
    _aten.silu.out(gate, out=a).mul_(up)


def swiglu_bwd(
    da: Tensor, gate: Tensor, up: Tensor, *,
    dgate: Tensor, dup: Tensor, a: Tensor | None, sums: Sums, scratch: Scratch,
    forward: Callable[..., object] | None = None,
) -> None:  # fmt: skip
    """dgate may be gate, dup may be up, and a may be da, so silu(gate) and a of a block of rows are kept in scratch. `forward`
    is a kernel that computes a with the bits of the forward; None: torch.mul does."""
    for i in blocks(da.shape[0], scratch["block"].shape[1]):
        silu, recomputed = scratch["block"][:, : i.stop - i.start].unbind()
        _aten.silu.out(gate[i], out=silu)
        if a is not None and forward is not None:
            forward(gate[i], up[i], a=recomputed, scratch={})
        elif a is not None:
            torch.mul(silu, up[i], out=recomputed)
        torch.mul(da[i], up[i], out=dup[i])
        _aten.silu_backward.grad_input(dup[i], gate[i], grad_input=dgate[i])
        torch.mul(silu, da[i], out=dup[i])
        if a is not None:
            a[i].copy_(recomputed)
    _add_columns(dgate, dup, sums=sums, scratch=scratch)


def _add_columns(*gradients: Tensor, sums: Sums, scratch: Scratch) -> None:
    for x, total in zip(gradients, sums.tensors, strict=False):  # there may be no sums
        COLUMN_SUM.run("fwd", Problem(x), x, sums=total, accumulate=sums.accumulate, scratch=of("column_sum", scratch))
