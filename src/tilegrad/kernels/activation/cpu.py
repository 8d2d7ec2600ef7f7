"""gelu in C++: one pass over contiguous memory. The loops are in cpu/csrc/rows/norm_gelu.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..column_sum import cpu as column_sum
from ..cpu.abi import pack_gelu
from ..cpu.library import isa, native
from ..cpu.rows import DTYPES
from ..scratch import Scratch, Shapes, TensorLike


def workspace(x: TensorLike, kind: str, others: tuple[Tensor, ...] = (), *, sums: bool = True) -> Shapes:
    return {}


def fwd(h: Tensor, kind: str, *, a: Tensor, scratch: Scratch) -> None:
    _run(h, a=a.data_ptr())


def bwd(
    da: Tensor, h: Tensor, kind: str, *,
    dh: Tensor, a: Tensor | None, dh_sum: Tensor | None, accumulate: bool, scratch: Scratch,
) -> None:  # fmt: skip
    _run(h, da=da.data_ptr(), dh=dh.data_ptr())
    if dh_sum is not None:
        column_sum.fwd(dh, sums=dh_sum, accumulate=accumulate, scratch={})
    if a is not None:
        fwd(h, kind, a=a, scratch=scratch)


def _run(h: Tensor, **addresses: int) -> None:
    n, threads, dtype = h.numel(), torch.get_num_threads(), DTYPES[h.dtype]
    call = pack_gelu(n=n, threads=threads, isa=isa(), dtype=dtype, h=h.data_ptr(), **addresses)
    native().tilegrad_native_gelu(call)
