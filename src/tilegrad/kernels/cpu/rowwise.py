"""Norms, gelu and sums of columns on a CPU, in C++: one pass over memory where a chain of torch ops has five to ten.

The equations are in norm, activation and linear, the loops in cpu/csrc/rows/norm_gelu.cpp. float32, or bfloat16 that is
float32 in registers; means, sums and gradients of parameters are float32. No scratch. torch.get_num_threads() threads share
the rows (the columns for dw and db, the numbers for gelu); which thread takes which changes no bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .abi import DTYPES, pack_gelu, pack_norm
from .library import isa, library, native

_DTYPES = {dtype: DTYPES[dtype] for dtype in (torch.float32, torch.bfloat16)}


def takes(x: Any) -> bool:
    """From dtype and device alone, as a workspace is declared: float32 or bfloat16 on a CPU, and the library is there."""
    return x.dtype in _DTYPES and torch.device(x.device).type == "cpu" and not isinstance(library(), str)


def _rows(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.stride(0)


def _data(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def norm_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *, y: Tensor, mean: Tensor | None, rstd: Tensor
) -> None:
    """y, rstd, and mean unless it is an RMS norm's None."""
    n, c = x.shape
    call = pack_norm(
        n=n, c=c, threads=torch.get_num_threads(), isa=isa(), dtype=_DTYPES[x.dtype], param_dtype=_DTYPES[w.dtype],
        x=_rows(x), y=_rows(y), w=_data(w), b=_data(b), mean=_data(mean), rstd=_data(rstd), eps=eps,
    )  # fmt: skip
    native().tilegrad_native_norm_fwd(call)


def norm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor | None, rstd: Tensor, *,
    dx: Tensor | None, dw: Tensor | None, db: Tensor | None, accumulate: bool,
) -> None:  # fmt: skip
    """dx += …   dw and db += …, or = … where accumulate is False."""
    n, c = x.shape
    call = pack_norm(
        n=n, c=c, threads=torch.get_num_threads(), isa=isa(), accumulate=accumulate, dtype=_DTYPES[x.dtype],
        param_dtype=_DTYPES[w.dtype], x=_rows(x), dy=_rows(dy), dx=(0, 0) if dx is None else _rows(dx),
        w=_data(w), mean=_data(mean), rstd=_data(rstd), dw=_data(dw), db=_data(db),
    )  # fmt: skip
    native().tilegrad_native_norm_bwd(call)


def column_sums(x: Tensor, *, sums: Tensor, accumulate: bool) -> None:
    """sums += Σ_n x, or = where accumulate is False.       x (N, C)   sums (C,), float32"""
    n, c = x.shape
    dtype = _DTYPES[x.dtype]
    call = pack_norm(
        n=n, c=c, threads=torch.get_num_threads(), isa=isa(), accumulate=accumulate, dtype=dtype, param_dtype=dtype,
        dy=_rows(x), db=_data(sums),
    )  # fmt: skip
    native().tilegrad_native_norm_bwd(call)


def gelu_fwd(h: Tensor, *, a: Tensor) -> None:
    """a = gelu(h), both contiguous."""
    n, dtype = h.numel(), _DTYPES[h.dtype]
    call = pack_gelu(n=n, threads=torch.get_num_threads(), isa=isa(), dtype=dtype, h=_data(h), a=_data(a))
    native().tilegrad_native_gelu(call)


def gelu_bwd(da: Tensor, h: Tensor, *, dh: Tensor) -> None:
    """dh = da ∘ gelu'(h), all contiguous."""
    n, dtype = h.numel(), _DTYPES[h.dtype]
    call = pack_gelu(
        n=n, threads=torch.get_num_threads(), isa=isa(), dtype=dtype, h=_data(h), da=_data(da), dh=_data(dh)
    )
    native().tilegrad_native_gelu(call)
