"""The norm by torch's vector_norm, of blocks and then of their norms: any device, any dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike

BLOCK = 1 << 16  # elements whose norm is taken at once


def workspace(grads: TensorLike, others: Sequence[TensorLike] = ()) -> Shapes:
    return {"parts": ((sum(x.shape[0] // BLOCK + 1 for x in (grads, *others)),), grads.dtype)}


def fwd(ranges: Sequence[Tensor], *, norm: Tensor, scratch: Scratch) -> None:
    parts, at = scratch["parts"], 0
    for grads in ranges:
        whole = grads.shape[0] // BLOCK
        if whole:
            torch.linalg.vector_norm(grads[: whole * BLOCK].view(whole, BLOCK), dim=1, out=parts[at : at + whole])
        torch.linalg.vector_norm(grads[whole * BLOCK :], out=parts[at + whole])
        at += whole + 1
    torch.linalg.vector_norm(parts, out=norm)
