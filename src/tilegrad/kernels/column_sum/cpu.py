"""Sums over rows in C++: the backward of a norm that writes only db. The loops are in cpu/csrc/rows/norm_gelu.cpp."""

from __future__ import annotations

from torch import Tensor

from ..cpu.abi import pack_norm
from ..cpu.library import native
from ..cpu.rows import rows, shared
from ..scratch import Scratch, Shapes, TensorLike


def workspace(x: TensorLike) -> Shapes:
    return {}


def fwd(x: Tensor, *, sums: Tensor, accumulate: bool, scratch: Scratch) -> None:
    call = pack_norm(*shared(x, x.dtype, accumulate=accumulate), dy=rows(x), db=sums.data_ptr())
    native().tilegrad_native_norm_bwd(call)
