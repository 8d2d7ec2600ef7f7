"""Sums over rows in C++: a norm's backward of which only db is asked for. Loops: cpu/csrc/rows/norm_gelu.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.abi import pack_norm
from ..cpu.library import isa, native
from ..cpu.rows import DTYPES, rows
from ..scratch import Scratch, Shapes, TensorLike


def workspace(x: TensorLike) -> Shapes:
    return {}


def fwd(x: Tensor, *, sums: Tensor, accumulate: bool, scratch: Scratch) -> None:
    (n, c), dtype = x.shape, DTYPES[x.dtype]
    call = pack_norm(
        n=n, c=c, threads=torch.get_num_threads(), isa=isa(), accumulate=accumulate, dtype=dtype, param_dtype=dtype,
        dy=rows(x), db=sums.data_ptr(),
    )  # fmt: skip
    native().tilegrad_native_norm_bwd(call)
