"""Ops between layers: the residual sum, zero and copy. Each is one memory-bound torch op. The sum fused into the next norm is
in kernels/norm.

add       y = x + f        backward: both branches receive dy
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_tensor
from .op import op


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


@op()
def copy_fwd(x: Tensor, *, y: Tensor) -> None:
    """y = x, converted to y's dtype and strides."""
    check_tensor("y", y, tuple(x.shape), y.dtype, x.device)
    y.copy_(x)
