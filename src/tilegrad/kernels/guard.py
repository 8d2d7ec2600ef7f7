"""The guard of a training step, decided on the device.       loss, norm, in_a_row 0-d

    norm     ← NaN           where loss is not finite, or in_a_row ≥ most
    in_a_row ← in_a_row + 1  where norm is not finite, else 0

AdamW changes nothing where norm is not finite, so one step that went wrong is left out. After `most` of them in a row all
are: a host that reads results late finds the weights as they were.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import check_tensor
from .op import op
from .scratch import Scratch, Shapes, views


def guard_workspace() -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold."""
    return {"halted": ((), torch.bool), "spoiled": ((), torch.float32)}


@op(accumulates=("norm", "in_a_row"))
def guard(loss: Tensor, most: int, *, norm: Tensor, in_a_row: Tensor, scratch: Scratch | None = None) -> None:
    """norm (of loss's dtype) and in_a_row (float32) in place."""
    check_tensor("norm", norm, (), loss.dtype, loss.device)
    check_tensor("in_a_row", in_a_row, (), torch.float32, loss.device)
    buffers = views(scratch, guard_workspace(), loss.device, "guard")
    halted, spoiled = buffers["halted"], buffers["spoiled"]
    norm.add_(loss, alpha=0.0)  # 0 · loss is NaN where loss is not finite
    torch.ge(in_a_row, most, out=halted)
    norm.masked_fill_(halted, math.nan)
    spoiled.copy_(norm).mul_(0.0).nan_to_num_(nan=1.0)
    in_a_row.add_(1.0).mul_(spoiled)
