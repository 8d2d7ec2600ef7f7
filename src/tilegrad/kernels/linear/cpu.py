"""Products of float32 matrices on a CPU by torch's BLAS. Threads take pieces of a product from a counter (csrc/gemm).

On any number of threads the result has the bits of torch's product on one thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.abi import pack_gemm
from ..cpu.library import native
from ..scratch import Scratch, Shapes, TensorLike


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, backward: bool = False, *, bias: bool) -> Shapes:
    return {}


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float, scratch: Scratch) -> None:
    if b is not None:
        y.copy_(b)
    product(x, w.t(), out=y, accumulate=b is not None)
    if scale != 1.0:
        y.mul_(scale)


def bwd_input(dy: Tensor, w: Tensor, *, dx: Tensor, accumulate: bool, scale: float, scratch: Scratch) -> None:
    product(dy, w, out=dx, accumulate=accumulate)
    if scale != 1.0:
        dx.mul_(scale)


def bwd_weight(dy: Tensor, x: Tensor, *, dw: Tensor, accumulate: bool, scratch: Scratch) -> None:
    product(dy.t(), x, out=dw, accumulate=accumulate)


def product(a: Tensor, b: Tensor, *, out: Tensor, accumulate: bool) -> None:
    """out += a b if accumulate, else out = a b. BLAS is column-major, so the call is outᵀ = bᵀ aᵀ."""
    by_columns, ldc = _layout(out)
    if by_columns:
        a, b, out = b.t(), a.t(), out.t()
    (transpose_a, lda), (transpose_b, ldb) = _layout(b), _layout(a)
    (rows, columns), k = out.shape, a.shape[1]
    threads, addresses = torch.get_num_threads(), (b.data_ptr(), a.data_ptr(), out.data_ptr())
    call = pack_gemm(transpose_a, transpose_b, columns, rows, k, lda, ldb, ldc, accumulate, threads, *addresses)
    native().tilegrad_native_gemm(call)


def _layout(x: Tensor) -> tuple[bool, int]:
    """Whether x is column-major, and its leading dimension."""
    (rows, columns), (by_row, by_column) = x.shape, x.stride()
    if by_column == 1 and by_row >= columns:
        return False, by_row
    if by_row == 1 and by_column >= rows:
        return True, by_column
    raise ValueError(
        f"linear: got a matrix {tuple(x.shape)} with strides {x.stride()}; accepted: contiguous rows or columns that "
        "do not overlap (call .contiguous())"
    )
