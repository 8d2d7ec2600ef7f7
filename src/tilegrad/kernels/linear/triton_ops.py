"""y = x wᵀ + b in Triton; the bits of a row do not depend on other rows.       x (N, K)   w (M, K)   y (N, M)

    s_i = Σ x w over the columns i·SPLIT … (i + 1)·SPLIT of K           y = ((s_0 + s_1) + s_2) + … + b

Each s_i is computed by tl.dot in steps of BLOCK_K. In half precision an MMA adds 16 products at a time, in the order of K, with
any BLOCK_K. So the order of all additions depends only on K, and the bits of a row do not depend on N:

    N ≤ FEW    if there are several s_i, a program computes one of them for a tile of yᵀ, so that enough programs read w, and
               `_add_splits_kernel` adds the s_i
    N > FEW    a program computes all s_i of its tile one after another, and adds them; from MANY rows on, TMA copies tiles

The tiles are of yᵀ, whose rows are the rows of w, because an MMA takes 64 rows but any multiple of 8 columns.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..checks import check_columns, rows_aligned
from ..dependent_launch import dependent, start_next, wait_for_previous
from ..gpu import capability, ceil_div, launch, padded
from ..ordered_sum import BLOCK, WARPS, add_parts, ahead
from ..scratch import Scratch, Shapes, TensorLike

SPLIT = 768  # a multiple of each tile's columns
FEW = 64  # rows of x up to which splits are computed by different programs
MANY = 1024  # least rows of x with which TMA copies tiles, because a launch with descriptors takes the host 20 to 40 µs
LINE: tl.constexpr = tl.constexpr(128)  # bytes of a line of the L2 cache


class Tile(NamedTuple):
    m: int  # rows of w
    n: int  # rows of x; 0: all, padded
    k: int  # columns of both
    stages: int
    warps: int


TILE_FEW = Tile(64, 0, 64, 4, 4)
TILE_FEW_DEEP = Tile(64, 0, 128, 6, 4)  # loads all SPLIT columns at once, into up to 192 KiB of shared memory
TILE_TMA = Tile(64, 128, 64, 3, 4)
TILE = Tile(64, 128, 64, 4, 4)
TILE_FLOAT32 = Tile(64, 64, 64, 3, 8)


@triton.jit
def _prefetch(w, w_m, m, k, first_output, first, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr):
    """Starts to copy a program's part of w to the L2 cache. The copy is never stale, even if an earlier kernel still writes w,
    because all multiprocessors write through the same L2, and tiles are read from it only after the wait."""
    STEP: tl.constexpr = LINE // (w.dtype.element_ty.primitive_bitwidth // 8)
    rows = tl.minimum(first_output + tl.arange(0, BLOCK_M), m - 1).to(tl.int64)[:, None]
    last = tl.minimum(first + SPLIT, k) - 1
    columns = tl.minimum(first + STEP * tl.arange(0, triton.next_power_of_2(SPLIT // STEP)), last)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [w + rows * w_m + columns], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _product_kernel(
    y, x, w, y_tiles, b, parts, x_n, w_m, y_n, n, m, k,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes one s_i to parts (splits, N, M) float32, or y if parts is None.

    TMA      x, w and y_tiles are tensor descriptors
    WHOLE    K is a multiple of BLOCK_K"""
    start_next(DEPENDENT)
    if DEPENDENT:
        _prefetch(w, w_m, m, k, tl.program_id(0) * BLOCK_M, tl.program_id(2) * SPLIT, SPLIT, BLOCK_M)
    wait_for_previous(DEPENDENT)
    first_output = tl.program_id(0) * BLOCK_M
    first_row = tl.program_id(1) * BLOCK_N
    outputs = first_output + tl.arange(0, BLOCK_M)
    rows = first_row + tl.arange(0, BLOCK_N)
    inside = (outputs < m)[:, None] & (rows < n)[None, :]
    if not TMA:
        of_w = w + tl.minimum(outputs, m - 1).to(tl.int64)[:, None] * w_m
        of_x = x + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * x_n
    if parts is not None:
        first = tl.program_id(2) * SPLIT
        last = tl.minimum(first + SPLIT, k)
    else:
        first = 0
        last = k
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if TMA:
            w_tile = w.load([first_output, begin])
            x_tile = x.load([first_row, begin])
        else:
            columns = begin + tl.arange(0, BLOCK_K)[None, :]
            here = None if WHOLE else columns < k
            w_tile = tl.load(of_w + columns, here, None if WHOLE else 0.0)
            x_tile = tl.load(of_x + columns, here, None if WHOLE else 0.0)
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        if begin % SPLIT == SPLIT - BLOCK_K:
            total += acc
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total += acc
    if parts is not None:
        at = (tl.program_id(2).to(tl.int64) * n + rows.to(tl.int64)[None, :]) * m + outputs[:, None]
        tl.store(parts + at, total, inside)
    else:
        if b is not None:
            total += tl.load(b + outputs, outputs < m, 0.0).to(tl.float32)[:, None]
        if TMA:
            y_tiles.store([first_row, first_output], tl.trans(total).to(y.dtype.element_ty))
        else:
            tl.store(y + rows.to(tl.int64)[None, :] * y_n + outputs[:, None], total, inside)


@triton.jit
def _add_splits_kernel(
    parts, b, y, y_n, n, m, splits, BLOCK: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr
):
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    total = add_parts(total, parts + row * m + outputs, tl.cast(n, tl.int64) * m, splits, outputs < m, AHEAD)
    if b is not None:
        total += tl.load(b + outputs, outputs < m, 0.0).to(tl.float32)
    tl.store(y + row * y_n + outputs, total, outputs < m)


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, backward: bool = False, *, bias: bool) -> Shapes:
    """Also for more than FEW rows, because a caller that declares scratch for these may run fewer."""
    (n, k), m = x.shape, w.shape[-2]
    splits = ceil_div(k, SPLIT)
    return {"parts": ((splits, min(n, FEW), m), torch.float32)} if splits > 1 else {}


def takes_deep_tile(x: Tensor) -> bool:
    """Whether TILE_FEW_DEEP fits into the shared memory: half precision on H100, H200 and B200."""
    return x.dtype != torch.float32 and x.device.type == "cuda" and capability(x.device)[0] in (9, 10)


def takes_tma(*tensors: Tensor) -> bool:
    """Whether TMA can copy their tiles: half precision on Hopper and later, several aligned rows and columns."""
    device, dtype = tensors[0].device, tensors[0].dtype
    if dtype == torch.float32 or device.type != "cuda" or capability(device) < (9, 0):
        return False
    return all(min(t.shape) > 1 and rows_aligned(t) for t in tensors)


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float, scratch: Scratch) -> None:
    check_columns("y", y)
    check_columns("b", b)
    (n, k), m, few = x.shape, w.shape[0], x.shape[0] <= FEW
    tma = n >= MANY and takes_tma(x, w, y)
    tile = TILE_TMA if tma else TILE_FLOAT32 if x.dtype == torch.float32 else TILE
    if few:
        tile = (TILE_FEW_DEEP if takes_deep_tile(x) else TILE_FEW)._replace(n=max(16, padded(n)))
    splits = ceil_div(k, SPLIT)
    parts = scratch["parts"] if few and splits > 1 else None
    sizes = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "STAGES": tile.stages, "num_warps": tile.warps}
    constants = {"SPLIT": SPLIT, "TMA": tma, "WHOLE": k % tile.k == 0, **sizes, **dependent(x, n)}
    blocks = ((x, tile.n, tile.k), (w, tile.m, tile.k), (y, tile.n, tile.m))
    tiled = [TensorDescriptor.from_tensor(t, block) if tma else t for t, *block in blocks]
    strides = x.stride(0), w.stride(0), y.stride(0)
    grid = (ceil_div(m, tile.m), ceil_div(n, tile.n), 1 if parts is None else splits)
    launch(_product_kernel, grid, y, *tiled, b, parts, *strides, n, m, k, **constants)
    if parts is not None:
        constants = {"BLOCK": BLOCK, "AHEAD": ahead(splits), "num_warps": WARPS, **dependent(x, n)}
        launch(_add_splits_kernel, (ceil_div(m, BLOCK), n), parts, b, y, y.stride(0), n, m, splits, **constants)
    if scale != 1.0:
        y.mul_(scale)
