"""x wᵀ with a fixed order of additions by torch's elementwise ops: every dtype, on a CPU. This kernel is for float64 and for
machines without a compiler. It writes and reads N · Cin · Cout products, and is about a hundred times slower than a BLAS.

The Cin products of an element of x wᵀ are added in a tree: element i + h to element i, where h is half the padded Cin, then a
quarter, and so on. An elementwise product or sum is rounded once, so the bits do not depend on the number of rows, on the
threads or on the machine. A float32 w or b is first rounded to x's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gpu import padded
from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks

TILE = 1 << 16  # products that are computed at once


def _columns(w: TensorLike) -> int:
    return int(max(1, min(w.shape[-2], TILE // padded(w.shape[-1]))))


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, backward: bool = False, *, bias: bool) -> Shapes:
    (k, m), acc = (w.shape[-1], _columns(w)), accumulation_dtype(x.dtype)
    shapes: Shapes = {"products": ((m, padded(k)), acc)}
    if x.dtype != acc:
        shapes |= {"x32": ((k,), acc), "w16": ((m, k), x.dtype), "w32": ((m, k), acc)}
        shapes |= {"b16": ((m,), x.dtype), "b32": ((m,), acc)} if bias else {}
    return shapes


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float, scratch: Scratch) -> None:
    k = x.shape[1]
    for j in blocks(w.shape[0], _columns(w)):
        products = scratch["products"][: j.stop - j.start]
        wj, bj = _rounded(w[j], "w", scratch), None if b is None else _rounded(b[j], "b", scratch)
        for n in range(x.shape[0]):
            xn = scratch["x32"].copy_(x[n]) if "x32" in scratch else x[n]
            products[:, k:].zero_()
            torch.mul(wj, xn, out=products[:, :k])
            width = products.shape[1] // 2
            while width:
                products[:, :width].add_(products[:, width : 2 * width])
                width //= 2
            total = products[:, 0]
            if scale != 1.0:
                total.mul_(scale)
            y[n, j].copy_(total if bj is None else total.add_(bj))


def _rounded(p: Tensor, name: str, scratch: Scratch) -> Tensor:
    """w or b, rounded to x's dtype and converted to the accumulation dtype."""
    if "x32" not in scratch:
        return p
    p16, p32 = scratch[f"{name}16"][: p.shape[0]], scratch[f"{name}32"][: p.shape[0]]
    return p32.copy_(p16.copy_(p))
