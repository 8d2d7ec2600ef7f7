"""Activations in Triton, in one pass.       h, a, gate, up (N, C), or all contiguous   partials (1 or 2, P, C)

    forward    one program per tile
    backward   one program per tile; with column sums P programs per tile of columns: program p has the row tiles
               p, p + P, p + 2P, … and writes partials[:, p] = Σ dh of its rows; then dh_sum (+)= Σ_p partials

The arithmetic is float32. Only outputs are rounded. Column sums add the rounded outputs in a fixed order, so the bits are the
same each time. For v ≥ 0, σ(v) and σ(−v) are 1 / (1 + e) and e / (1 + e) with e = exp(−v), and for v < 0 the reverse with
e = exp(v): neither cancels or overflows. For float32, exp and division are IEEE-rounded like torch's, because the error of the
fast instructions grows to |v| ulps. For bfloat16 and float16, σ(−v) is 1 − σ(v) where it is added to a term of size 1: a
memory-bound kernel has time for only 37 instructions per element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.triton.numerics import LOG2E, power, quotient, to_log2
from ..attention.triton.numerics import tanh as finite_tanh
from ..column_sum.triton_ops import add_partials
from ..dependent_launch import dependent, start_next, wait_for_previous
from ..gpu import JITKernel, ceil_div, launch, multiprocessors, padded
from ..scratch import Scratch, Shapes, TensorLike

if TYPE_CHECKING:
    from . import Sums

TILE, COLUMNS = 2048, 1024  # elements of a tile; columns of a tile of strided rows
WARPS = 4
SUMMED_TILE, SUMMED_WARPS = 1024, 4  # elements and warps of a tile with column sums
PROGRAMS = 8  # per multiprocessor, in a backward with column sums
MOST_PROGRAMS = 65535  # limit of a grid's second axis
SLOPE = tl.constexpr(1.5957691216057308)  # 2 √(2/π)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def sigmoids(v, EXACT: tl.constexpr):
    """σ(v), σ(−v); NaN if v is NaN."""
    e = power(to_log2(-tl.abs(v), EXACT), EXACT)
    e = tl.where(v == v, e, v)
    large = quotient(1.0, 1.0 + e, EXACT)
    small = e * large
    return tl.where(v < 0, small, large), tl.where(v < 0, large, small)


@triton.jit
def sigmoids_next_to_1(v, EXACT: tl.constexpr):
    """σ(v), and σ(−v) with an absolute error of about one ulp of 1."""
    if EXACT:
        return sigmoids(v, EXACT)
    else:
        root = tl.math.rsqrt(1.0 + tl.math.exp2(v * -LOG2E))  # 1 / x would take three more instructions
        sigmoid_v = root * root
        return sigmoid_v, 1.0 - sigmoid_v


@triton.jit
def activate(h, KIND: tl.constexpr, EXACT: tl.constexpr):
    if KIND == "gelu":
        sigmoid_v, _ = sigmoids_next_to_1(SLOPE * h * (1.0 + CUBIC * h * h), EXACT)
        return h * sigmoid_v
    elif KIND == "tanh":
        return tl.where(h == h, finite_tanh(h, EXACT), h)
    elif KIND == "relu2":
        return tl.where(h <= 0.0, 0.0, h * h)
    else:
        return tl.where(h <= 0.0, 0.0, h)


@triton.jit
def derivative(h, KIND: tl.constexpr, EXACT: tl.constexpr):
    """gelu' = σ(v) + h σ(v) σ(−v) v', v = SLOPE (h + CUBIC h³). The second term is 0 if σ(−|v|) is, even if h² is infinite."""
    if KIND == "gelu":
        sigmoid_v, sigmoid_minus_v = sigmoids_next_to_1(SLOPE * h * (1.0 + CUBIC * h * h), EXACT)
        product = sigmoid_v * sigmoid_minus_v
        second = h * product * (SLOPE + 3.0 * SLOPE * CUBIC * h * h)
        return sigmoid_v + tl.where(product == 0.0, 0.0, second)
    elif KIND == "tanh":
        sigmoid_2h, sigmoid_minus_2h = sigmoids(2.0 * h, EXACT)
        return 4.0 * sigmoid_2h * sigmoid_minus_2h
    elif KIND == "relu2":
        return tl.where(h <= 0.0, 0.0, 2.0 * h)
    else:
        return tl.where(h <= 0.0, 0.0, 1.0)


@triton.jit
def tile_of(n, c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows and columns of this program's tile, and a mask of those inside (N, C)."""
    tiles = tl.cdiv(c, BLOCK_C)
    tile = tl.program_id(0).to(tl.int64)
    rows = (tile // tiles * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    columns = (tile % tiles * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    return rows, columns, (rows < n) & (columns < c)


@triton.jit
def _activation_fwd_kernel(
    h, a, h_n, a_n, n, c,
    KIND: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    rows, columns, inside = tile_of(n, c, BLOCK_N, BLOCK_C)
    h_tile = tl.load(h + rows * h_n + columns, inside, 0.0).to(tl.float32)
    tl.store(a + rows * a_n + columns, activate(h_tile, KIND, EXACT).to(a.dtype.element_ty), inside)


@triton.jit
def _activation_bwd_kernel(
    da, h, dh, a, partials, da_n, h_n, dh_n, a_n, n, c,
    KIND: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p, programs = tl.program_id(1), tl.num_programs(1)
    columns = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    dh_sum = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)

    for first in range(p * BLOCK_N, n, programs * BLOCK_N):
        rows = (first + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        inside = (rows < n) & (columns < c)
        h_tile = tl.load(h + rows * h_n + columns, inside, 0.0).to(tl.float32)
        da_tile = tl.load(da + rows * da_n + columns, inside, 0.0).to(tl.float32)
        out = (da_tile * derivative(h_tile, KIND, EXACT)).to(dh.dtype.element_ty)
        tl.store(dh + rows * dh_n + columns, out, inside)
        if partials is not None:
            dh_sum += out.to(tl.float32)
        if a is not None:
            tl.store(a + rows * a_n + columns, activate(h_tile, KIND, EXACT).to(a.dtype.element_ty), inside)

    if partials is not None:
        tl.store(partials + p.to(tl.int64) * c + columns, tl.sum(dh_sum, 0)[None, :], columns < c)


@triton.jit
def _swiglu_fwd_kernel(
    gate, up, a, gate_n, up_n, a_n, n, c,
    EXACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_previous(DEPENDENT)
    rows, columns, inside = tile_of(n, c, BLOCK_N, BLOCK_C)
    gate_tile = tl.load(gate + rows * gate_n + columns, inside, 0.0).to(tl.float32)
    up_tile = tl.load(up + rows * up_n + columns, inside, 0.0).to(tl.float32)
    sigmoid_gate, _ = sigmoids_next_to_1(gate_tile, EXACT)
    tl.store(a + rows * a_n + columns, (gate_tile * sigmoid_gate * up_tile).to(a.dtype.element_ty), inside)


@triton.jit
def _swiglu_bwd_kernel(
    da, gate, up, dgate, dup, a, partials, da_n, gate_n, up_n, dgate_n, dup_n, a_n, n, c,
    EXACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p, programs = tl.program_id(1), tl.num_programs(1)
    columns = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    dgate_sum = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    dup_sum = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)

    for first in range(p * BLOCK_N, n, programs * BLOCK_N):
        rows = (first + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        inside = (rows < n) & (columns < c)
        da_tile = tl.load(da + rows * da_n + columns, inside, 0.0).to(tl.float32)
        gate_tile = tl.load(gate + rows * gate_n + columns, inside, 0.0).to(tl.float32)
        up_tile = tl.load(up + rows * up_n + columns, inside, 0.0).to(tl.float32)
        sigmoid_gate, sigmoid_minus_gate = sigmoids_next_to_1(gate_tile, EXACT)
        dgate_tile = (da_tile * up_tile * (sigmoid_gate * (1.0 + gate_tile * sigmoid_minus_gate))).to(
            dgate.dtype.element_ty
        )
        dup_tile = (da_tile * gate_tile * sigmoid_gate).to(dup.dtype.element_ty)
        tl.store(dgate + rows * dgate_n + columns, dgate_tile, inside)
        tl.store(dup + rows * dup_n + columns, dup_tile, inside)
        if partials is not None:
            dgate_sum += dgate_tile.to(tl.float32)
            dup_sum += dup_tile.to(tl.float32)
        if a is not None:
            tl.store(a + rows * a_n + columns, (gate_tile * sigmoid_gate * up_tile).to(a.dtype.element_ty), inside)

    if partials is not None:
        place = partials + p.to(tl.int64) * c + columns
        tl.store(place, tl.sum(dgate_sum, 0)[None, :], columns < c)
        tl.store(place + tl.cast(programs, tl.int64) * c, tl.sum(dup_sum, 0)[None, :], columns < c)


def _summed_tile(c: int) -> tuple[int, int]:
    """Rows and columns of a tile with column sums."""
    columns = min(COLUMNS, padded(c))
    return SUMMED_TILE // columns, columns


def _programs(h: TensorLike) -> int:
    """The number P of programs. It never decreases with more rows, so scratch for many rows also fits fewer."""
    (n, c), (rows, columns) = h.shape, _summed_tile(h.shape[1])
    most = PROGRAMS * multiprocessors(h.device) // ceil_div(c, columns)
    return max(1, min(ceil_div(n, rows), most))


def workspace(x: TensorLike, kind: str, *_: object, backward: bool = True, sums: bool = True) -> Shapes:
    return {"partials": ((2 if kind == "swiglu" else 1, _programs(x), x.shape[1]), torch.float32)} if sums else {}


def fwd(h: Tensor, kind: str, *, a: Tensor, scratch: Scratch) -> None:
    _launch_forward(_activation_fwd_kernel, h, a, KIND=kind)


def bwd(da: Tensor, h: Tensor, kind: str, *, dh: Tensor, a: Tensor | None, sums: Sums, scratch: Scratch) -> None:
    _launch_backward(_activation_bwd_kernel, da, h, dh, a, sums=sums, scratch=scratch, KIND=kind)


def swiglu_fwd(gate: Tensor, up: Tensor, *, a: Tensor, scratch: Scratch) -> None:
    _launch_forward(_swiglu_fwd_kernel, gate, up, a)


def swiglu_bwd(
    da: Tensor, gate: Tensor, up: Tensor, *, dgate: Tensor, dup: Tensor, a: Tensor | None, sums: Sums, scratch: Scratch
) -> None:
    _launch_backward(_swiglu_bwd_kernel, da, gate, up, dgate, dup, a, sums=sums, scratch=scratch)


def _launch_forward(kernel: JITKernel, *tensors: Tensor, **constants: str) -> None:
    n, c, block_n, block_c, strides = _tiles(*tensors)
    grid = (ceil_div(n, block_n) * ceil_div(c, block_c),)
    tile = {"EXACT": tensors[0].dtype == torch.float32, "BLOCK_N": block_n, "BLOCK_C": block_c, "num_warps": WARPS}
    launch(kernel, grid, *tensors, *strides, n, c, **constants, **tile, **dependent(tensors[0], len(tensors[0])))


def _launch_backward(
    kernel: JITKernel, x: Tensor, *others: Tensor | None, sums: Sums, scratch: Scratch, **constants: str
) -> None:
    tensors = (x, *others)
    if x.numel() == 0:
        for total in sums.tensors if not sums.accumulate else ():
            total.zero_()
        return
    if sums.tensors:
        (n, c), (block_n, block_c) = x.shape, _summed_tile(x.shape[1])
        partials, programs, warps = scratch["partials"], _programs(x), SUMMED_WARPS
        strides = [0 if t is None else t.stride(0) for t in tensors]
    else:
        n, c, block_n, block_c, strides = _tiles(*tensors)
        partials, programs, warps = None, min(ceil_div(n, block_n), MOST_PROGRAMS), WARPS
    tile = {"EXACT": x.dtype == torch.float32, "BLOCK_N": block_n, "BLOCK_C": block_c, "num_warps": warps}
    launch(kernel, (ceil_div(c, block_c), programs), x, *others, partials, *strides, n, c, **constants, **tile)
    if partials is not None:
        add_partials(partials, *sums.tensors, accumulate=sums.accumulate)


def _tiles(*tensors: Tensor | None) -> tuple[int, int, int, int, list[int]]:
    """N, C, rows and columns of a tile, and the stride of each tensor. Contiguous tensors are treated as one long row."""
    present = [t for t in tensors if t is not None]
    if all(t.is_contiguous() for t in present):
        return 1, present[0].numel(), 1, TILE, [0] * len(tensors)
    n, c = present[0].shape
    block_c = min(COLUMNS, padded(c))
    return n, c, 1 if n == 1 else TILE // block_c, block_c, [0 if t is None else t.stride(0) for t in tensors]
