"""gelu in C++: one pass over contiguous memory. Loops: cpu/csrc/rows/norm_gelu.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.abi import pack_gelu
from ..cpu.library import isa, native
from ..cpu.rows import DTYPES


def fwd(h: Tensor, kind: str, *, a: Tensor) -> None:
    _run(h, a=a.data_ptr())


def bwd(da: Tensor, h: Tensor, kind: str, *, dh: Tensor) -> None:
    _run(h, da=da.data_ptr(), dh=dh.data_ptr())


def _run(h: Tensor, **addresses: int) -> None:
    n, threads, dtype = h.numel(), torch.get_num_threads(), DTYPES[h.dtype]
    call = pack_gelu(n=n, threads=threads, isa=isa(), dtype=dtype, h=h.data_ptr(), **addresses)
    native().tilegrad_native_gelu(call)
