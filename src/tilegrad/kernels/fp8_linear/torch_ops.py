"""Float8 products by torch's casts and a float32 product of the rounded factors: any device. Allocates memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..activation import Sums
from ..activation import torch_ops as activations
from ..scratch import Scratch, Shapes, TensorLike
from .state import FIRST_PART, FOLLOWED, FORMAT, JUMP, JUMPS

if TYPE_CHECKING:
    from . import Product

NO_SUMS = Sums((), accumulate=False)


def workspace(_x: TensorLike, _w: TensorLike | None, _added: TensorLike | None = None, _summed: int = 0) -> Shapes:
    return {}


def quantize(x: Tensor, *, x8: Tensor | None, x8t: Tensor | None, state: Tensor, scratch: Scratch) -> None:
    x32, largest = x.float(), state[FORMAT]
    if x.numel():
        seen = state[FIRST_PART]
        seen.copy_(torch.maximum(seen, x32.abs().amax()))
    bounded = (x32 / state[0]).clamp_(-largest, largest)
    if x8 is not None:
        x8.copy_(bounded)
    if x8t is not None:
        x8t[:, : x.shape[0]].copy_(bounded.t())
        x8t[:, x.shape[0] :].zero_()


def activation(h: Tensor, kind: str, *, a8: Tensor | None, a8t: Tensor | None, state: Tensor, scratch: Scratch) -> None:
    h = h.float()
    if kind == "swiglu":
        up, gate = h.chunk(2, dim=1)
        activations.swiglu_fwd(
            gate, up, a=(a := torch.empty_like(gate, memory_format=torch.contiguous_format)), scratch={}
        )
    else:
        activations.fwd(h, kind, a=(a := torch.empty_like(h)), scratch={})
    quantize(a, x8=a8, x8t=a8t, state=state, scratch={})


def activation_bwd(
    da: Tensor, h: Tensor, kind: str, *,
    dh8: Tensor | None, dh8t: Tensor | None, a: Tensor | None, sums: tuple[Tensor, ...], accumulate: bool, state: Tensor,
    scratch: Scratch,
) -> None:  # fmt: skip
    da32, h32 = da.float(), h.float()
    dh, a32 = torch.empty_like(h32), torch.empty_like(da32)
    if kind == "swiglu":
        (up, gate), (dup, dgate) = h32.chunk(2, dim=1), dh.chunk(2, dim=1)
        block = {"block": da32.new_empty(2, *da32.shape)}
        activations.swiglu_bwd(da32, gate, up, dgate=dgate, dup=dup, a=a32, sums=NO_SUMS, scratch=block)
    else:
        activations.bwd(da32, h32, kind, dh=dh, a=a32, sums=NO_SUMS, scratch={})
    if a is not None:
        a.copy_(a32)
    for total, part in zip(sums, dh.chunk(len(sums), dim=1) if sums else (), strict=True):
        total.copy_(total + part.sum(0) if accumulate else part.sum(0))
    quantize(dh, x8=dh8, x8t=dh8t, state=state, scratch={})


def softmax_bwd(
    logits: Tensor, targets: Tensor, row_max: Tensor, factor: Tensor, inv_total: Tensor, softcap: float, *,
    dl8: Tensor, dl8t: Tensor, state: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    x = logits.float()
    x = softcap * torch.tanh(x / softcap) if softcap else x
    dl = torch.exp(x - row_max[:, None]) * factor[:, None]
    dl = torch.where(targets[:, None] == torch.arange(x.shape[1], device=x.device), dl - inv_total, dl)
    dl = dl * (1.0 - (x / softcap).square()) if softcap else dl
    quantize(dl, x8=dl8, x8t=dl8t, state=state.clone(), scratch={})


def product(
    a8: Tensor, a_state: Tensor, b8: Tensor, b_state: Tensor, b: Tensor | None, *, into: Product, scratch: Scratch
) -> None:
    out, accumulate, _ = into
    y = a8.float() @ b8.float().t() * (a_state[0] * b_state[0])
    y = y if b is None else y + b
    out.copy_(out.float() + y if accumulate else y)


def scale_step(*, states: Sequence[Tensor], jumps: Tensor, scratch: Scratch) -> None:
    jumps.zero_()
    for state in states:
        largest, format_largest = state[FIRST_PART:].amax(), state[FORMAT]
        if largest.isfinite() and largest > 0.0:
            if state[FOLLOWED] > 0.0 and largest > JUMP * state[0] * format_largest:
                state[JUMPS] += 1.0
                jumps += 1.0
            state[0], state[FOLLOWED] = largest / format_largest, 1.0
        state[FIRST_PART:].zero_()
