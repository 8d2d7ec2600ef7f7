"""Products by one torch op each: every dtype and device except bfloat16 on a CPU.

On a CPU y is computed as yᵀ = w xᵀ, because `addmm(b, x, w.t())` copies w on aarch64. On CUDA a bfloat16 product writes a
float32 output directly. With b and a strided y `addmm` may round a bfloat16 product before it adds b: on an H200, torch 2.11
did. cuBLAS is about 4 times slower if the number of outputs is odd, as for GPT-2's 50,257 logits. So if the rows of y are
aligned, the last outputs are a separate product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike

ALIGNED = 64  # outputs of the first product, and the row stride of y, are multiples of this


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, backward: bool = False, *, bias: bool) -> Shapes:
    return {}


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float, scratch: Scratch) -> None:
    m = w.shape[0]
    end = m - m % ALIGNED
    if x.device.type == "cuda" and 0 < end < m and y.stride(0) % ALIGNED == 0:
        _fwd(x, w[:end], None if b is None else b[:end], y[:, :end], scale)
        _fwd(x, w[end:], None if b is None else b[end:], y[:, end:], scale)
    else:
        _fwd(x, w, b, y, scale)


def _fwd(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, scale: float) -> None:
    if scale != 1.0:
        product(x, w.t(), out=y, accumulate=False, scale=scale)
    elif x.device.type == "cpu":
        if b is None:
            torch.mm(w, x.t(), out=y.t())
        else:
            y.copy_(b).t().addmm_(w, x.t())
    elif y.dtype != x.dtype:
        torch.mm(x, w.t(), out_dtype=y.dtype, out=y)
    elif b is None:
        torch.mm(x, w.t(), out=y)
    else:
        torch.addmm(b, x, w.t(), out=y)


def bwd_input(dy: Tensor, w: Tensor, *, dx: Tensor, accumulate: bool, scale: float, scratch: Scratch) -> None:
    product(dy, w, out=dx, accumulate=accumulate, scale=scale)


def bwd_weight(dy: Tensor, x: Tensor, *, dw: Tensor, accumulate: bool, scratch: Scratch) -> None:
    product(dy.t(), x, out=dw, accumulate=accumulate)


def product(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool, scale: float = 1.0) -> None:
    """out += a b if accumulate, else out = scale · a b. On CUDA out may be float32 for bfloat16 a and b."""
    if scale != 1.0:
        torch.addmm(out, a, b, beta=0.0, alpha=scale, out=out)
    elif out.dtype == a.dtype:
        out.addmm_(a, b) if accumulate else torch.mm(a, b, out=out)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
