"""Activations in Triton: one pass, a program for each tile.       h, a, gate, up (N, C), or all contiguous

In float32; only outputs are rounded. σ(v) and σ(−v) are both 1 / (1 + e) or e / (1 + e) with e = exp(−|v|), so neither
cancels nor overflows. Of float32, exp and quotients are rounded like torch's: the device's own err by |v| units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.triton.numerics import power, quotient, to_log2
from ..attention.triton.numerics import tanh as finite_tanh
from ..gpu import ceil_div, padded

TILE, COLUMNS = 4096, 1024  # elements of a tile, columns of one whose rows lie apart
WARPS = 8
SLOPE = tl.constexpr(1.5957691216057308)  # 2 √(2/π)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def sigmoids(v, EXACT: tl.constexpr):
    """σ(v), σ(−v); NaN of NaN."""
    e = power(to_log2(-tl.abs(v), EXACT), EXACT)
    e = tl.where(v == v, e, v)
    large = quotient(1.0, 1.0 + e, EXACT)
    small = e * large
    return tl.where(v < 0, small, large), tl.where(v < 0, large, small)


@triton.jit
def activate(h, KIND: tl.constexpr, EXACT: tl.constexpr):
    if KIND == "gelu":
        of_v, _ = sigmoids(SLOPE * h * (1.0 + CUBIC * h * h), EXACT)
        return h * of_v
    elif KIND == "tanh":
        return tl.where(h == h, finite_tanh(h, EXACT), h)
    else:
        return tl.where(h <= 0.0, 0.0, h)


@triton.jit
def derivative(h, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Of gelu σ(v) + h σ(v) σ(−v) v', v = 2u; the second term is 0 where σ(−|v|) is, even if h² is infinite there."""
    if KIND == "gelu":
        of_v, of_minus_v = sigmoids(SLOPE * h * (1.0 + CUBIC * h * h), EXACT)
        product = of_v * of_minus_v
        rest = h * product * (SLOPE + 3.0 * SLOPE * CUBIC * h * h)
        return of_v + tl.where(product == 0.0, 0.0, rest)
    elif KIND == "tanh":
        of_2h, of_minus_2h = sigmoids(2.0 * h, EXACT)
        return 4.0 * of_2h * of_minus_2h
    else:
        return tl.where(h <= 0.0, 0.0, 1.0)


@triton.jit
def tile_of(n, c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows, columns and which of them are inside, of this program's tile."""
    tiles = tl.cdiv(c, BLOCK_C)
    tile = tl.program_id(0).to(tl.int64)
    rows = (tile // tiles * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    columns = (tile % tiles * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    return rows, columns, (rows < n) & (columns < c)


@triton.jit
def _activation_fwd_kernel(
    h, a, h_n, a_n, n, c, KIND: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    rows, columns, inside = tile_of(n, c, BLOCK_N, BLOCK_C)
    of_h = tl.load(h + rows * h_n + columns, inside, 0.0).to(tl.float32)
    tl.store(a + rows * a_n + columns, activate(of_h, KIND, EXACT).to(a.dtype.element_ty), inside)


@triton.jit
def _activation_bwd_kernel(
    da, h, dh, da_n, h_n, dh_n, n, c,
    KIND: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows, columns, inside = tile_of(n, c, BLOCK_N, BLOCK_C)
    of_h = tl.load(h + rows * h_n + columns, inside, 0.0).to(tl.float32)
    grad = tl.load(da + rows * da_n + columns, inside, 0.0).to(tl.float32)
    tl.store(dh + rows * dh_n + columns, (grad * derivative(of_h, KIND, EXACT)).to(dh.dtype.element_ty), inside)


@triton.jit
def _swiglu_fwd_kernel(
    gate, up, a, gate_n, up_n, a_n, n, c, EXACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    rows, columns, inside = tile_of(n, c, BLOCK_N, BLOCK_C)
    of_gate = tl.load(gate + rows * gate_n + columns, inside, 0.0).to(tl.float32)
    of_up = tl.load(up + rows * up_n + columns, inside, 0.0).to(tl.float32)
    of_g, _ = sigmoids(of_gate, EXACT)
    tl.store(a + rows * a_n + columns, (of_gate * of_g * of_up).to(a.dtype.element_ty), inside)


@triton.jit
def _swiglu_bwd_kernel(
    da, gate, up, dgate, dup, da_n, gate_n, up_n, dgate_n, dup_n, n, c,
    EXACT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows, columns, inside = tile_of(n, c, BLOCK_N, BLOCK_C)
    grad = tl.load(da + rows * da_n + columns, inside, 0.0).to(tl.float32)
    of_gate = tl.load(gate + rows * gate_n + columns, inside, 0.0).to(tl.float32)
    of_up = tl.load(up + rows * up_n + columns, inside, 0.0).to(tl.float32)
    of_g, of_minus_g = sigmoids(of_gate, EXACT)
    slope = of_g * (1.0 + of_gate * of_minus_g)
    tl.store(dgate + rows * dgate_n + columns, (grad * of_up * slope).to(dgate.dtype.element_ty), inside)
    tl.store(dup + rows * dup_n + columns, (grad * of_gate * of_g).to(dup.dtype.element_ty), inside)


def fwd(h: Tensor, kind: str, *, a: Tensor) -> None:
    _launch(_activation_fwd_kernel, h, a, KIND=kind)


def bwd(da: Tensor, h: Tensor, kind: str, *, dh: Tensor) -> None:
    _launch(_activation_bwd_kernel, da, h, dh, KIND=kind)


def swiglu_fwd(gate: Tensor, up: Tensor, *, a: Tensor) -> None:
    _launch(_swiglu_fwd_kernel, gate, up, a)


def swiglu_bwd(da: Tensor, gate: Tensor, up: Tensor, *, dgate: Tensor, dup: Tensor) -> None:
    _launch(_swiglu_bwd_kernel, da, gate, up, dgate, dup)


def _launch(kernel: triton.JITFunction, *tensors: Tensor, **constants: str) -> None:
    """Contiguous tensors are one long row."""
    x = tensors[0]
    if x.numel() == 0:
        return
    if all(t.is_contiguous() for t in tensors):
        n, c, block_c, strides = 1, x.numel(), TILE, [0] * len(tensors)
    else:
        n, c = x.shape
        block_c, strides = min(COLUMNS, padded(c)), [t.stride(0) for t in tensors]
    block_n = 1 if n == 1 else TILE // block_c
    grid = (ceil_div(n, block_n) * ceil_div(c, block_c),)
    with torch.cuda.device_of(x):
        kernel[grid](
            *tensors, *strides, n, c,
            **constants, EXACT=x.dtype == torch.float32, BLOCK_N=block_n, BLOCK_C=block_c, num_warps=WARPS,
        )  # fmt: skip
