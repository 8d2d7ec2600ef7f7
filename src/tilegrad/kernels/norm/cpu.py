"""Norms in C++, in one pass over memory; torch ops need five to ten. The loops are in cpu/csrc/rows/norm_gelu.cpp. dx_sum and
the recomputed y are separate passes over cached data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..column_sum import cpu as column_sum
from ..cpu.abi import pack_norm
from ..cpu.library import NativeCall, native, run_native
from ..cpu.rows import address, rows, shared
from ..scratch import Scratch, Shapes, TensorLike

if TYPE_CHECKING:
    from . import Gradients


def workspace(x: TensorLike, *, backward: bool) -> Shapes:
    return {}


def fwd(
    x: Tensor, f: Tensor | None, w: Tensor, b: Tensor | None, eps: float, *,
    x1: Tensor | None, y: Tensor, mean: Tensor | None, rstd: Tensor, scratch: Scratch,
) -> NativeCall:  # fmt: skip
    return _normalise(x, w, b, eps, y=y, mean=mean, rstd=rstd, f=f, x1=x1)


def bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor | None, rstd: Tensor, b: Tensor | None, *,
    out: Gradients, scratch: Scratch,
) -> None:  # fmt: skip
    dx, dw, db, dx_sum, y, accumulate = out
    vectors = map(address, (w, None, mean, rstd, dw, db))
    call = pack_norm(*shared(x, w.dtype, accumulate=accumulate), rows(x), rows(None), rows(dy), rows(dx), *vectors)
    native().tilegrad_native_norm_bwd(call)
    if dx is not None and dx_sum is not None:
        column_sum.fwd(dx, sums=dx_sum, accumulate=accumulate, scratch={})
    if y is not None:
        _normalise(x, w, b, 0.0, y=y, mean=mean, rstd=rstd)


def _normalise(
    x: Tensor, w: Tensor, b: Tensor | None, eps: float, *,
    y: Tensor, mean: Tensor | None, rstd: Tensor, f: Tensor | None = None, x1: Tensor | None = None,
) -> NativeCall:  # fmt: skip
    """eps = 0: mean and rstd are inputs."""
    vectors = map(address, (w, b, mean, rstd))
    matrices = rows(x), rows(y), rows(None), rows(None)
    call = pack_norm(*shared(x, w.dtype), *matrices, *vectors, eps=eps, f=rows(f), x1=rows(x1))
    return run_native(native().tilegrad_native_norm_fwd, call)
