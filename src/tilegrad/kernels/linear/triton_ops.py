"""y = x wᵀ + b in Triton; the bits of a row do not depend on other rows.       x (N, K)   w (M, K)   y (N, M)

    s_i = Σ x w over the columns i·SPLIT … (i + 1)·SPLIT of K           y = ((s_0 + s_1) + s_2) + … + b

Each s_i is computed by tl.dot in steps of BLOCK_K. The order of additions in s_i, and the order in which the s_i are added,
depend only on K. So a row has the same bits for any N:

    N ≤ FEW    a program computes one s_i of a tile of yᵀ, so there are enough programs to read w at full memory bandwidth.
               `_add_splits_kernel` adds the s_i
    N > FEW    a program computes all s_i of its tile one after another, and adds them

The tiles are of yᵀ, whose rows are the rows of w, because an MMA takes 64 rows but any multiple of 8 columns.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import check_columns
from ..dependent_launch import dependent, start_next, wait_for_previous
from ..gpu import ceil_div, launch, padded
from ..scratch import Scratch, Shapes, TensorLike

SPLIT, BLOCK_K = 256, 64
FEW = 64  # rows of x up to which splits are computed by different programs
BLOCK_M = {
    torch.bfloat16: 128,
    torch.float16: 128,
    torch.float32: 64,
}  # rows of w in a tile, for more than FEW rows of x
BLOCK_M_FEW = 64
BLOCK = 1024  # elements of y that a program of `_add_splits_kernel` computes


@triton.jit
def _product_kernel(
    x, w, b, y, parts, x_n, w_m, y_n, n, m, k,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes one s_i to parts (splits, N, M) float32, or y if parts is None."""
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    outputs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (outputs < m)[:, None] & (rows < n)[None, :]
    of_w = w + outputs.to(tl.int64)[:, None] * w_m
    of_x = x + rows.to(tl.int64)[:, None] * x_n
    if parts is not None:
        first = tl.program_id(2) * SPLIT
        last = tl.minimum(first + SPLIT, k)
    else:
        first = 0
        last = k
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(first, last, SPLIT):
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, SPLIT, BLOCK_K, num_stages=STAGES):
            columns = begin + step + tl.arange(0, BLOCK_K)
            here = (columns < k)[None, :]
            w_tile = tl.load(of_w + columns[None, :], (outputs < m)[:, None] & here, 0.0)
            x_tile = tl.load(of_x + columns[None, :], (rows < n)[:, None] & here, 0.0)
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        total += acc
    if parts is not None:
        at = (tl.program_id(2).to(tl.int64) * n + rows.to(tl.int64)[None, :]) * m + outputs[:, None]
        tl.store(parts + at, total, inside)
    else:
        if b is not None:
            total += tl.load(b + outputs, outputs < m, 0.0).to(tl.float32)[:, None]
        tl.store(y + rows.to(tl.int64)[None, :] * y_n + outputs[:, None], total, inside)


@triton.jit
def _add_splits_kernel(parts, b, y, y_n, n, m, splits, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(splits):
        total += tl.load(parts + (tl.cast(i, tl.int64) * n + row) * m + outputs, outputs < m, 0.0)
    if b is not None:
        total += tl.load(b + outputs, outputs < m, 0.0).to(tl.float32)
    tl.store(y + row * y_n + outputs, total, outputs < m)


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, backward: bool = False, *, bias: bool) -> Shapes:
    """Never empty, because a caller that declares scratch for more than FEW rows may also run fewer."""
    (n, k), m = x.shape, w.shape[-2]
    return {"parts": ((ceil_div(k, SPLIT), min(n, FEW), m), torch.float32)}


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float, scratch: Scratch) -> None:
    check_columns("y", y)
    check_columns("b", b)
    (n, k), m = x.shape, w.shape[0]
    splits, few = ceil_div(k, SPLIT), n <= FEW
    parts = scratch["parts"] if few else None
    block_m, block_n = (BLOCK_M_FEW, max(16, padded(n))) if few else (BLOCK_M[x.dtype], BLOCK_M[x.dtype])
    constants = {"SPLIT": SPLIT, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": BLOCK_K}
    constants |= {"STAGES": 4 if few else 3, "num_warps": 4 if few else 8, **dependent(x, n)}
    grid = (ceil_div(m, block_m), ceil_div(n, block_n), splits if few else 1)
    launch(_product_kernel, grid, x, w, b, y, parts, x.stride(0), w.stride(0), y.stride(0), n, m, k, **constants)
    if parts is not None:
        constants = {"BLOCK": BLOCK, "num_warps": 4, **dependent(x, n)}
        launch(_add_splits_kernel, (ceil_div(m, BLOCK), n), parts, b, y, y.stride(0), n, m, splits, **constants)
    if scale != 1.0:
        y.mul_(scale)
