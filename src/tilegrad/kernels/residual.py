"""Ops between layers: the residual sum, zero and copy, and sums of gradients. Each is one memory-bound torch op. kernels/norm
has the residual sum that is fused into the next norm.

add       y = x + f        backward: both branches receive dy
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_tensor
from .op import op
from .scratch import Scratch, Shapes, TensorLike, blocks, views

Gaps = tuple[tuple[int, int], ...]  # (start, stop) of each
BLOCK = 1 << 15  # elements of a gradient that are added at once on a CPU


@op()
def add_fwd(x: Tensor, f: Tensor, *, y: Tensor) -> None:
    """y = x + f; y may be x or f."""
    for name, other in (("f", f), ("y", y)):
        check_tensor(name, other, tuple(x.shape), x.dtype, x.device)
    torch.add(x, f, out=y)


@op()
def zero_fwd(*, x: Tensor) -> None:
    """x = 0"""
    x.zero_()


@op(adds=("x",))
def zero_gaps(gaps: Gaps, *, x: Tensor) -> None:
    """x[start:stop] = 0 for each (start, stop) of gaps"""
    for start, stop in gaps:
        x[start:stop].zero_()


@op()
def copy_fwd(x: Tensor, *, y: Tensor) -> None:
    """y = x, converted to y's dtype and strides."""
    check_tensor("y", y, tuple(x.shape), y.dtype, x.device)
    y.copy_(x)


def keep_gradient_workspace(grad: TensorLike) -> Shapes:
    """Name → (shape, dtype) of the scratch. Without it, torch would allocate memory for a sum of two dtypes on a CPU."""
    return {"sum": ((BLOCK,), torch.float32)} if grad.device.type == "cpu" else {}


@op(accumulates=("total",))
def keep_gradient(grad: Tensor, *, total: Tensor, accumulate: bool, scratch: Scratch | None = None) -> None:
    """total (bfloat16) += grad (float32), rounded to the nearest once; accumulate=False: total = grad."""
    check_tensor("grad", grad, tuple(grad.shape), torch.float32, grad.device)
    check_tensor("total", total, tuple(grad.shape), torch.bfloat16, grad.device)
    for name, x in (("grad", grad), ("total", total)):
        if not x.is_contiguous():
            raise ValueError(f"{name}: got strides {x.stride()}; accepted: a contiguous tensor")
    if not accumulate:
        total.copy_(grad)
    elif grad.device.type != "cpu":
        total.add_(grad)
    else:
        given, out = grad.view(-1), total.view(-1)
        sums = views(scratch, keep_gradient_workspace(grad), grad.device, "keep_gradient")["sum"]
        for i in blocks(len(given), BLOCK):
            out[i].copy_(sums[: i.stop - i.start].copy_(out[i]).add_(given[i]))
