"""The guard of a training step, evaluated on the device.       loss, norm, in_a_row 0-d

    norm     ← NaN           if loss is not finite, or in_a_row ≥ most
    in_a_row ← in_a_row + 1  if norm is not finite, else 0
    step     ← step + 1      if norm is finite            (only if AdamW does not run: AdamW counts the steps itself)

AdamW and Muon change nothing if norm is not finite, so a non-finite step is skipped. After `most` such steps in a row all
later steps are skipped too: a host that reads results late finds the weights unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import check_given, check_tensor
from .op import op
from .scratch import Scratch, Shapes, views


def non_finite(norm: Tensor, *, out: Tensor) -> Tensor:
    """out (0-d) = 0 if norm is finite, else 1. 0 · norm is NaN if norm is not finite."""
    return out.copy_(norm).mul_(0.0).nan_to_num_(nan=1.0)


def guard_workspace() -> Shapes:
    """Name → (shape, dtype) of the scratch."""
    return {"halted": ((), torch.bool), "spoiled": ((), torch.float32)}


@op(accumulates=("norm", "in_a_row", "step"))
def guard(
    loss: Tensor,
    most: int,
    *,
    norm: Tensor,
    in_a_row: Tensor,
    step: Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Updates norm (in loss's dtype), in_a_row and step (float32) in place."""
    check_tensor("norm", norm, (), loss.dtype, loss.device)
    check_given(loss.device, ("in_a_row", in_a_row, (), torch.float32), ("step", step, (), torch.float32))
    buffers = views(scratch, guard_workspace(), loss.device, "guard")
    halted, spoiled = buffers["halted"], buffers["spoiled"]
    norm.add_(loss, alpha=0.0)  # 0 · loss is NaN if loss is not finite
    torch.ge(in_a_row, most, out=halted)
    norm.masked_fill_(halted, math.nan)
    non_finite(norm, out=spoiled)
    in_a_row.add_(1.0).mul_(spoiled)
    if step is not None:
        step.add_(1.0).sub_(spoiled)
