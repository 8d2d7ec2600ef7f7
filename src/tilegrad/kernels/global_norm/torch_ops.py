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
        count = grads.shape[0] // BLOCK  # blocks of BLOCK elements; one shorter block follows
        if grads.dtype == torch.bfloat16:
            for n in range(count + 1):
                block = grads[n * BLOCK : (n + 1) * BLOCK]
                torch.linalg.vector_norm(scratch["float32"][: len(block)].copy_(block), out=parts[at + n])
        else:
            if count:
                torch.linalg.vector_norm(grads[: count * BLOCK].view(count, BLOCK), dim=1, out=parts[at : at + count])
            torch.linalg.vector_norm(grads[count * BLOCK :], out=parts[at + count])
        at += count + 1
    torch.linalg.vector_norm(parts, out=norm)
