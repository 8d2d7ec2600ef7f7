"""Float8 products by torch's casts and a float32 product of the rounded factors: any device. Allocates memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..activation.torch_ops import fwd as activation_fwd
from ..scratch import Scratch, Shapes, TensorLike
from .state import FIRST_PART, LARGEST


def workspace(_x: TensorLike, w: TensorLike | None) -> Shapes:
    return {} if w is None else {"w8": (tuple(w.shape), torch.float8_e4m3fn)}


def quantize(x: Tensor, *, x8: Tensor, state: Tensor, scratch: Scratch) -> None:
    x32 = x.float()
    if x.numel():
        seen = state[FIRST_PART]
        seen.copy_(torch.maximum(seen, x32.abs().amax()))
    x8.copy_((x32 / state[0]).clamp_(-LARGEST, LARGEST))


def activation(h: Tensor, kind: str, *, a8: Tensor, state: Tensor, scratch: Scratch) -> None:
    a = torch.empty_like(h)
    activation_fwd(h, kind, a=a, scratch={})
    quantize(a, x8=a8, state=state, scratch={})


def fwd(
    x8: Tensor, x_state: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, state: Tensor, scratch: Scratch
) -> None:
    quantize(w, x8=scratch["w8"], state=state, scratch={})
    product = x8.float() @ scratch["w8"].float().t() * (x_state[0] * state[0])
    y.copy_(product if b is None else product + b)


def scale_step(*, state: Tensor, scratch: Scratch) -> None:
    largest = state[FIRST_PART:].amax()
    if largest.isfinite() and largest > 0.0:
        state[0] = largest / LARGEST
    state[FIRST_PART:].zero_()
