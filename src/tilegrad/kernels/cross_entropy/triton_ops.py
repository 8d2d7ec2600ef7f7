"""Cross-entropy in Triton: one kernel computes softmax, loss and gradient, and overwrites the logits.

A program reads one row l of the logits (N, V) twice, tile by tile:

    pass 1   row_max = max l       row_sum = Σ exp(l − row_max)            each thread has its own online softmax
    then     nll = (log row_sum − (l[target] − row_max)) · inv_total       a second kernel of one program sums nll over rows
    pass 2   l ← exp(l − row_max) · inv_total / row_sum                    = dl, except in the target's column
    then     l[target] ← (p[target] − 1) · inv_total                       one number

The options (softcap, smoothing, z-loss) are compile-time constants. The bias and the softcap are applied when l is loaded.
With smoothing, pass 1 also computes Σ l, and pass 2 subtracts a constant.

The second pass mostly hits the cache, so memory is read once and written once: 4 · N · V bytes for bfloat16. A row without a
target is not read, and its gradient is 0. Logits have x's dtype: for bfloat16, x wᵀ is rounded once before the bias is added in
float32, and dl is rounded once after the softmax. dl already includes inv_total, so the GEMMs for dx and dw need no scale.

For an odd V cuBLAS uses its slowest kernels: GPT-2's 50,257 columns take 7 times as long as 50,304. So the row stride of the
logits is a multiple of 64 elements, and the columns after the last multiple of 64 have a separate GEMM.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.triton.numerics import quotient, tanh
from ..checks import check_columns
from ..gpu import ceil_div, launch, padded
from ..linear import linear_bwd_input, linear_bwd_weight, linear_fwd
from ..scratch import Scratch, Shapes, TensorLike, of
from .chunks import chunks, most_rows, products_workspace

if TYPE_CHECKING:
    from . import Inputs, Outputs

CHUNK = {"cpu": 1 << 26, "cuda": 1 << 29}  # most bytes of logits in a chunk
LEAST, OF_X = 1 << 26, 12  # a chunk's logits may take LEAST bytes, or OF_X times the bytes of x if these are more
ROWS = 128  # rows of a chunk are a multiple of this: whole tiles of a GEMM
LEAD = 64  # the row stride of the logits and the columns of the main GEMM are multiples of this many elements
TILE = 1 << 13  # most logits of a row that a program loads at once
SUM = 1024  # losses of rows added in parallel

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-4e37)  # its product with LOG2E is still finite


@triton.jit
def _float32_with_bias(x, bias, columns, mask=None):
    """x + bias[columns] in float32; x itself if bias is None, or outside the mask."""
    x = x.to(tl.float32)
    if bias is not None:
        if mask is None:
            x += tl.load(bias + columns).to(tl.float32)
        else:
            x += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def capped(x, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """SOFTCAP · tanh(x / SOFTCAP); x itself if SOFTCAP is 0."""
    if SOFTCAP != 0.0:
        return tl.where(x == x, SOFTCAP * tanh(quotient(x, SOFTCAP, EXACT), EXACT), x)
    else:
        return x


@triton.jit
def slope(x, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """1 − (x / SOFTCAP)² of a capped x"""
    y = quotient(x, SOFTCAP, EXACT)
    return 1.0 - y * y


@triton.jit
def _gradient(x, row_max, factor, constant, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, EXACT: tl.constexpr):
    """dl of capped logits x, except in the target's column: (exp(x − row_max) · factor − constant) · (1 − (x / SOFTCAP)²)"""
    dx = tl.exp2(x * LOG2E - row_max * LOG2E) * factor
    if SMOOTHING != 0.0:
        dx -= constant
    if SOFTCAP != 0.0:
        dx *= slope(x, SOFTCAP, EXACT)
    return dx


@triton.jit
def _add_exponentials(group_max, group_sum, x):
    """(group_max, group_sum) after x (groups, EACH), where group_sum = Σ exp(x − group_max) over all x so far."""
    larger = tl.maximum(group_max, tl.max(x, 1))
    terms = tl.exp2(x * LOG2E - (larger * LOG2E)[:, None])
    return larger, group_sum * tl.exp2((group_max - larger) * LOG2E) + tl.sum(terms, 1)


@triton.jit
def _softmax_kernel(
    targets, inv_total, logits, bias, nll, targets_n, logits_n, V,
    GRADIENT: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr,
    BY_ROW: tl.constexpr = False, SOFTCAP: tl.constexpr = 0.0, SMOOTHING: tl.constexpr = 0.0,
    Z_LOSS: tl.constexpr = 0.0, maxima=None, factors=None,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row, groups = logits + n * logits_n, tl.arange(0, TILE // EACH)
    cols = groups[:, None] * EACH + tl.arange(0, EACH)[None, :]
    whole = V // TILE * TILE
    rest = whole + cols < V
    EXACT: tl.constexpr = logits.dtype.element_ty == tl.float32
    target = tl.load(targets + n * targets_n)

    if target < 0:
        tl.store(nll + n, 0.0)
        if maxima is not None:
            tl.store(maxima + n, float("inf"))
            tl.store(factors + n, 0.0)
        if GRADIENT:
            nothing = tl.zeros([TILE // EACH, EACH], logits.dtype.element_ty)
            for k in range(0, whole, TILE):
                tl.store(row + k + cols, nothing)
            tl.store(row + whole + cols, nothing, mask=rest)
    else:
        scale = tl.load(inv_total + n if BY_ROW else inv_total)
        at_target = capped(_float32_with_bias(tl.load(row + target), bias, target), SOFTCAP, EXACT)
        group_max = tl.zeros([TILE // EACH], tl.float32) + tl.maximum(at_target, LOWEST)
        group_sum = tl.zeros([TILE // EACH], tl.float32)
        group_total = tl.zeros([TILE // EACH], tl.float32)
        for k in range(0, whole, TILE):
            x = tl.load(row + k + cols, eviction_policy="evict_last")
            x = capped(_float32_with_bias(x, bias, k + cols), SOFTCAP, EXACT)
            if SMOOTHING != 0.0:
                group_total += tl.sum(x, 1)
            group_max, group_sum = _add_exponentials(group_max, group_sum, x)
        x = tl.load(row + whole + cols, mask=rest, other=-float("inf"))
        x = _float32_with_bias(x, bias, whole + cols, rest)
        if SOFTCAP != 0.0:
            x = tl.where(rest, capped(x, SOFTCAP, EXACT), -float("inf"))
        if SMOOTHING != 0.0:
            group_total += tl.sum(tl.where(rest, x, 0.0), 1)
        group_max, group_sum = _add_exponentials(group_max, group_sum, x)
        row_max = tl.max(group_max, 0)
        row_sum = tl.sum(group_sum * tl.exp2((group_max - row_max) * LOG2E), 0)

        expected = at_target
        if SMOOTHING != 0.0:
            expected = at_target * (1.0 - SMOOTHING) + tl.sum(group_total, 0) * (SMOOTHING / V)
        place = nll + n
        value = tl.log(row_sum) - (expected - row_max)
        if Z_LOSS != 0.0:
            lse = row_max + tl.log(row_sum)
            value += Z_LOSS * lse * lse
        tl.store(place, value * scale)
        if maxima is not None:
            tl.store(maxima + n, row_max)
            tl.store(factors + n, scale / row_sum)
        if GRADIENT:
            factor = scale / row_sum
            constant = 0.0
            if Z_LOSS != 0.0:
                factor *= 1.0 + 2.0 * Z_LOSS * lse
            if SMOOTHING != 0.0:
                constant = scale * (SMOOTHING / V)
            dx = _gradient(x, row_max, factor, constant, SOFTCAP, SMOOTHING, EXACT)
            tl.store(row + whole + cols, dx.to(logits.dtype.element_ty), mask=rest)
            for k in range(0, whole, TILE):
                x = tl.load(row + k + cols, eviction_policy="evict_first")
                x = capped(_float32_with_bias(x, bias, k + cols), SOFTCAP, EXACT)
                dx = _gradient(x, row_max, factor, constant, SOFTCAP, SMOOTHING, EXACT)
                tl.store(row + k + cols, dx.to(logits.dtype.element_ty))
            tl.debug_barrier()
            p = tl.exp2((at_target - row_max) * LOG2E) / row_sum
            if Z_LOSS != 0.0:
                p *= 1.0 + 2.0 * Z_LOSS * lse
            if SMOOTHING != 0.0:
                p += SMOOTHING - SMOOTHING / V
            place = row + target
            d = (p - 1.0) * scale
            if SOFTCAP != 0.0:
                d *= slope(at_target, SOFTCAP, EXACT)
            tl.store(place, d.to(logits.dtype.element_ty))


@triton.jit
def _sum_kernel(nll, loss, n, SUM: tl.constexpr):
    """loss = Σ nll, in one program."""
    cols = tl.arange(0, SUM)
    total = tl.zeros([SUM], tl.float32)
    for k in range(0, n, SUM):
        total += tl.load(nll + k + cols, mask=k + cols < n, other=0.0)
    tl.store(loss, tl.sum(total, 0))


def _rows(x: TensorLike, w: TensorLike) -> int:
    """Rows of a chunk. The larger x is, the smaller is the share of a chunk of logits in the memory of the activations, so the
    chunk may be larger. Fewer chunks are faster, because each reads and writes all of dw."""
    size = max(LEAST, OF_X * x.shape[0] * x.shape[1] * x.dtype.itemsize)
    size = min(CHUNK[x.device.type], size)
    return most_rows(x.shape[0], _lead(w), x.dtype.itemsize, size, even=ROWS)


def _lead(w: TensorLike) -> int:
    """The row stride of the logits."""
    return ceil_div(w.shape[0], LEAD) * LEAD


def _columns(v: int) -> list[slice]:
    """Column ranges of the GEMMs: up to the last multiple of LEAD, and the rest."""
    main = v // LEAD * LEAD
    return [columns for columns in (slice(0, main), slice(main, v)) if columns.start < columns.stop]


def chunks_of(x: TensorLike, w: TensorLike) -> Iterator[slice]:
    return chunks(x.shape[0], _rows(x, w), ROWS)


def workspace(
    x: TensorLike, w: TensorLike, invariant: bool = False, bias: TensorLike | None = None, *_: object, backward: bool
) -> Shapes:
    rows = _rows(x, w)
    shapes: Shapes = {"logits": ((rows, _lead(w)), x.dtype), "nll": ((x.shape[0],), torch.float32)}
    added = bias is not None
    return shapes | products_workspace(x, w, rows, backward=backward, invariant=invariant, bias=added)


def _tile(v: int, *, gradient: bool) -> dict[str, int | bool]:
    """A program loads TILE logits at once, and each thread EACH neighbouring logits. Without a gradient, half as many threads
    are faster."""
    tile = min(padded(v), TILE)
    warps = max(4, tile >> (9 if gradient else 10))
    return {"GRADIENT": gradient, "TILE": tile, "EACH": max(1, tile // (32 * warps)), "num_warps": warps}


def softmax_workspace(_logits: TensorLike) -> Shapes:
    return {}


def softmax(
    logits: Tensor, targets: Tensor, inv_total: Tensor, softcap: float = 0.0, *,
    losses: Tensor, row_max: Tensor | None, factor: Tensor | None, scratch: Scratch,
) -> None:  # fmt: skip
    v = logits.shape[1]
    constants = {"BY_ROW": False, **_tile(v, gradient=False)}
    terms = {"SOFTCAP": softcap, "SMOOTHING": 0.0, "Z_LOSS": 0.0}
    arguments = (targets, inv_total, logits, None, losses, targets.stride(0), logits.stride(0), v)
    launch(_softmax_kernel, (logits.shape[0],), *arguments, **constants, **terms, maxima=row_max, factors=factor)


def total(losses: Tensor, *, loss: Tensor) -> None:
    """loss = Σ losses"""
    launch(_sum_kernel, (1,), losses, loss, losses.shape[0], SUM=SUM)


def run(inputs: Inputs, *, out: Outputs, scratch: Scratch) -> None:
    x, w, targets, inv_total, bias, invariant, terms = inputs
    loss, dx, dw, accumulate, losses, dbias = out
    linear, v, nll = of("linear", scratch), w.shape[0], scratch["nll"] if losses is None else losses
    check_columns("bias", bias)
    if "w" in scratch:
        w = scratch["w"].copy_(w)  # rounded once for all chunks
    columns, by_row = _columns(v), inv_total.ndim == 1
    constants: dict[str, float] = {**_tile(v, gradient=out.has_gradients)}
    constants |= {"BY_ROW": by_row, "SOFTCAP": terms.softcap}
    constants |= {"SMOOTHING": terms.label_smoothing, "Z_LOSS": terms.z_loss}
    for i in chunks_of(x, w):
        logits = scratch["logits"][: i.stop - i.start, :v]
        for j in columns:
            linear_fwd(x[i], w[j], None, y=logits[:, j], invariant=invariant, scratch=linear)
        scale = inv_total[i] if by_row else inv_total
        arguments = (targets[i], scale, logits, bias, nll[i], targets.stride(0), logits.stride(0), v)
        launch(_softmax_kernel, (logits.shape[0],), *arguments, **constants)
        if dw is not None or dbias is not None:
            added = accumulate or i.start > 0  # later chunks add to dw and dbias
            for j in columns:
                dwj, dbj = (None if gradient is None else gradient[j] for gradient in (dw, dbias))
                linear_bwd_weight(logits[:, j], x[i], w[j], dw=dwj, db=dbj, accumulate=added, scratch=linear)
        if dx is not None:
            for j in reversed(columns):  # the few last columns first: rounding their small sum loses little
                linear_bwd_input(logits[:, j], w[j], dx=dx[i], accumulate=j.stop < v, scratch=linear)
    if loss is not None:
        total(nll, loss=loss)
