"""The norm by torch's vector_norm: first of blocks, then of the norms of the blocks. Any device, any dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype

BLOCK = 1 << 16  # elements of a block


def workspace(grads: TensorLike, others: Sequence[TensorLike] = ()) -> Shapes:
    parts: Shapes = {
        "parts": ((sum(x.shape[0] // BLOCK + 1 for x in (grads, *others)),), accumulation_dtype(grads.dtype))
    }
    return parts | ({"float32": ((BLOCK,), torch.float32)} if grads.dtype == torch.bfloat16 else {})


def fwd(ranges: Sequence[Tensor], *, norm: Tensor, scratch: Scratch) -> None:
    parts, at = scratch["parts"], 0
    for grads in ranges:
        whole = grads.shape[0] // BLOCK
        if grads.dtype == torch.bfloat16:
            for n in range(whole + 1):
                block = grads[n * BLOCK : (n + 1) * BLOCK]
                torch.linalg.vector_norm(scratch["float32"][: len(block)].copy_(block), out=parts[at + n])
            at += whole + 1
            continue
        if whole:
            torch.linalg.vector_norm(grads[: whole * BLOCK].view(whole, BLOCK), dim=1, out=parts[at : at + whole])
        torch.linalg.vector_norm(grads[whole * BLOCK :], out=parts[at + whole])
        at += whole + 1
    torch.linalg.vector_norm(parts, out=norm)
