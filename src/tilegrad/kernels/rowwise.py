"""Norms and gelu of float32 rows on a CPU, in C++: one walk over memory where a chain of torch ops has five to ten.

The equations are in norm.py and activation.py, the walks in native/rowwise.cpp. No scratch. Rows (columns for dw and db,
numbers for gelu) are shared out to torch.get_num_threads() threads; which thread takes which changes no bit.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from .native_build import library
from .native_library import isa, native


def takes(x: Any) -> bool:
    """From dtype and device alone, as a workspace is declared: float32 on a CPU, and the library is there."""
    return x.dtype == torch.float32 and torch.device(x.device).type == "cpu" and not isinstance(library(), str)


_NORM = struct.Struct("5q8q6qd")  # `Norm` of native/rowwise.h: sizes, x y dy dx with strides, w b mean rstd dw db, eps
_GELU = struct.Struct("7q")  # `Gelu`: n, threads, isa, h, a, da, dh


def _rows(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))


def _data(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def norm_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *, y: Tensor, mean: Tensor | None, rstd: Tensor
) -> None:
    """y, rstd, and mean unless it is an RMS norm's None."""
    none = (0, 0)
    call = _NORM.pack(
        *x.shape, torch.get_num_threads(), isa(), False, *_rows(x), *_rows(y), *none, *none,
        _data(w), _data(b), _data(mean), _data(rstd), 0, 0, eps,
    )  # fmt: skip
    native().tilegrad_native_norm_fwd(call)


def norm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor | None, rstd: Tensor, adds: bool, *,
    dx: Tensor | None, dw: Tensor | None, db: Tensor | None,
) -> None:  # fmt: skip
    """dx += …   dw and db += …, or = … where adds is False."""
    call = _NORM.pack(
        *x.shape, torch.get_num_threads(), isa(), adds, *_rows(x), 0, 0, *_rows(dy), *_rows(dx),
        _data(w), 0, _data(mean), _data(rstd), _data(dw), _data(db), 0.0,
    )  # fmt: skip
    native().tilegrad_native_norm_bwd(call)


def gelu_fwd(h: Tensor, *, a: Tensor) -> None:
    """a = gelu(h), both contiguous."""
    call = _GELU.pack(h.numel(), torch.get_num_threads(), isa(), _data(h), _data(a), 0, 0)
    native().tilegrad_native_gelu(call)


def gelu_bwd(da: Tensor, h: Tensor, *, dh: Tensor) -> None:
    """dh = da ∘ gelu'(h), all contiguous."""
    call = _GELU.pack(h.numel(), torch.get_num_threads(), isa(), _data(h), 0, _data(da), _data(dh))
    native().tilegrad_native_gelu(call)
