"""The product by cuBLAS's float8 GEMM, `torch._scaled_mm`; `round_both_orders.py` rounds its factors.

The tensor cores add 32 products at a time and keep 13 bits below the largest of them (`use_fast_accum`). With 3,072 inputs the
error of this sum is 0.1 % of y's root mean square, that of the rounded factors 4 %. The error of the sum grows with the number
of products, and the gradient of a weight adds one for each token: with 65,536 tokens it would be 12 %. So such a gradient is
`precise`: every 128 products are added to a float32 sum (0.01 %), which takes 6 % longer.

`_scaled_mm` overwrites its output. A product that is added to out is computed in scratch in out's dtype, a block of rows at a
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike, blocks
from .round_both_orders import activation, activation_bwd, activation_workspace, quantize, scale_step, softmax_bwd

if TYPE_CHECKING:
    from . import Product

# The functions that FP8_LINEAR calls.
__all__ = ["activation", "activation_bwd", "product", "quantize", "scale_step", "softmax_bwd", "workspace"]

ADDED, ROWS = 1 << 24, 128  # elements of a product that are added at once, in whole blocks of ROWS rows


def workspace(x: TensorLike, _w: TensorLike | None, added: TensorLike | None = None, summed: int = 0) -> Shapes:
    if summed:
        return activation_workspace(x, summed)
    if added is None:
        return {}
    m, p = added.shape
    return {"product": ((min(m, _rows(p)), p), added.dtype)}


def _rows(columns: int) -> int:
    """The rows of a product that are added at once."""
    return max(1, ADDED // columns // ROWS) * ROWS


def product(
    a8: Tensor, a_state: Tensor, b8: Tensor, b_state: Tensor, b: Tensor | None, *, into: Product, scratch: Scratch
) -> None:
    out, accumulate, precise = into
    if not out.numel():
        return
    scales, fast = (a_state[:1], b_state[:1]), not precise
    with torch.cuda.device_of(out):
        if not accumulate:
            torch._scaled_mm(a8, b8.t(), *scales, bias=b, out_dtype=out.dtype, use_fast_accum=fast, out=out)
            return
        block = scratch["product"]
        for i in blocks(a8.shape[0], block.shape[0]):
            part = block[: i.stop - i.start]
            torch._scaled_mm(a8[i], b8.t(), *scales, out_dtype=out.dtype, use_fast_accum=fast, out=part)
            out[i].add_(part)
