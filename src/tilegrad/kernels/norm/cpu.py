"""Norms in C++: one pass over memory, where a chain of torch ops makes five to ten. Loops: cpu/csrc/rows/norm_gelu.cpp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cpu.abi import pack_norm
from ..cpu.library import isa, native
from ..cpu.rows import DTYPES, address, rows
from ..scratch import Scratch, Shapes


def workspace(x: Any, *, backward: bool) -> Shapes:
    return {}


def fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *,
    y: Tensor, mean: Tensor | None, rstd: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    n, c = x.shape
    call = pack_norm(
        n=n, c=c, threads=torch.get_num_threads(), isa=isa(), dtype=DTYPES[x.dtype], param_dtype=DTYPES[w.dtype],
        x=rows(x), y=rows(y), w=address(w), b=address(b), mean=address(mean), rstd=address(rstd), eps=eps,
    )  # fmt: skip
    native().tilegrad_native_norm_fwd(call)


def bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor | None, rstd: Tensor, *,
    dx: Tensor | None, dw: Tensor | None, db: Tensor | None, accumulate: bool, scratch: Scratch,
) -> None:  # fmt: skip
    n, c = x.shape
    call = pack_norm(
        n=n, c=c, threads=torch.get_num_threads(), isa=isa(), accumulate=accumulate, dtype=DTYPES[x.dtype],
        param_dtype=DTYPES[w.dtype], x=rows(x), dy=rows(dy), dx=rows(dx),
        w=address(w), mean=address(mean), rstd=address(rstd), dw=address(dw), db=address(db),
    )  # fmt: skip
    native().tilegrad_native_norm_bwd(call)
