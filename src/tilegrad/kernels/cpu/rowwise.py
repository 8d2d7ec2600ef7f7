"""Norms, gelu and sums of columns of rows on a CPU, in C++: one walk over memory where a chain of torch ops has five to ten.

The equations are in norm.py, activation.py and linear.py, the walks in cpu/csrc/rows/rowwise.cpp. float32, or bfloat16 that is
float32 in registers; means, sums and gradients of parameters are float32. No scratch. Rows (columns for dw and db,
numbers for gelu) are shared out to torch.get_num_threads() threads; which thread takes which changes no bit.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from .build import library
from .library import isa, native

_DTYPES = {torch.float32: 0, torch.bfloat16: 2}  # `Dtype` of cpu/csrc/attention/call.h


def takes(x: Any) -> bool:
    """From dtype and device alone, as a workspace is declared: float32 or bfloat16 on a CPU, and the library is there."""
    return x.dtype in _DTYPES and torch.device(x.device).type == "cpu" and not isinstance(library(), str)


# `Norm` of cpu/csrc/rows/rowwise.h: sizes, dtypes, x y dy dx with strides, w b mean rstd dw db, eps
_NORM = struct.Struct("5q2q8q6qd")
_GELU = struct.Struct("8q")  # `Gelu`: n, threads, isa, dtype, h, a, da, dh


def _rows(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))


def _data(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def norm_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *, y: Tensor, mean: Tensor | None, rstd: Tensor
) -> None:
    """y, rstd, and mean unless it is an RMS norm's None."""
    call = _NORM.pack(
        *x.shape, torch.get_num_threads(), isa(), False, _DTYPES[x.dtype], _DTYPES[w.dtype],
        *_rows(x), *_rows(y), *_rows(None), *_rows(None), _data(w), _data(b), _data(mean), _data(rstd), 0, 0, eps,
    )  # fmt: skip
    native().tilegrad_native_norm_fwd(call)


def norm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor | None, rstd: Tensor, *,
    dx: Tensor | None, dw: Tensor | None, db: Tensor | None, accumulate: bool,
) -> None:  # fmt: skip
    """dx += …   dw and db += …, or = … where accumulate is False."""
    call = _NORM.pack(
        *x.shape, torch.get_num_threads(), isa(), accumulate, _DTYPES[x.dtype], _DTYPES[w.dtype],
        *_rows(x), *_rows(None), *_rows(dy), *_rows(dx),
        _data(w), 0, _data(mean), _data(rstd), _data(dw), _data(db), 0.0,
    )  # fmt: skip
    native().tilegrad_native_norm_bwd(call)


def column_sums(x: Tensor, *, sums: Tensor, accumulate: bool) -> None:
    """sums += Σ_n x, or = where accumulate is False.       x (N, C)   sums (C,), float32"""
    dtype = _DTYPES[x.dtype]
    call = _NORM.pack(
        *x.shape, torch.get_num_threads(), isa(), accumulate, dtype, dtype,
        *_rows(None), *_rows(None), *_rows(x), *_rows(None), 0, 0, 0, 0, 0, _data(sums), 0.0,
    )  # fmt: skip
    native().tilegrad_native_norm_bwd(call)


def gelu_fwd(h: Tensor, *, a: Tensor) -> None:
    """a = gelu(h), both contiguous."""
    call = _GELU.pack(h.numel(), torch.get_num_threads(), isa(), _DTYPES[h.dtype], _data(h), _data(a), 0, 0)
    native().tilegrad_native_gelu(call)


def gelu_bwd(da: Tensor, h: Tensor, *, dh: Tensor) -> None:
    """dh = da ∘ gelu'(h), all contiguous."""
    call = _GELU.pack(h.numel(), torch.get_num_threads(), isa(), _DTYPES[h.dtype], _data(h), 0, _data(da), _data(dh))
    native().tilegrad_native_gelu(call)
