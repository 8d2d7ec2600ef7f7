"""y = x wᵀ + b for a few rows of x, in Triton.       x (N, K)   w (M, K)   b (M,)   y (N, M)

The kernel takes as long as reading w once. A program computes BLOCK_M columns of y from as many rows of w, BLOCK_K columns at a
time, and reads the next tile of w while it multiplies the current one. The first tile of w is read before the program waits for
the previous kernel, so no kernel of the chain may write w (dependent_launch.py). Products and sums are float32.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..checks import check_columns
from ..dependent_launch import dependent, start_next, wait_for_previous
from ..gpu import ceil_div, launch, multiprocessors, padded
from ..scratch import Scratch, Shapes, TensorLike

TILE, WARPS = 8192, 4  # elements of a tile of w
LARGE, LARGE_TILE, LARGE_WARPS = 1 << 23, 4096, 2  # for a w of at least LARGE elements: more programs run at once
MOST_OUTPUTS, LEAST_OUTPUTS = 4, 2  # outputs of a program
PROGRAMS = 2  # per multiprocessor; if w has too few rows for these, a program has fewer outputs, at least LEAST_OUTPUTS


@triton.jit
def _few_rows_kernel(
    x, w, b, y, x_n, w_m, y_n, n, m, k, scale,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    outputs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, ROWS)[None, :]
    inside = (outputs < m)[:, None]
    at_w = w + outputs.to(tl.int64)[:, None] * w_m + columns[None, :]
    tile = tl.load(at_w, inside & (columns < k)[None, :], 0.0)
    wait_for_previous(DEPENDENT)

    total = tl.zeros([BLOCK_M, ROWS], tl.float32)
    for first in range(0, k, BLOCK_K):
        later = first + BLOCK_K
        next_tile = tl.load(at_w + later, inside & (later + columns < k)[None, :], 0.0)
        for row in tl.static_range(ROWS):
            at_x = x + row * tl.cast(x_n, tl.int64) + first + columns
            x_row = tl.load(at_x, (first + columns < k) & (row < n), 0.0).to(tl.float32)
            sums = tl.sum(tile.to(tl.float32) * x_row[None, :], 1)
            total += tl.where(rows == row, sums[:, None], 0.0)
        tile = next_tile

    total *= scale
    if b is not None:
        total += tl.load(b + outputs, outputs < m, 0.0).to(tl.float32)[:, None]
    tl.store(y + rows * tl.cast(y_n, tl.int64) + outputs[:, None], total.to(y.dtype.element_ty), inside & (rows < n))


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, backward: bool = False, *, bias: bool) -> Shapes:
    return {}


def _outputs(m: int, x: TensorLike) -> int:
    """BLOCK_M, the number of outputs of a program."""
    outputs = MOST_OUTPUTS
    while outputs > LEAST_OUTPUTS and ceil_div(m, outputs) < PROGRAMS * multiprocessors(x.device):
        outputs //= 2
    return outputs


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float, scratch: Scratch) -> None:
    check_columns("y", y)
    check_columns("b", b)
    (n, k), m = x.shape, w.shape[0]
    outputs = _outputs(m, x)
    tile, warps = (LARGE_TILE, LARGE_WARPS) if m * k >= LARGE else (TILE, WARPS)
    constants = {"ROWS": padded(n), "BLOCK_M": outputs, "BLOCK_K": min(tile // outputs, padded(k)), "num_warps": warps}
    strides = x.stride(0), w.stride(0), y.stride(0)
    launch(
        _few_rows_kernel, (ceil_div(m, outputs),), x, w, b, y, *strides, n, m, k, scale, **constants, **dependent(x, n)
    )
