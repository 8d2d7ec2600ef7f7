"""TMA descriptors.

    tile     any strided (B, H, T, D), or packed (total, H, D) viewed as (1, H, total, D), in boxes of (1, 1, rows, columns)
    varlen   packed (total, H, D) in boxes that are clipped at the end of a sequence
    rows     a contiguous (…, D) viewed as (rows, D)
    row      a contiguous float32 vector in boxes of `rows`

Nothing is copied: (B, T, H, D) and one third of a fused qkv buffer only differ in strides. Reads outside the tensor return
zeros, and writes and additions outside it are dropped, so T and D need not be multiples of the box.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...checks import ALIGNED_BYTES
from ..problem import sizes_and_strides

SEQUENCE_END = gl.constexpr(2**30)  # the row at which every packed sequence ends in varlen_descriptor

GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.cache
def layout_of(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The shared memory layout that TMA writes and wgmma reads."""
    if len(box) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=1)
    return gl.NVMMASharedLayout.get_default_for(list(box), GL_DTYPE[dtype])


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """Triton's descriptor without its checks: `problem.tma_refusal` has already checked."""

    def __post_init__(self) -> None:
        pass


def tile_descriptor(x: Tensor, rows: int, columns: int, *, varlen: bool) -> Descriptor:
    """x in boxes of (1, 1, rows, columns); columns may exceed D"""
    box = (1, 1, rows, columns)
    sizes, strides = sizes_and_strides(x, varlen=varlen)
    if 1 in sizes:  # the stride of an axis of size 1 is arbitrary, but TMA checks it
        strides = [s if n > 1 else ALIGNED_BYTES for n, s in zip(sizes[:3], strides, strict=False)] + [1]
    return Descriptor(x, sizes, strides, list(box), layout_of(box, x.dtype))


def row_descriptor(x: Tensor, rows: int) -> Descriptor:
    """A contiguous vector in boxes of `rows`."""
    return Descriptor(x, [x.numel()], [1], [rows], layout_of((rows,), x.dtype))


def varlen_descriptor(x: Tensor, rows: int, columns: int) -> Descriptor:
    """Packed (total, H, D) in boxes of `rows` that are clipped at the end of a sequence, where the next one starts.

    A sequence has n rows, from row s of x on. Its row r has coordinates (W, s + n, h, W − n + r, c), so that every
    sequence ends at W = 2³⁰. Addresses are computed modulo 2⁶⁴. With row stride t,
    W·(2³⁴ − t) + (s + n)·t + (W − n + r)·t = 2⁶⁴ + (s + r)·t.
    """
    box = (1, 1, 1, rows, columns)
    (total, h, d), (x_t, x_h, _) = x.shape, x.stride()
    x_t = x_t if total > 1 else h * d  # as in tile_descriptor
    end, most = SEQUENCE_END.value, 2**31 - 2**16
    strides = [2**34 - x_t, x_t, x_h if h > 1 else x_t, x_t, 1]
    return Descriptor(x, [most, most, h, end, d], strides, list(box), layout_of(box, x.dtype))


def rows_descriptor(acc: Tensor, rows: int, columns: int) -> Descriptor:
    """A contiguous (…, D) viewed as (rows, D), in boxes of (rows, columns)."""
    d = acc.shape[-1]
    return Descriptor(acc, [acc.numel() // d, d], [d, 1], [rows, columns], layout_of((rows, columns), acc.dtype))
