"""The norm by torch's own norms, of blocks and then of these: any device, any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes

BLOCK = 1 << 16  # elements whose norm is taken at once


def workspace(grads: Any) -> Shapes:
    return {"parts": ((grads.shape[0] // BLOCK + 1,), grads.dtype)}


def fwd(grads: Tensor, *, norm: Tensor, scratch: Scratch) -> None:
    parts, whole = scratch["parts"], grads.shape[0] // BLOCK
    if whole:
        torch.linalg.vector_norm(grads[: whole * BLOCK].view(whole, BLOCK), dim=1, out=parts[:whole])
    torch.linalg.vector_norm(grads[whole * BLOCK :], out=parts[whole])
    torch.linalg.vector_norm(parts, out=norm)
