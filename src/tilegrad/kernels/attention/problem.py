"""A call of attention before any kernel: its sizes, the shapes of its outputs, and where its rows begin in memory.

    dense    q (B, Hq, Tq, D)    k (B, Hkv, Tk, D)    v (B, Hkv, Tk, Dv)    o (B, Hq, Tq, Dv)   lse (B, Hq, Tq)
    packed   q (total_q, Hq, D)  k (total_k, Hkv, D)  v (total_k, Hkv, Dv)  o (total_q, Hq, Dv) lse (Hq, total_q)

Only shapes, strides, dtypes, devices, addresses and options are read, so handles of a memory trace are accepted like tensors.
This module does not import Triton.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from ..checks import ALIGNED_BYTES, aligned_step
from ..scratch import accumulation_dtype
from .mask import Mask

FEW_ROWS = 16  # up to this many rows a call counts as decoding: Triton splits a row's columns among programs
LEAST_BLOCK = 32  # least width that GPU kernels pad a head to
STRIDE_BYTES = 2**40  # strides of TMA must be smaller
LEAST_FACTOR = 1e-30  # least |scale| of GPU kernels: with scale 0, −inf · scale would be NaN
LOG2E = 1.4426950408889634  # log2(e): exp(x) = exp2(x · log2 e), and GPU kernels keep scores in the log2 domain

lse_dtype = accumulation_dtype  # lse is a row statistic


def coarse(factor: float) -> float:
    """The smallest power of two ≥ factor. Its product with a float32 is exact."""
    return 2.0 ** math.ceil(math.log2(factor))


class Inputs(NamedTuple):
    """The arguments that every call has, and that determine its scratch."""

    q: Any
    k: Any
    v: Any
    mask: Mask


class Problem(Inputs):
    """A call of attention as the table of kernels reads it. `others` has o, do, dq, dk and dv by name, if they are known,
    because a kernel may be unable to read or write their layouts. invariant (forward only): a row of o must have the same bits
    in any batch, and in attention over a cache."""

    others: dict[str, Any]
    invariant: bool

    def __new__(cls, q: Any, k: Any, v: Any, mask: Mask, *, invariant: bool = False, **others: Any) -> Problem:
        problem = super().__new__(cls, q, k, v, mask)
        problem.invariant = invariant
        problem.others = {name: x for name, x in others.items() if x is not None}
        return problem

    @property
    def sizes(self) -> Sizes:
        return sizes_of(*self)


class Forward(NamedTuple):
    """The arguments of a forward on tensors. `memory` is the scratch: the buffers in the order in which the kernel declares
    them, or one buffer for all of them (scratch.Layout)."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    o: Tensor | None
    lse: Tensor | None
    memory: tuple[Tensor, ...]
    invariant: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are not None, in the order in which a prepared kernel takes addresses."""
        mask = self.mask.tensors if self.mask.has_tensors else ()
        return [x for x in (self.q, self.k, self.v, self.o, self.lse, *mask, *self.memory) if x is not None]


class Backward(NamedTuple):
    """The arguments of a backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    do: Tensor
    dlse: Tensor | None
    mask: Mask
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsinks: Tensor | None
    memory: tuple[Tensor, ...]
    deterministic: bool

    @property
    def tensors(self) -> list[Tensor]:
        mask = self.mask.tensors if self.mask.has_tensors else ()
        reads = (self.q, self.k, self.v, self.o, self.lse, self.do, self.dlse)
        writes = (self.dq, self.dk, self.dv, self.dbias, self.dsinks)
        return [x for x in (*reads, *mask, *writes, *self.memory) if x is not None]


class Sizes(NamedTuple):
    """For packed sequences, batch is the number of sequences, and tq and tk are the longest lengths.

    left and right are the band of mask.py, None if nothing is masked out on that side.
    """

    batch: int
    hq: int
    hkv: int
    tq: int
    tk: int
    d: int
    dv: int
    left: int | None
    right: int | None
    total_q: int | None = None  # rows of all packed sequences; None for a dense call
    total_k: int | None = None
    intervals: bool = False

    @property
    def varlen(self) -> bool:
        return self.total_q is not None

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.hq // self.hkv

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right) as numbers. A side without a bound has a number that the distance of no pair exceeds."""
        rows, columns = self.total_q or self.tq, self.total_k or self.tk
        return columns if self.left is None else self.left, rows if self.right is None else self.right

    @property
    def block_d(self) -> int:
        """D padded to a power of two, at least LEAST_BLOCK."""
        return max(LEAST_BLOCK, 1 << (self.d - 1).bit_length())

    @property
    def block_dv(self) -> int:
        return max(LEAST_BLOCK, 1 << (self.dv - 1).bit_length())


def sizes_of(q: Any, k: Any, v: Any, mask: Mask) -> Sizes:
    hq, d = q.shape[1], q.shape[-1]
    hkv, dv = k.shape[1], v.shape[-1]
    cu, total_q, total_k = mask.cu_seqlens_q, None, None
    if cu is None:
        batch, tq, tk = q.shape[0], q.shape[2], k.shape[2]
    else:
        batch, tq, tk = cu.shape[0] - 1, mask.max_seqlen_q, mask.max_seqlen_k
        total_q, total_k = q.shape[0], k.shape[0]
    left, right = mask.band
    left = None if left is None or left >= tk - 1 else left
    right = None if right is None or right >= tq - 1 else right
    return Sizes(batch, hq, hkv, tq, tk, d, dv, left, right, total_q, total_k, mask.intervals is not None)


def output_shapes(q: Any, v: Any, mask: Mask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of o and lse."""
    o = (*q.shape[:-1], v.shape[-1])
    return o, (q.shape[1], q.shape[0]) if mask.varlen else tuple(q.shape[:-1])


def sizes_and_strides(x: Any, *, varlen: bool) -> tuple[list[int], list[int]]:
    """The sizes and the strides of sequences, heads, rows and columns; packed sequences count as one sequence."""
    if varlen:
        (total, h, d), (x_t, x_h, x_d) = x.shape, x.stride()
        return [1, h, total, d], [0, x_h, x_t, x_d]
    return list(x.shape), list(x.stride())


def row_strides(x: Tensor | None, *, varlen: bool) -> tuple[int, int, int]:
    """The strides of sequences, heads and rows of a tensor like q. For packed sequences the first is 0."""
    if x is None:
        return 0, 0, 0
    return (0, x.stride(1), x.stride(0)) if varlen else (x.stride(0), x.stride(1), x.stride(2))


def lse_strides(x: Tensor | None, *, varlen: bool) -> tuple[int, int, int]:
    """`row_strides` for a tensor like lse, (B, Hq, Tq) or (Hq, total)."""
    if x is None:
        return 0, 0, 0
    return (0, x.stride(0), x.stride(1)) if varlen else (x.stride(0), x.stride(1), x.stride(2))


def tma_refusal(name: str, x: Any, *, varlen: bool) -> str | None:
    """Why TMA can't address x, or None. Strides and the address are checked only if x has them, because a handle may have
    none."""
    itemsize = x.dtype.itemsize
    if x.shape[-1] * itemsize % ALIGNED_BYTES:
        return f"{name}: rows of {x.shape[-1]} elements are not a multiple of {ALIGNED_BYTES} bytes, which TMA needs"
    if not hasattr(x, "stride"):
        return None
    sizes, strides = sizes_and_strides(x, varlen=varlen)
    if strides[-1] != 1:
        return f"{name}: columns are {strides[-1]} elements apart, and TMA needs them contiguous"
    for axis, n, stride in zip("BHT", sizes, strides, strict=False):
        if not aligned_step(n, stride, itemsize) or n > 1 and stride * itemsize >= STRIDE_BYTES:
            return (
                f"{name}: TMA can't step over {axis} by {stride} elements, only by multiples of {ALIGNED_BYTES} bytes"
            )
    if hasattr(x, "data_ptr") and not hasattr(x, "fake_mode") and x.data_ptr() % ALIGNED_BYTES:
        return f"{name}: its address is not a multiple of {ALIGNED_BYTES} bytes, which TMA needs"
    return None
