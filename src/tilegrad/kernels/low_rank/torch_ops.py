"""The gradients du, db and da as products by `linear`: any device, any dtype. dy is read twice."""

from __future__ import annotations

from torch import Tensor

from ..linear import linear_bwd_input, linear_bwd_weight, linear_workspace
from ..scratch import Form, Scratch, Shapes, TensorLike


def workspace(wide: TensorLike, thin: TensorLike, w: TensorLike, *, du: bool) -> Shapes:
    x = Form((wide.shape[0], w.shape[1]), wide.dtype, wide.device)
    return linear_workspace(x, w, backward=True, bias=False)


def bwd(
    dy: Tensor, u: Tensor, b: Tensor, scale: float, *, du: Tensor, db: Tensor | None, accumulate: bool, scratch: Scratch
) -> None:
    linear_bwd_input(dy, b, dx=du, accumulate=False, scale=scale, scratch=scratch)
    if db is not None:
        linear_bwd_weight(dy, u, b, dw=db, accumulate=accumulate, scratch=scratch)


def bwd_a(du: Tensor, x: Tensor, a: Tensor, *, da: Tensor, accumulate: bool, scratch: Scratch) -> None:
    linear_bwd_weight(du, x, a, dw=da, accumulate=accumulate, scratch=scratch)
