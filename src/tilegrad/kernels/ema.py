"""An exponential moving average of parameters.       params, ema (P,): one range of the arenas

    w = 1                                    if t ≤ 1                     t: the number of updates, with this one
    w = 1 − min(d, (1 + t) / (10 + t))       if norm is finite            d: the decay
    w = 0                                    else
    ema += w · (params − ema)

So the average begins with the parameters after the first update, and in the first updates it forgets older parameters
faster than with d. A step whose norm is not finite changes neither the parameters nor the average. The device decides this,
so the host does not wait.

`swap` exchanges the bits of two ranges by three exclusive ors: it needs no memory, and a second swap restores every bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_tensor
from .guard import non_finite
from .op import op
from .scratch import Scratch, Shapes, TensorLike, accumulation_dtype, views


def ema_workspace(params: TensorLike) -> Shapes:
    """Name → (shape, dtype) of the scratch."""
    return {"w": ((), params.dtype), "finite": ((), params.dtype), "first": ((), torch.bool)}


@op(accumulates=("ema",))
def ema_step(
    params: list[Tensor], norm: Tensor, step: Tensor, decay: float, *, ema: list[Tensor], scratch: Scratch | None = None
) -> None:
    """Updates ema, which has a range for each range of params. step (0-d float32) is t. norm (0-d) is the norm of this step's
    gradients."""
    first = params[0]
    for x, average in zip(params, ema, strict=True):
        check_tensor("params", x, tuple(x.shape), accumulation_dtype(x.dtype), first.device)
        check_tensor("ema", average, tuple(x.shape), first.dtype, first.device)
    check_tensor("norm", norm, (), first.dtype, first.device)
    check_tensor("step", step, (), torch.float32, first.device)
    if not 0.0 < decay < 1.0:
        raise ValueError(f"decay: got {decay!r}; accepted: a number above 0 and below 1")
    buffers = views(scratch, ema_workspace(first), first.device, "ema")
    w, finite, begins = buffers["w"], buffers["finite"], buffers["first"]
    non_finite(norm, out=finite).neg_().add_(1.0)
    w.copy_(step).add_(10.0).reciprocal_().mul_(9.0).clamp_(min=1.0 - decay).mul_(finite)
    torch.le(step, 1.0, out=begins)
    w.masked_fill_(begins, 1.0)
    for x, average in zip(params, ema, strict=True):
        average.lerp_(x, w)


def swap(a: Tensor, b: Tensor) -> None:
    """Exchanges the contents of two tensors of the same shape and dtype."""
    check_tensor("b", b, tuple(a.shape), a.dtype, a.device)
    x, y = (each.view(torch.int64 if each.dtype == torch.float64 else torch.int32) for each in (a, b))
    x.bitwise_xor_(y)
    y.bitwise_xor_(x)
    x.bitwise_xor_(y)
